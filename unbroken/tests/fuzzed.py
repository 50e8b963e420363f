"""Runs inputs, each in a fork of one process that has imported everything: python -m tests.fuzzed
INPUTS FOLDER.

``INPUTS`` is a JSON file, a list of :class:`Input` as dicts. Each runs in ``FOLDER/NUMBER``, its
output goes to ``FOLDER/NUMBER.txt``; what was wrong is printed as a JSON object per line. A fork
ends without the interpreter's clean-up, which would touch, and so copy, all that it shares: an
input that is refused takes a fifth of a second.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

AT_ONCE = 2
PATIENCE_S = 30.0  # then a command that goes on is asked to stop, and has as long for it
AT_WORK = (
    "training samples",
    "--checkpoint",
    "trial-000  ",
)  # printed by what may take long: it does what was asked
MEMORY = 16 * 2**30  # address space; torch's libraries alone take several GiB of it
MODULES = {
    "fit": "numerals.fit",
    "test": "unbroken.commands.test",
    "predict": "unbroken.commands.predict.command",
    "export": "unbroken.commands.export.command",
    "tune": "unbroken.commands.tune.command",
    "benchmark": "unbroken.commands.benchmark.command",
    "devices": "unbroken.commands.devices",
    "dashboard": "unbroken.commands.dashboard",
    "sweep": "unbroken.commands.sweep.command",
    "runs": "unbroken.commands.runs.command",
}


@dataclass
class Input:
    """A command line, and what lies in the folder that it runs in.

    Args:
        command: Name of the command.
        words: Its arguments.
        files: Path in the folder → text.
        base: A folder whose contents are there, too.
        change: For a checkpoint in the folder: its path, the keys that lead to an entry, the name
            of what is put there.
    """

    command: str
    words: list[str]
    files: dict[str, str] = field(default_factory=dict)
    base: str | None = None
    change: tuple[str, list[Any], str] | None = None


def replacements() -> dict[str, Any]:
    """What is put in the place of an entry of a checkpoint."""
    import torch

    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    return {
        "none": None,
        "yes": True,
        "zero": 0,
        "negative": -1,
        "huge": 10**20,
        "fraction": 0.5,
        "nan": float("nan"),
        "infinite": float("inf"),
        "text": "x",
        "no text": "",
        "path": "../../x",
        "class": "os.system",
        "markup": "<script>alert(1)</script>",
        "list": [1, "x", None],
        "empty list": [],
        "dict": {"x": 1},
        "empty dict": {},
        "numbers for keys": {1: 2, None: 3},
        "deep": deep,
        "scalar": torch.tensor(1.0),
        "tensor": torch.zeros(2, 3),
        "empty tensor": torch.zeros(0),
        "whole numbers": torch.ones(4, dtype=torch.int64),
        "not numbers": torch.full((5,), float("nan")),
        "made large": torch.zeros(1).expand(10**7, 10**3),  # a few bytes in the file
        "complex": torch.zeros(2, dtype=torch.complex64),
        "dtype": torch.float16,
        "device": torch.device("meta"),
        "bytes": b"\0\xff",
    }


def entries(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every entry of nested dicts and lists."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in inside:
        yield (*keys, key)
        yield from entries(item, (*keys, key))


def change(path: Path, keys: list[Any], name: str) -> None:
    """Replace an entry of a checkpoint, or take it away (``missing``); or change the file itself
    (no keys).
    """
    import torch

    if not keys:
        data = bytearray(path.read_bytes())
        kind, place = name.split()
        at = int(float(place) * len(data))
        if kind == "cut":
            del data[at:]
        else:
            data[at] ^= 0xFF
        path.write_bytes(data)
        return
    contents = torch.load(path, weights_only=True)
    parent = contents
    for key in keys[:-1]:
        parent = parent[key]
    if name == "missing":
        del parent[keys[-1]]
    else:
        parent[keys[-1]] = replacements()[name]
    torch.save(contents, path)


def prepare(given: Input) -> None:
    """Make the files of an input in the working folder."""
    if given.base is not None:
        shutil.copytree(given.base, ".", symlinks=True, dirs_exist_ok=True)
    for name, text in given.files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(text.encode(errors="surrogateescape"))
    if given.change is not None:
        name, keys, what = given.change
        change(Path(name), keys, what)


def seen() -> dict[str, bytes | str]:
    """Every file in the working folder; an empty folder of runs is nothing."""
    paths = [path for path in Path().rglob("*") if path.is_symlink() or not path.is_dir()]
    paths += [path for path in Path().rglob("*") if path.is_dir() and path.name != "checkpoints"]
    return {
        str(path): "link" if path.is_symlink() else "folder" if path.is_dir() else path.read_bytes()
        for path in paths
        if path.name != ".lock"
    }


def attempt(given: Input) -> None:
    """In a fork: run one input, write what came of it beside its folder, and end."""
    from unbroken.cli import start as command
    from unbroken.stopping import signals

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prepare(given)
    before = seen()
    module = importlib.import_module(MODULES[given.command])
    sys.argv = [str(module.__file__), *given.words]
    sys.modules["__main__"].__spec__ = importlib.util.find_spec(
        f"numerals.{given.command}"
    )  # of ranks that it starts
    signals.install()
    signals.imports_are_done()
    began = time.monotonic()
    run = partial(module.main, "numerals") if given.command != "fit" else module.job.main
    code = command.exit_code(run, given.words)
    after = seen() if code == 2 else before
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    Path(f"{Path.cwd()}.json").write_text(json.dumps([code, changed, time.monotonic() - began]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if 0 <= code < 256 else 1)


def fork(given: Input, folder: Path) -> int:
    """Start an input; returns its process id."""
    folder.mkdir()
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        log = os.open(f"{folder}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(folder)
        attempt(given)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(99)


def fault(folder: Path, status: int) -> str | None:
    """What was wrong with an input that has ended, or None."""
    told = Path(f"{folder}.txt").read_text(errors="replace")
    if "Traceback (most recent call last)" in told:
        frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', told)
        last = told.strip().splitlines()[-1][:200]
        ours = [
            f"{Path(name).name}:{line} {what}" for name, line, what in frames if "/project/" in name
        ]
        return f"traceback: {last} | {' < '.join(ours[:-4:-1])}"
    if not os.WIFEXITED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    code = os.WEXITSTATUS(status)
    if code == 143 and not any(sign in told for sign in AT_WORK):
        return f"not done after {PATIENCE_S} s: {told[-300:]}"
    if code in (0, 143):
        return None
    if code != 2:
        return f"exit code {code}: {told.strip()[-200:]}"
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    if len(errors) != 1:
        return f"{len(errors)} lines of errors: {told[-300:]}"
    if len(errors[0]) > 1000:
        return f"an error of {len(errors[0])} characters: {errors[0][:200]}"
    _, changed, _ = json.loads(Path(f"{folder}.json").read_text())
    return f"refused, but changed {', '.join(changed[:5])} | {errors[0][:150]}" if changed else None


def run_all(inputs: list[Input], folder: Path) -> Iterator[tuple[int, str]]:
    """Run every input; yields the number of each that went wrong, and what was wrong."""
    waiting, running = list(enumerate(inputs))[::-1], dict[int, tuple[int, float, bool]]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, given = waiting.pop()
            running[fork(given, folder / str(number))] = number, time.monotonic(), False
        time.sleep(0.005)
        for pid, (number, began, asked) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            took = time.monotonic() - began
            if ended:
                del running[pid]
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                wrong = fault(folder / str(number), status)
                if wrong is None and took > 2 * PATIENCE_S:
                    wrong = f"took {took:.0f} s"
                if wrong is not None:
                    yield number, wrong
                else:
                    Path(f"{folder / str(number)}.txt").unlink()
                shutil.rmtree(folder / str(number), ignore_errors=True)
            elif took > PATIENCE_S and not asked:
                os.kill(pid, signal.SIGTERM)
                running[pid] = number, began, True
            elif took > 2 * PATIENCE_S:
                os.killpg(pid, signal.SIGKILL)


def main() -> None:
    """Run the inputs of a file."""
    from unbroken.machine import threads

    threads.configure()
    gc.disable()
    from unbroken.cli.cli import configure
    from unbroken.errors import UserError

    for module in MODULES.values():
        with suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module)
    from numerals.fit import job

    with suppress(UserError):
        configure(job, "fit", ["--no_such_flag"])  # the parser remembers what it has looked up
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a fork would lack the threads that imports have started"
    )
    inputs = [Input(**given) for given in json.loads(Path(sys.argv[1]).read_text())]
    for number, wrong in run_all(inputs, Path(sys.argv[2])):
        print(json.dumps([number, wrong]), flush=True)


if __name__ == "__main__":
    main()
