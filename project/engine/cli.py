"""The command line of ``fit`` and ``test``: LightningCLI with flat Trainer flags and errors of one line."""

import argparse
import inspect
import logging
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name  # feature: mnist
from typing import Any, Literal, NoReturn

import torch
import yaml
from jsonargparse.typing import register_type
from lightning.fabric.utilities.enums import LightningEnum
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, Namespace

import project.data  # noqa: F401 - known to the parser by their short names
from project.engine.command import explain, option_names
from project.engine.lightning_internals import values_are_no_files
from project.errors import UserError, require
from project.model import networks
from project.tables import flat, load_yaml

FLAT = frozenset(inspect.signature(Trainer).parameters)
TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 4,
    "use_distributed_sampler": False,  # our loaders shard, shuffle and resume; Lightning's pads evaluation sets
    "num_sanity_val_steps": 0,  # it would cost two batches at every start
}
DEFAULT_CLASSES = {
    "model": "project.model.MNISTClassifier",
    "data": "project.data.MNISTDataModule",
}  # feature: mnist
# Options of one launch, not settings of the run: config.yaml leaves them out
OF_THE_LAUNCH = (
    "ckpt_path",
    "run_name",
    "init_weights",
    "memory_snapshot",
    "allow_imports",
    "output",
    "config",
)
MONITORS: tuple[str, ...] = (
    "throughput",  # feature: throughput
    "memory",  # feature: memory
    "optimizer",  # feature: optimizer
)
register_type(
    torch.device
)  # StochasticWeightAveraging has one: without this, config.yaml would hold no value for it
# Timer has one, and YAML none
yaml.SafeDumper.add_multi_representer(
    LightningEnum, lambda dumper, value: dumper.represent_str(value.value)
)
HERE = Path(__file__).parent
OPTIONS: tuple[tuple[str, Any, Any, str], ...] = (  # Our own flags: name, type, default, help
    ("run_name", str | None, None, "The run's folder in checkpoints/ (default: a time stamp)."),
    (
        "ckpt_path",
        str | None,
        None,
        "Go on from last, best, auto (last whole one, else afresh) or a file.",
    ),
    (
        "init_weights",
        str | None,
        None,
        "Start a new run from the weights of another run's checkpoint.",
    ),
    (
        "monitor",
        str | None,
        None,
        "The metric that best.ckpt follows (default: the module's own choice).",
    ),
    ("mode", str | None, None, "Whether its largest (max) or smallest (min) value is the best."),
    ("monitors", str, "all", f"Any of {','.join(MONITORS)}; all or none."),
    ("report", bool, True, "Write report.html at the end."),  # feature: report
    (
        "checkpoint_every",
        str,
        "60s",
        "Save last.ckpt every so many optimizer steps (500) or seconds (60s).",
    ),
    (
        "matmul_precision",
        Literal["highest", "high", "medium"] | None,
        None,
        "float32: high is TF32, medium bfloat16.",
    ),
    (
        "memory_snapshot",
        str | None,
        None,
        "Record CUDA allocations to FILE, for PyTorch's viewer.",
    ),  # feature: memory
    ("tensorboard", bool, False, "Also write TensorBoard files into the run's folder."),
    (
        "allow_imports",
        str | None,
        None,
        "Packages that a checkpoint's configuration may name besides your own.",
    ),
)


class CommandLine:
    """A command line and its ``--config`` files, read before the parser is made; a UserError for a bad file."""

    def __init__(self, argv: list[str]) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("-c", "--config", action="append", default=[])
        try:
            found, others = parser.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise UserError(explain(str(error), [])) from None
        typed = [_full_name(before, word) for before, word in pairwise(["", *others])]
        self.words = [
            *(f"--config={file}" for file in found.config),
            *typed,
        ]  # files first, so that what is typed wins
        given = [flat(_read_config(file)) for file in found.config]
        self.added: dict[
            str, list[str]
        ] = {}  # list → classes that the line adds to it, with ``+=``
        for word, after in pairwise([*typed, None]):
            name, equals, value = str(word).partition("=")
            if name.startswith("--"):
                given.append(flat({name[2:]: value if equals else after}))
            if name.endswith("+"):
                self.added.setdefault(name[2:-1], []).append(str(value if equals else after))
        classes = {name: f"{name}.class_path" for name in ("model", "data", "model.network")}
        # by full name without init_args; of several the last
        self.given = {
            classes.get(name, name): value for settings in given for name, value in settings.items()
        }
        self.asks_for_help = "--help" in typed or "-h" in typed
        limits = (self.value(f"trainer.{flag}") for flag in ("max_steps", "max_time"))
        self.sets_a_length = any(limit not in (None, "-1") for limit in limits)

    def value(self, name: str) -> str | None:
        """An option's value: typed, else of the last config file that has it; None where not given, or null."""
        found = self.given.get(name)
        return None if found is None or str(found) == "null" else str(found)


def _full_name(before: str, word: str) -> str:
    """A word of a command line, with the section of a Trainer flag or the module of a network of ours."""
    flag = re.match(r"--(\w+)(?=$|[=.+])", word)
    if flag and flag[1] in FLAT:
        return f"--trainer.{word[2:]}"
    option, _, name = word.rpartition("=")  # feature: images
    if {before, option} & {
        "--model.network",
        "--model.network.help",
    } and name in networks.__all__:  # feature: images
        return (
            f"{word.removesuffix(name)}{networks.__name__}.{name}"  # torchvision, too, has an MLP
        )
    return word


def _read_config(name: str) -> dict[str, Any]:
    try:
        content = load_yaml(Path(name).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--config {name} cannot be read: {getattr(error, 'strerror', None) or error}."
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"--config {name} is not valid YAML{place}.") from None
    require(
        isinstance(content, dict),
        f"--config {name}",
        "hold sections (trainer:, model:, data:)",
        str(content)[:40],
    )
    if flag := next((key for key in content if key in FLAT), None):
        raise UserError(
            f"--config {name}: write {flag} under trainer:, as in `trainer: {{{flag}: ...}}`."
        )
    if unused := {"optimizer", "lr_scheduler"} & content.keys():
        here = "a module makes its own (configure_optimizers; project.model's take model.init_args.optimizer)"
        raise UserError(
            f"--config {name}: {min(unused)} is LightningCLI's automatic one; here {here}."
        )
    flags = content.get("trainer", {})
    require(
        isinstance(flags, dict),
        f"--config {name}: trainer",
        "hold flags and values",
        str(flags)[:40],
    )
    return dict(content)


def leave_out_added(settings: dict[str, Any], added: dict[str, list[str]]) -> None:
    """Take out of a resumed run's lists what its command line added and, typed again, adds again."""
    for name, classes in added.items():
        *path, last = name.split(".")
        section: Any = settings
        for part in path:
            section = section.get(part) or {}
            section = section.get("init_args") or section
        there = section[last] if isinstance(section.get(last), list) else []
        texts = [str(each.get("class_path") if isinstance(each, dict) else each) for each in there]
        before, now = ([text.rpartition(".")[2] for text in names] for names in (texts, classes))
        again = next(
            (n for n in range(len(now), 0, -1) if before[-n:] == now[:n]), 0
        )  # it may add more than before
        if again:
            section[last] = there[:-again]


def silence_unfounded_advice() -> None:
    """Hide Lightning's notes, and advice of Lightning and wandb that is wrong here; show every other warning."""
    for name in (
        "lightning.pytorch",
        "lightning.fabric",
    ):  # its import sets INFO; our own lines say what matters
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in (
        "callbacks.model_summary",
        "profilers.profiler",
    ):  # what was asked for by a flag is shown
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    for line in (
        (HERE / "unfounded_advice.txt").read_text(encoding="utf-8").splitlines()
    ):  # how each begins, as a regex
        warnings.filterwarnings("ignore", line.partition("  #")[0])


class OneLineParser(LightningArgumentParser):
    """Parser whose errors are a :class:`UserError` of one line, and whose help shows Trainer flags flat."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        shown = option_names(self)
        known = [*shown, *(f"--trainer.{name[2:]}" for name in shown if name[2:] in FLAT)]
        elsewhere = yaml.safe_load((HERE / "names_elsewhere.yaml").read_text(encoding="utf-8"))
        raise UserError(explain(re.sub(r'(--|")trainer\.', r"\1", message), known, elsewhere))

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        text = re.sub(
            r"(?m)^(\s+)--trainer\.(\w+)", r"\1--\2", super().format_help(*args, **kwargs)
        )
        return re.sub(
            r",\s+known\s+subclasses:[^)]*\)", ")", text
        )  # of torch.nn.Module they fill ten screens


class ProjectCLI(LightningCLI):
    """LightningCLI without sub-commands: defaults < ``base`` (a resumed run's configuration) < config files < typed
    flags. Any LightningModule and LightningDataModule may be named; a class that is named has its own defaults.
    """

    def __init__(self, line: CommandLine, prog: str, base: dict[str, Any] | None = None) -> None:
        self.line, self.base = line, base
        usage = f"python -m {prog} [--config FILE ...] [--option VALUE ...]"
        description = "What is typed wins over config files, and these win over the defaults."
        silence_unfounded_advice()
        super().__init__(  # without classes: any may be named, and no data module where the module brings its loaders
            trainer_defaults=TRAINER_DEFAULTS
            | ({"max_epochs": -1} if line.sets_a_length else {}),  # one limit only
            seed_everything_default=42,
            parser_kwargs={
                "prog": prog,
                "usage": usage,
                "description": description,
                "allow_abbrev": False,
            },
            parser_class=OneLineParser,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # it gives ``self.hparams`` text in the place of objects
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, kind, default, text in OPTIONS:
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        if parser.prog.endswith(".test"):
            parser.add_argument(
                "--output", type=str | None, help="Also write the metrics to FILE.json or FILE.csv."
            )
        # feature: mnist
        if self.base is not None:
            return
        model, data, network = (
            self.line.value(f"{part}.class_path") for part in ("model", "data", "model.network")
        )
        if model is None or model.rpartition(".")[2] == DEFAULT_CLASSES["model"].rpartition(".")[2]:
            # only if no network is named: otherwise ConvNet's sizes would become arguments of that network
            init_args = {} if network else {"network": {"class_path": "project.model.ConvNet"}}
            parser.set_defaults(
                {"model": {"class_path": DEFAULT_CLASSES["model"], "init_args": init_args}}
            )
        kind = None
        with suppress(
            Exception
        ):  # no model is named, or none that is there: the parser reports the reason
            kind = resolve_name(str(model))
        if data is None and getattr(kind, "train_dataloader", None) in (
            None,
            LightningModule.train_dataloader,
        ):
            parser.set_defaults({"data": {"class_path": DEFAULT_CLASSES["data"]}})
        # end feature: mnist

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        words = self.line.words
        if "-h" in words and parser.prog.endswith(".fit"):
            # what people change, on one screen; --help has the rest
            shown = re.sub(
                r"(?m) +#.*$", "", (HERE / "most_used.txt").read_text(encoding="utf-8")
            )  # marks of features
            print(shown.format(prog=parser.prog), end="")
            raise SystemExit(0)
        # feature: mnist
        if "--help" in words:
            print(parser.format_help())
        asked = [
            part
            for part in DEFAULT_CLASSES
            if "--help" in words or words[-1:] == [f"--{part}.help"]
        ]
        for part in asked:  # the help of the classes that are used follows the Trainer's
            with suppress(SystemExit):
                used = self.line.value(f"{part}.class_path") or DEFAULT_CLASSES[part]
                parser.parse_args([f"--{part}.help={used}"])
        if asked:
            raise SystemExit(0)
        # end feature: mnist
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                base = None
                if self.base is not None:
                    settings = {
                        key: deepcopy(self.base[key])
                        for key in self.base
                        if key not in OF_THE_LAUNCH
                    }
                    leave_out_added(settings, self.line.added)
                    with (
                        values_are_no_files()
                    ):  # a checkpoint's are all there; what is typed may name files
                        base = parser.parse_object(settings)  # what is typed with += changes it
                self.config = parser.parse_args(words, base)
            except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
                parser.error(str(error))
        if (
            seed := self.config.get("seed_everything")
        ) is True:  # as other LightningCLIs' files have it
            self.config["seed_everything"] = 0
        elif isinstance(seed, int):
            require(0 <= seed < 2**32, "--seed_everything", f"be between 0 and {2**32 - 1}", seed)

    def instantiate_classes(self) -> None:
        """Make module and data module, not the trainer: it needs the run's folder, see ``fit.build``."""
        try:
            self.config_init = self.parser.instantiate(self.config)
        except (
            ValueError,
            TypeError,
        ) as error:  # what a constructor refuses, wrapped in a list of types
            link: BaseException | None = error
            while link is not None and not isinstance(link, UserError):
                link = link.__cause__ or link.__context__
            raise link or UserError(explain(str(error), [])) from None


@dataclass
class Configuration:
    """What a command line means: its objects, and its values."""

    module: LightningModule
    datamodule: LightningDataModule | None
    trainer: dict[str, Any]  # the Trainer's arguments
    options: Any  # namespace of our own flags
    resolved: dict[str, Any]  # everything as plain values, as config.yaml holds it
    _make: Callable[[], Any] = field(repr=False)  # a namespace with a new module

    @cached_property
    def monitors(self) -> list[str]:
        """The monitors that ``--monitors`` names."""
        text = self.options.monitors
        names = {"all": [*MONITORS], "none": []}.get(
            text, [part.strip() for part in text.split(",")]
        )
        for name in names:
            require(
                name in MONITORS,
                "--monitors",
                f"be any of {', '.join(MONITORS)}, or all, or none",
                name,
            )
        return names

    def fresh_module(self) -> LightningModule:
        """A new module of the same class and arguments, its random weights made by the run's seed."""
        seed = self.options.seed_everything
        seed_everything(seed if type(seed) is int else 42, verbose=False)
        return self._make().model


def configure(argv: list[str], prog: str, base: dict[str, Any] | None = None) -> Configuration:
    """What a command line of the command ``prog`` means, or a UserError; for ``base`` see :class:`ProjectCLI`."""
    cli = ProjectCLI(CommandLine(argv), prog, base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = cli.parser.dump(cli.config, skip_none=False, skip_link_targets=False)
    plain = {key: value for key, value in yaml.safe_load(text).items() if key not in OF_THE_LAUNCH}
    make = partial(
        cli.parser.instantiate, Namespace(model=cli.config.model), instantiate_groups=False
    )
    made = cli.config_init
    if base is not None and hasattr(made.get("data"), "may_download"):  # feature: mnist
        made.data.may_download = (
            cli.line.value("data.root") is not None
        )  # not into what a checkpoint alone names
    return Configuration(made.model, made.get("data"), dict(made.trainer), cli.config, plain, make)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line per setting that differs, such as ``model.lr: 0.01 → 0.003``."""
    old, new = flat(before), flat(after)
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key)} → {new.get(key)}" for key in changed]
