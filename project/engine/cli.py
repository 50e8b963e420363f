"""The command line of ``fit`` and its kin: LightningCLI, with every Trainer flag also flat and errors in one line."""

from __future__ import annotations

import contextlib
import copy
import tempfile
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from project.data.base import BatchedDataModule
from project.engine.checkpoint_files import load_weights, record
from project.engine.command import explain
from project.engine.progress import silence_unfounded_advice
from project.engine.ranks import decided_by_rank_zero
from project.engine.run_folder import ROOT, Run, choose
from project.errors import UserError
from project.model import networks
from project.model.classifier import ImageClassifier

DEFAULTS: dict[str, Any] = {
    "trainer.max_epochs": 5,
    # our sampler shards, shuffles and resumes; Lightning's replacement would pad evaluation sets
    "trainer.use_distributed_sampler": False,
    "trainer.num_sanity_val_steps": 0,  # tests run the real thing; a user pays for two batches at every start
    "model": {"class_path": "project.model.MNISTClassifier"},
    "data": {"class_path": "project.data.MNISTDataModule"},
}
OF_THE_LAUNCH = ("ckpt_path", "run_name", "memory_snapshot")  # no setting of the run: config.yaml leaves them out
DEFAULT_NETWORK = {"class_path": "project.model.ConvNet"}


class OneLineParser(LightningArgumentParser):
    """Parser whose errors are a :class:`UserError` of one line, and whose Trainer flags work flat as well as nested."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(explain(message, [o for o in self._option_string_actions if o.startswith("--")]))

    def flatten(self, group: str) -> None:
        """Give every option ``--group.name`` the second spelling ``--name``."""
        for action in list(self._actions):
            spellings: Any = action.option_strings
            for option in list(spellings):
                flat = "--" + option.removeprefix(f"--{group}.")
                if option.startswith(f"--{group}.") and "." not in flat and flat not in self._option_string_actions:
                    spellings.append(flat)
                    self._option_string_actions[flat] = action

    def format_usage(self) -> str:
        return f"usage: python -m {self.prog} [--config FILE] [--run_name NAME] [--precision P] [--option VALUE ...]\n"


class ProjectCLI(LightningCLI):
    """LightningCLI without sub-commands: defaults < checkpoint (when resuming) < config files < typed flags.

    Args:
        argv: Command-line arguments.
        prog: What ``--help`` calls the command.
        base: A configuration that beats the defaults and is beaten by everything typed; for a resumed run its own.
    """

    def __init__(self, argv: list[str], prog: str = "project.fit", base: dict[str, Any] | None = None) -> None:
        self.base = base
        self.argv = argv
        silence_unfounded_advice()
        super().__init__(
            ImageClassifier,
            BatchedDataModule,
            save_config_callback=None,  # ours writes one resolved file into the run's folder
            seed_everything_default=42,
            parser_kwargs={"prog": prog, "allow_abbrev": False, "description": __doc__},
            parser_class=OneLineParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=argv,
            run=False,
            auto_configure_optimizers=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_name",
            type=str | None,
            default=None,
            help="The run's folder in checkpoints/ (default: a time stamp).",
        )
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="Go on from last, best, auto (last whole one, else afresh) or a file.",
        )
        parser.add_argument(
            "--checkpoint_every",
            type=str,
            default="60s",
            help="Save last.ckpt at least every so many optimizer steps (500) or seconds (60s).",
        )
        parser.add_argument(
            "--matmul_precision",
            type=str | None,
            default=None,
            help="float32 matrix products: highest, high (TF32) or medium (bfloat16).",
        )
        parser.add_argument(
            "--memory_snapshot",
            type=str | None,
            default=None,
            help="Record CUDA allocations to FILE, for PyTorch's viewer.",
        )
        parser.add_argument(
            "--tensorboard", type=bool, default=False, help="Also write TensorBoard files into the run's folder."
        )
        parser.set_defaults(DEFAULTS)
        if sets_a_length(self.argv):  # then that is the limit
            parser.set_defaults({"trainer.max_epochs": -1})
        if not names_a_network(self.argv):  # else ConvNet's sizes would stay as arguments of the network that is named
            parser.set_defaults({"model": {**DEFAULTS["model"], "init_args": {"network": DEFAULT_NETWORK}}})
        assert isinstance(parser, OneLineParser)
        parser.flatten("trainer")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = our_networks(configs_first(list(args)))
            check_configs(arguments)
            if self.base is not None:
                path = Path(folder) / "checkpoint.yaml"
                path.write_text(yaml.safe_dump(self.base))
                arguments = ["--config", str(path), *arguments]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.config = parser.parse_args(arguments)
        self.config.pop("config", None)

    def instantiate_classes(self) -> None:
        """What a constructor refuses is the user's mistake; jsonargparse wraps it in a recital of types."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError) as error:
            link: BaseException | None = error
            while link is not None:
                if isinstance(link, UserError):
                    raise link from None
                link = link.__cause__ or link.__context__
            raise UserError(explain(str(error), [])) from None

    def resolved(self) -> dict[str, Any]:
        """The whole configuration as plain values, as config.yaml and the checkpoints hold it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain: dict[str, Any] = yaml.safe_load(
                self.parser.dump(self.config, skip_none=False, skip_link_targets=False)
            )
        return {key: value for key, value in plain.items() if key not in OF_THE_LAUNCH}

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Not here: the trainer needs the run's folder, see :func:`project.engine.trainer.make_trainer`."""
        return None  # type: ignore[return-value]


class TestCLI(ProjectCLI):
    """The command line of ``test``: model and data of the checkpoint, Trainer flags, ``--output``."""

    __test__ = False  # pytest: this is no test class

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--output", type=str | None, default=None, help="Also write the metrics to FILE.json or FILE.csv."
        )


@dataclass
class Configuration:
    """What a command line means, with its classes made."""

    module: LightningModule
    datamodule: BatchedDataModule
    trainer: dict[str, Any]  # the Trainer's arguments
    options: Any  # namespace of our own flags
    resolved: dict[str, Any]  # everything as plain values, as config.yaml holds it
    _cli: ProjectCLI

    def fresh_module(self, seed: int | None = None) -> LightningModule:
        """A new module of the same class and arguments, its random weights made by ``seed`` (default: the run's)."""
        chosen = self.options.seed_everything if seed is None else seed
        seed_everything(chosen if isinstance(chosen, int) and not isinstance(chosen, bool) else 42, verbose=False)
        self._cli.instantiate_classes()
        module: LightningModule = self._cli.model
        return module


def configure(argv: list[str], prog: str, base: dict[str, Any] | None = None) -> Configuration:
    """Parse a command line and make the module, the data module and the Trainer's arguments it names."""
    return of_cli(ProjectCLI(argv, prog, base))


def of_cli(cli: ProjectCLI) -> Configuration:
    """TEMPORARY."""
    return Configuration(cli.model, cli.datamodule, dict(cli.config_init.trainer), cli.config, cli.resolved(), cli)


def read_configuration(argv: list[str], prog: str) -> tuple[Configuration, Run, list[str]]:
    """Parse ``argv``, find the run it means; where that is resumed, put its configuration beneath what is typed.

    Returns:
        The command line with module and data module instantiated, the run, and lines that tell the differences.
    """
    run_name, ckpt_path = (typed_or_configured(argv, name) for name in ("run_name", "ckpt_path"))
    root = Path(typed_or_configured(argv, "trainer.default_root_dir") or ROOT)
    cli = None
    if ckpt_path is None or (ckpt_path == "auto" and run_name is None) or "--help" in argv or "-h" in argv:
        cli = ProjectCLI(argv, prog)  # a new run: what is wrong with a flag is said before there is a folder
    run = Run.from_plain(decided_by_rank_zero(lambda: choose(root, run_name, ckpt_path).to_plain()))
    if run.checkpoint is None:
        return of_cli(cli or ProjectCLI(argv, prog)), run, []
    known = record(run.checkpoint)
    base = copy.deepcopy(known["config"])
    if sets_a_length(argv):  # the one typed now; the saved max_epochs would come before it
        base["trainer"]["max_epochs"] = -1
    cli = ProjectCLI(argv, prog, base=base)
    load_weights(cli.model, run.checkpoint)  # Lightning does it again; here, what does not fit is said in a line
    cli.datamodule.stay_with(known.get("data_source"))
    before, after = flat(known["config"]), flat(cli.resolved())
    changes = [
        f"{key}: {before.get(key)} → {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    return of_cli(cli), run, changes


def build_from_config(config: dict[str, Any], overrides: list[str]) -> tuple[LightningModule, BatchedDataModule]:
    """The module (random weights) and data module of a resolved configuration; the network is not compiled."""
    cli = ProjectCLI(overrides, base=for_loading(config))
    return cli.model, cli.datamodule


def for_loading(config: dict[str, Any]) -> dict[str, Any]:
    """A resolved configuration as it suits a checkpoint that is only used: not compiled, nothing downloaded."""
    config = copy.deepcopy(config)
    init_args = config["model"].get("init_args", {})
    if "compile" in init_args:
        init_args["compile"] = False
    # a network's `weights` names the ones it starts from, often a download; the checkpoint brings its own
    network_args = (init_args.get("network") or {}).get("init_args") or {}
    if "weights" in network_args:
        network_args["weights"] = None
    return config


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots, without the ``init_args`` levels, as they are typed."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}".replace(".init_args", "").replace("init_args", "").strip(".")
        if isinstance(value, dict) and value:
            found |= flat(value, f"{name}." if name else "")
        else:
            found[name] = value
    return found


# What was typed: put in order before the parser sees it, and read where the parser sees only text.


def typed_value(argv: list[str], option: str) -> str | None:
    """What was typed for one option, before anything is parsed; the last one counts, as it does when parsing."""
    values = [after for word, after in pairwise(argv) if word == option]
    values += [word.split("=", 1)[1] for word in argv if word.startswith(f"{option}=")]
    return values[-1] if values else None


def typed_or_configured(argv: list[str], name: str) -> str | None:
    """An option's value before anything is parsed: typed (one of ``trainer.`` also flat), else of the last config file
    that has it; None where it is not given, or null.
    """
    group, _, key = name.rpartition(".")
    spellings = [f"--{name}", *([f"--{key}"] if group == "trainer" else [])]
    values: list[Any] = [content.get(key) for content in config_sections(argv, group)]
    values += [typed_value(argv, spelling) for spelling in spellings]
    found = [str(value) for value in values if value is not None]
    return found[-1] if found and found[-1] != "null" else None


def configs_first(argv: list[str]) -> list[str]:
    """``argv`` with every ``--config FILE`` moved to the front, in order: what is typed wins wherever it stands."""
    configs: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("--config", "-c"):
            configs += [word, *([value] if (value := next(words, None)) is not None else [])]
        elif word.startswith("--config="):
            configs.append(word)
        else:
            others.append(word)
    return configs + others


def config_files(argv: list[str]) -> list[str]:
    """The FILE of every ``--config FILE``, in order."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    return [value for flag, value in pairwise(words) if flag in ("--config", "-c")]


def check_configs(argv: list[str]) -> None:
    """Raise a UserError that names the file where a ``--config`` is missing, no YAML, or not a mapping."""
    for name in config_files(argv):
        try:
            content = yaml.safe_load(Path(name).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--config {name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise UserError(f"--config {name} is not valid YAML{place}.") from None
        if not isinstance(content, dict):
            raise UserError(f"--config {name} must hold sections (trainer:, model:, data:), got {str(content)[:40]}.")


def config_sections(argv: list[str], section: str) -> list[dict[str, Any]]:
    """The section (the whole where it is "") of every config file that has it.

    What is wrong with a file, :func:`check_configs` says.
    """
    found = []
    for name in config_files(argv):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
            content = yaml.safe_load(Path(name).read_text())
            found.append(content[section] if section else content)
    return [content for content in found if isinstance(content, dict)]


def sets_a_length(argv: list[str]) -> bool:
    """Whether ``max_steps`` or ``max_time`` is typed, flat or nested, or stands in a config file, as a real limit."""
    return any(typed_or_configured(argv, f"trainer.{flag}") not in (None, "-1") for flag in ("max_steps", "max_time"))


def names_a_network(argv: list[str]) -> bool:
    """Whether a network's class is typed, or stands in a config file."""
    if typed_value(argv, "--model.network") is not None:
        return True
    for model in config_sections(argv, "model"):
        network = (model.get("init_args") or model).get("network")
        if isinstance(network, str) or (isinstance(network, dict) and "class_path" in network):
            return True
    return False


def our_networks(argv: list[str]) -> list[str]:
    """``argv`` with ``--model.network MLP`` spelled out: torchvision, which torchmetrics imports, has an MLP, too."""
    flag = "--model.network"
    spelled = []
    for before, word in zip(["", *argv], argv, strict=False):
        option, _, name = word.rpartition("=")
        if (before == flag or option == flag) and name in networks.__all__:
            word = f"{option}{'=' if option else ''}{networks.__name__}.{name}"
        spelled.append(word)
    return spelled


def parse_interval(text: str) -> tuple[float, int | None]:
    """``"60s"`` → (60.0, None); ``"500"`` or ``"500steps"`` → (60.0, 500).

    Raises:
        UserError: It is neither, or not above 0.
    """
    number = text.strip().removesuffix("steps").removesuffix("step").strip()
    try:
        if text.strip().endswith("s") and not text.strip().endswith(("steps", "step")):
            seconds = float(text.strip()[:-1])
            if seconds > 0:
                return seconds, None
        elif int(number) > 0:
            return 60.0, int(number)
    except ValueError:
        pass
    raise UserError(f"--checkpoint_every must be optimizer steps (500) or seconds (60s), above 0, got {text}.")
