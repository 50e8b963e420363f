"""How every command starts and ends: threads before torch, signals, errors as one line, exit codes.

Exit codes: 0 done, 2 bad input, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM), 1 anything else.
"""

import argparse
import errno
import gc
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from project import threads
from project.engine import signals
from project.errors import UserError, nearest
from project.tables import check_output
from project.waiting import waiting  # feature: waiting

# What the user can repair, and how: no space, no quota, no permission, read-only; and impossible file names.
FULL_OR_CLOSED = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
ADVICE = dict.fromkeys(FULL_OR_CLOSED, "Free space or choose a folder you may write to.")
ADVICE |= dict.fromkeys(
    (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "Name another file."
)

# Variables by which torchrun, SLURM and Lightning tell a process its place
NUMBERED = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_PORT",
]
NUMBERED += [
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NNODES",
    "JSM_NAMESPACE_RANK",
]
NO_MEMORY = "t allocate memory|failed to map segment"  # what torch on the CPU and the loader of libraries say
LONGEST = 800  # characters of an error: a value of a thousand is not shown whole


def prepare_process(name: str) -> None:
    """Set up the process of a command. Call it above the command's imports: torch reads thread settings only once.
    The garbage collector stays off until :func:`run`: it would visit the 650,000 objects that torch and Lightning make
    again and again as they are imported (4.3 s against 2.8 s; 2 cores, median of 3).
    """
    if name == "__main__" and not signals.state.importing:  # else it is set up
        gc.disable()
        signals.install()
        for number, name in (
            (1, "stdout"),
            (2, "stderr"),
        ):  # every print succeeds: a closed one goes nowhere
            if getattr(sys, name) is None:  # the next file to be opened would get its number
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
                setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - as long as the process
            getattr(sys, name).reconfigure(errors="replace")  # what a terminal cannot show
        sys.excepthook = lambda _, error, __: os._exit(
            report(error)
        )  # such as short memory in an import
        os.environ.pop(
            "MPLBACKEND", None
        )  # pictures go to files; a notebook's is not in every environment
        for variable in NUMBERED:  # Lightning reads some of them as it is imported
            if (value := os.environ.get(variable)) is not None and not (
                value.isascii() and value.isdigit()
            ):
                raise UserError(
                    f"the environment variable {variable} must be a whole number, got '{value}'. Unset it."
                )
        threads.configure()
        waiting.start()  # feature: waiting


def run(main: Callable[[list[str]], int | None]) -> None:
    """Run a command's ``main(argv)`` and end the process with the matching exit code."""
    prepare_process("__main__")
    signals.state.importing = False
    gc.freeze()
    gc.enable()
    if (
        not sys.warnoptions
    ):  # PYTHONWARNINGS wins; otherwise users see no deprecation notes of other packages
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
    code = exit_code(main, sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # noqa: PERF203 - as Python ends, it would be exit code 120
            code = code or (
                0 if isinstance(error, BrokenPipeError) else report(error)
            )  # `... | head` is no error
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def exit_code(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
    """Exit code of ``main(argv)``. Prints every error on stderr."""
    try:
        if word := next((word for word in argv if re.match("--.+=--$", word)), None):
            raise UserError(
                f"{word[:-3]} needs a value, got --."
            )  # of which argparse makes an empty list
        return main(argv) or 0
    except signals.Stopped as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except SystemExit as end:
        asked = signals.state.requested  # Lightning turns a Ctrl-C that reaches it into sys.exit(1)
        return (
            signals.Stopped(asked).exit_code
            if asked
            else (end.code if isinstance(end.code, int) else 1)
        )
    except Exception as error:
        return report(error)


def report(error: BaseException) -> int:
    """Print an error on stderr, as one line of a readable length if the user can repair it; returns the exit code."""
    if isinstance(error, UserError):
        message = str(error)
    elif isinstance(error, OSError) and error.errno in ADVICE:
        message = f"{error.filename or 'a file'}: {error.strerror}. {ADVICE[error.errno]}"
    elif isinstance(error, MemoryError) or re.search(NO_MEMORY, str(error)):
        message = f"not enough memory; a smaller --data.batch_size or network takes less. {error}"
    else:
        with suppress(OSError):
            traceback.print_exception(error)
        return 1
    message = " ".join(message.split())
    with suppress(OSError):  # it may be on the same full disk
        print(
            f"error: {message[:LONGEST]}{' ...' if message[LONGEST:] else ''}",
            file=sys.stderr,
            flush=True,
        )
    return 2


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Every option that ``--help`` shows."""
    return re.findall(r"(?m)^\s+(?:-\w, )?(--[\w.]+)", parser.format_help())


# feature: predict, export, tune, sweep, benchmark, devices, dashboard, runs, rename
class CommandParser(argparse.ArgumentParser):
    """Parser without abbreviations, whose errors are a :class:`UserError`; its help is a module's docstring ``doc``."""

    def __init__(self, prog: str, doc: str | None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(
            f"python -m {prog}", description=doc, formatter_class=as_written, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(explain(message, option_names(self)))


def take_word(
    argv: list[str], words: Collection[str], switches: tuple[str, ...] = ()
) -> tuple[str | None, list[str]]:
    """The first of ``words`` on a command line that is no option's value, or None; and the line without it. argparse
    does not know ``fit``'s options, and would take their values for the word. ``switches`` take no value.
    """
    for place, word in enumerate(argv):
        before = argv[place - 1] if place else ""
        takes_value = before.startswith("--") and "=" not in before and before not in switches
        if word in words and not takes_value:
            return word, argv[:place] + argv[place + 1 :]
    return None, argv


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add ``--ckpt_path`` and ``--allow_imports``."""
    which = "the checkpoint: a file, or best or last of the newest run (default: best)"
    parser.add_argument("--ckpt_path", metavar="best|last|PATH", help=which)
    packages = "packages that the checkpoint's configuration may name besides your own"
    parser.add_argument("--allow_imports", metavar="PACKAGES", help=packages)


def add_output(
    parser: CommandParser,
    option: str = "--output",
    endings: Sequence[str] = (".json", ".csv"),
    what: str = "",
) -> None:
    """Add an option for a file to write, whose path is checked as it is read."""
    metavar = "FILE" if len(endings) > 1 else f"FILE{endings[0]}"
    what = what or "also write what is printed: .json or .csv"
    parser.add_argument(
        option, metavar=metavar, type=lambda path: check_output(path, endings, option), help=what
    )


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import a library inside, without the garbage collector: see :func:`prepare_process`."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# end feature: predict, export, tune, sweep, benchmark, devices, dashboard, runs, rename


KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
KINDS["dict"] = "key: value pairs"
TOLD = {  # What jsonargparse says of an option's value, and what the user is told
    # by a nested parser of a class's arguments, with explain()
    r"- --([\w.]+) (must be .+?, got .+?)\.(?= - |$)": "{option}.{0} {1}.",
    r"the following arguments are required: (\w+)": "{option} needs {option}.{0}.",
    r"File does not exist: '?([^']+)'?": "{option}: there is no file {0}.",
    r"([\w.]+)\": Unable to load config '(.+?)'((?: - (?!Parser).+)?)": "--{0}: {1} is no file of flags and values{2}.",
}


def explain(message: str, options: list[str], elsewhere: Mapping[str, str] = {}) -> str:
    """A parser's error as one line: option, value, what is allowed; with the nearest of ``options``, ``elsewhere``."""
    message = " ".join(message.split())
    keys = re.findall(r'[Pp]arser key "([\w.]+)"', message)
    if found := re.search(
        r"unknown option --[\w.\-]+\.(?: Did you mean --[\w.\-]+\?)?", message
    ):  # by a nested parser
        return (
            re.sub("(?<= )--", "".join(["--", *(f"{key}." for key in keys)]), found[0])
            + " See --help."
        )
    if found := re.search(
        r"(?:^Option|Group '([\w.]+)' does not accept option) '([\w.]+)'", message
    ):
        name = "--" + ".".join(filter(None, found.groups()))
        return f"unknown option {name}.{nearest(name, options)} See --help."
    if found := re.search(r"[Uu]nrecognized arguments?:? (.*)", message):
        words = found[1].split()
        name = next((word.split("=")[0] for word in words if word.startswith("-")), "")
        if not name:
            return (
                f"unexpected argument '{words[0]}': every value follows its --option. See --help."
            )
        hint = f" Did you mean {elsewhere[name]}?" if name in elsewhere else nearest(name, options)
        return f"unknown option {name}.{hint} See --help."
    if found := re.search(r"arguments are required: (model|data)$", message):
        return f"--{found[1]}.class_path PACKAGE.CLASS, or a --config FILE with a section {found[1]}, is needed."
    if found := re.search(r"argument (?:\S+/)?(\S+): expected one argument", message):
        return f"{found[1]} needs a value."
    return _explain_value(message, "--" + ".".join(keys)) if keys else message[:400]


def _explain_value(message: str, option: str) -> str:
    for pattern, told in TOLD.items():
        if found := re.search(pattern, message):
            return told.format(*found.groups(), option=option)
    if choices := re.findall(r"Expected a typing\.Literal\[([^\]]*)\]", message):
        names = dict.fromkeys(name.strip(" '") for part in choices for name in part.split(","))
        allowed = f"one of {', '.join(names)}"
    elif re.search("dot import path|not a subclass|Import of", message):
        allowed = "a known class or an import path (package.module.Class)"
    else:
        kinds = [
            KINDS[kind]
            for kind in re.findall(r"Expected an? <class '(\w+)'>", message)
            if kind in KINDS
        ]
        allowed = " or ".join(dict.fromkeys(kinds))
    if not allowed:
        reasons = re.findall(
            r"Errors: - (.+?)(?= - Expected| Given value|$)", message
        )  # the innermost is the last
        return f"{option}: {(reasons[-1] if reasons else message)[:300]}"
    given = re.findall(r"NestedArg\(key='[\w.]+', val=(.+?)\)(?: -|$| Given)", message + " Given")
    value = re.search(r"(?:Given value|Got value): (.+?)(?: - | Given | Expected |$)", message)
    got = given[-1].strip("'") if given else value[1] if value else "something else"
    return f"{option} must be {allowed}, got {got}."
