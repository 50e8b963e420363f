"""The command line of ``fit`` and ``test``: LightningCLI with flat Trainer flags and errors of one
line.
"""

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, get_type_hints

import torch
import unbroken.data  # noqa: F401 - its classes are known to the parser by their short names
import yaml
from jsonargparse.typing import register_type
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, Namespace
from lightning.pytorch.loggers import Logger
from unbroken import contract
from unbroken.chosen import Chosen
from unbroken.cli.defaults import default_file, left_standing, of_the_launch, with_its_file
from unbroken.cli.explain import explain, with_choices
from unbroken.cli.nulls import refuse_nulls
from unbroken.cli.options import (
    FLAT,
    OF_THE_LAUNCH,
    OPTIONS,
    SWITCHES,
    TrainerFlags,
)
from unbroken.cli.parser import option_names
from unbroken.cli.plain_values import (
    dump_yaml,
    mark_texts,
    put_into_mappings,
    use_for_parsing,
    without_mark,
)
from unbroken.cli.precision import choose_precision
from unbroken.cli.program import Program
from unbroken.cli.shown_warnings import silence_unfounded_advice
from unbroken.cli.trackers import check_packages, make_later, takes_run_folder, words_of
from unbroken.cli.typed import (
    CLASS_PATH,
    CommandLine,
    leave_out_added,
    merged,
    named,
    refuse_class_that_is_not_there,
    sets_a_length,
)
from unbroken.errors import UserError, require
from unbroken.lightning_internals import values_are_no_files
from unbroken.run_folder import RUN_FOLDER
from unbroken.tables import flat
from unbroken.trust.strangers import Stranger

HERE = Path(__file__).parent
MOST_USED = HERE / "most_used.txt"
NAMES_ELSEWHERE = HERE / "names_elsewhere.yaml"
DEFAULT_SEED = 42
PLAIN = (str, int, float, list, tuple, dict, Path, type(None))
DESCRIPTION = "What is typed wins over config files, and these win over the defaults."
# StochasticWeightAveraging has a torch.device. Without this line config.yaml would hold no value
# for it.
register_type(torch.device)


class OneLineParser(LightningArgumentParser):
    """Parser whose errors are a :class:`UserError` of one line, and whose help shows Trainer flags
    flat.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        shown = option_names(self)
        of_trainer = [f"--trainer.{name[2:]}" for name in shown if name[2:] in FLAT]
        elsewhere = yaml.safe_load(NAMES_ELSEWHERE.read_text(encoding="utf-8"))
        as_typed = re.sub(r'(--|")trainer\.', r"\1", message)
        raise UserError(explain(as_typed, [*shown, *of_trainer], elsewhere, SWITCHES))

    def add_class_arguments(self, class_type: type, *args: Any, **kwargs: Any) -> list[str]:
        added = super().add_class_arguments(class_type, *args, **kwargs)
        if takes_run_folder(class_type):
            self.set_defaults(save_dir=RUN_FOLDER)
        return added

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text = super().format_help(*args, **kwargs)
        text = re.sub(r"(?m)^(\s+)--trainer\.(\w+)", r"\1--\2", text)
        # The known subclasses of torch.nn.Module fill ten screens.
        return re.sub(r",\s+known\s+subclasses:[^)]*\)", ")", text)


class CLI(LightningCLI):
    """LightningCLI without sub-commands. Any LightningModule and LightningDataModule may be named.

    Later wins: default classes, ``configs/default.yaml``, ``base``, config files, typed flags. A
    class that is named has its own defaults.

    Args:
        program: Whose command it is.
        command: The command's name, such as ``fit``.
        line: The command line.
        below: The settings of the default file.
        base: The configuration of a run that is resumed, or of a checkpoint that is used.
        chosen: What a run that is resumed chose by itself.
        stranger: Who has written ``base``, if it is not the user.
    """

    def __init__(
        self,
        program: Program,
        command: str,
        line: CommandLine,
        below: dict[str, Any],
        base: dict[str, Any] | None = None,
        chosen: Chosen | None = None,
        stranger: Stranger | None = None,
    ) -> None:
        self.program = program
        self.command = command
        self.line = line
        classes = named(program.default_classes)
        # What the command line leaves standing of the default file.
        self.below = left_standing(below, line.given, classes)
        self.base = base
        self.chosen = chosen or Chosen()
        self.stranger = stranger
        # What the user is told of a choice that was made for him.
        self.notes: list[str] = []
        # Only the typed limit counts.
        has_a_length = line.sets_a_length or sets_a_length(named(self.below))
        defaults = {"max_epochs": -1} if has_a_length else {}
        silence_unfounded_advice()
        use_for_parsing()
        # No classes are given: any may be named, and no data module where the module has its
        # loaders.
        super().__init__(
            trainer_class=TrainerFlags,
            trainer_defaults=defaults,
            seed_everything_default=DEFAULT_SEED,
            parser_kwargs={
                "prog": f"{program.package}.{command}",
                "usage": f"{program.command(command)} [--config FILE ...] [--option VALUE ...]",
                "description": DESCRIPTION,
                "allow_abbrev": False,
            },
            parser_class=OneLineParser,
            run=False,
            auto_configure_optimizers=False,
            # It would give self.hparams text in the place of objects.
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for option in OPTIONS:
            name = f"--{option.name}"
            parser.add_argument(name, type=option.kind, default=option.default, help=option.help)
        if self.command == "test":
            what = "Also write the metrics to FILE.json or FILE.csv."
            parser.add_argument("--output", type=str | None, help=what)
        if self.base is None:
            self._set_default_classes(parser)

    def _set_default_classes(self, parser: LightningArgumentParser) -> None:
        """Let the program's classes be used where nothing else is named."""
        classes = {part: {CLASS_PATH: path} for part, path in self.program.default_classes.items()}
        above = {**named(self.below), **self.line.given}
        parser.set_defaults(left_standing(classes, above))

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        words = [*self._words_below(), *self.line.words]
        if "-h" in words and self.command == "fit":
            _print_most_used(self.program)
            raise SystemExit(0)
        self._print_help(parser)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                given = merged(self.base or self.below, self.line.settings)
                typed = mark_texts(put_into_mappings(words, given), self._text_options())
                config = parser.parse_args(typed, self._parse_base(parser))
                for name, value in config.items():
                    if isinstance(value, str):
                        config[name] = without_mark(value)
                for part in ("model", "data"):
                    refuse_nulls(f"--{part}", config.get(part))
                    if self.stranger is not None and self.base is not None:
                        self.stranger.judge(part, self.base.get(part), config.get(part))
                self.config = config
                self._choose_precision()
            except UserError as error:
                refuse_class_that_is_not_there(str(error), self.line)
                raise UserError(with_choices(str(error), self._hints())) from None
            except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
                parser.error(str(error))
        seed = self.config.get("seed_everything")
        if seed is True:  # files of other LightningCLIs have it
            self.config["seed_everything"] = 0
            self.notes.append(
                "--seed_everything true is the seed 0: a number is a seed, and false sets none."
            )
        elif isinstance(seed, int):
            must = f"be between 0 and {2**32 - 1}"
            require(0 <= seed < 2**32, "--seed_everything", must, seed)

    def _words_below(self) -> list[str]:
        """The default file as the first ``--config`` of a command line: its text, without what the
        line replaces.
        """
        return [f"--config={dump_yaml(self.below)}"] if self.below else []

    def _choose_precision(self) -> None:
        """Put what ``--precision auto`` stands for in its place, so that the record has it."""
        flags = self.config.trainer
        if flags.precision != "auto":
            return
        reason = "as this run began" if "precision" in self.chosen.values else "on this machine"
        flags.precision = self.chosen.once("precision", lambda: choose_precision(flags.accelerator))
        self.notes.append(f"--precision auto is {flags.precision} {reason}.")

    def _hints(self) -> dict[str, Any]:
        """The types of the arguments of the named module and data module."""
        return self._hints_of("model") | self._hints_of("data")

    def _hints_of(self, part: str) -> dict[str, Any]:
        with suppress(Exception):  # a class that is not there, or a type that cannot be read
            kind = resolve_name(str(self.line.value(f"{part}.class_path")))
            return get_type_hints(kind.__init__)
        return {}

    def _text_options(self) -> set[str]:
        """The options of the named module and data module that take text, or None, alone."""
        return {
            f"--{part}.{name}"
            for part in ("model", "data")
            for name, hint in self._hints_of(part).items()
            if hint in (str, str | None)
        }

    def _parse_base(self, parser: LightningArgumentParser) -> Namespace | None:
        """The settings of a resumed run, which typed words change, also with ``+=``."""
        if self.base is None:
            return None
        settings = {
            name: deepcopy(value) for name, value in self.base.items() if name not in OF_THE_LAUNCH
        }
        leave_out_added(settings, self.line.added)
        # All settings of a checkpoint are in it. Only what is typed may name files.
        with values_are_no_files():
            return parser.parse_object(settings)

    def _print_help(self, parser: LightningArgumentParser) -> None:
        """Show the help of the classes that are used as well, and end, if help is asked for."""
        words = self.line.words
        classes = self.program.default_classes
        if "--help" in words:
            self._show_below(parser)
            print(parser.format_help())
            asked = list(classes)
        else:
            asked = [part for part in classes if words[-1:] == [f"--{part}.help"]]
        for part in asked:
            used = self.line.value(f"{part}.class_path") or classes[part]
            with suppress(SystemExit):
                parser.parse_args([f"--{part}.help={used}"])
        if asked:
            raise SystemExit(0)

    def _show_below(self, parser: LightningArgumentParser) -> None:
        """Let the help show the default file's values. What is wrong in it is told by a run."""
        for name, value in self.below.items():
            is_section = isinstance(value, dict) and name not in ("model", "data")
            values = flat({name: value}) if is_section else {name: value}
            with suppress(Exception):  # the parser raises errors of many kinds
                parser.set_defaults(values)

    def instantiate_classes(self) -> None:
        """Make module and data module, not the Trainer: it needs the run's folder, see
        :meth:`unbroken.run.job.Job.build`.
        """
        try:
            later = [(make_later, Logger, True)]
            self.config_init = self.parser.instantiate(self.config, instantiators=later)
        except (ValueError, TypeError) as error:
            raise _own_error(error) or UserError(explain(str(error), [])) from None


@dataclass
class Configuration:
    """What a command line means: its objects, and its values."""

    program: Program  # whose command it is
    module: LightningModule
    datamodule: LightningDataModule | None
    trainer: dict[str, Any]  # the Trainer's arguments
    options: Any  # namespace of our own flags
    resolved: dict[str, Any]  # everything as plain values, as config.yaml holds it
    notes: list[str]  # what the user is told of choices that were made for him
    chosen: Chosen  # these choices, and those that the Trainer's making adds
    _make: Callable[[], Any] = field(repr=False)  # a namespace with a new module
    _reread: Callable[[], list[str]] = field(repr=False)

    @property
    def seed(self) -> int | None:
        """What ``--seed_everything`` gives; None where it is ``false``."""
        seed = self.options.seed_everything
        is_number = isinstance(seed, int) and not isinstance(seed, bool)
        return seed if is_number else None

    @cached_property
    def trackers(self) -> list[str]:
        """The trackers that log, by their words."""
        words = words_of(self.trainer["logger"])
        if self.options.tensorboard and "tensorboard" not in words:
            words.append("tensorboard")
        return words

    def lost_in_record(self) -> list[str]:
        """A line per setting that ``config.yaml`` does not repeat: what was made → what it says."""
        return self._reread()

    def fresh_module(self) -> LightningModule:
        """A new module of the same class and arguments, its random weights drawn by the seed."""
        seed_everything(DEFAULT_SEED if self.seed is None else self.seed, verbose=False)
        return self._make().model


def configure(
    program: Program,
    command: str,
    argv: list[str],
    base: dict[str, Any] | None = None,
    chosen: Chosen | None = None,
    stranger: Stranger | None = None,
) -> Configuration:
    """What a command line means, or a UserError. For the arguments see :class:`CLI`."""
    below = {} if command == "test" and base is not None else default_file(program)
    if base is not None:
        below = of_the_launch(below)
    line = CommandLine(argv, program.networks, below)
    try:
        cli = CLI(program, command, line, below, base, chosen, stranger)
    except UserError as error:
        told = with_its_file(str(error), program.defaults_name, line.given, line.below)
        raise UserError(told) from None
    make = partial(
        cli.parser.instantiate, Namespace(model=cli.config.model), instantiate_groups=False
    )
    made = cli.config_init
    data = made.get("data")
    if stranger is not None and isinstance(data, contract.MayDownload):
        # Opening a stranger's file fetches nothing. Who types where the data are asks for them.
        typed = [line.value("data.root"), line.value("data.source")]
        data.may_download = typed != [None, None]
    resolved = plain(cli)
    reread = partial(_differs_when_read_again, cli, resolved)
    config = Configuration(
        program=program,
        module=made.model,
        datamodule=data,
        trainer=dict(made.trainer),
        options=cli.config,
        resolved=resolved,
        notes=cli.notes,
        chosen=cli.chosen,
        _make=make,
        _reread=reread,
    )
    check_packages(config.trackers, config.trainer["logger"])
    return config


def plain(cli: CLI) -> dict[str, Any]:
    """The configuration as plain values, without the options of one launch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = cli.parser.dump(cli.config, skip_none=False, skip_link_targets=False)
    values = yaml.safe_load(text)
    return {name: value for name, value in values.items() if name not in OF_THE_LAUNCH}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line per setting that differs, such as ``model.lr: 0.01 → 0.003``."""
    old = flat(before)
    new = flat(after)
    # As texts: --limit_val_batches 1 is one batch, and 1.0 all of them.
    changed = [name for name in sorted(old | new) if repr(old.get(name)) != repr(new.get(name))]
    return [f"{name}: {old.get(name)} → {new.get(name)}" for name in changed]


def _differs_when_read_again(cli: CLI, resolved: dict[str, Any]) -> list[str]:
    """What differs between the configuration and its record, where that is read again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            again = cli.parser.parse_object(deepcopy(resolved))
        except Exception as error:  # the parser raises errors of many kinds
            return [" ".join(str(error).split())]
    made = flat(cli.config.as_dict())
    read = flat(again.as_dict())
    lines = []
    for name, value in made.items():
        is_of_run = name.partition(".")[0] not in OF_THE_LAUNCH
        if is_of_run and isinstance(value, PLAIN) and not _are_equal(value, read.get(name)):
            lines.append(f"{name}: {value!r} → {read.get(name)!r}")
    return lines


def _are_equal(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)  # nan is not equal to itself


def _print_most_used(program: Program) -> None:
    """What people change, on one screen; ``--help`` has the rest."""
    text = MOST_USED.read_text(encoding="utf-8")
    print(text.format(command=program.command("fit")), end="")


def _own_error(error: BaseException) -> UserError | None:
    """The UserError that a constructor raised, and the parser wrapped."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, UserError):
            return link
        link = link.__cause__ or link.__context__
    return None
