"""The command line of ``fit`` and its kin: LightningCLI, with every Trainer flag also flat and errors in one line."""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from project.checkpoints import load_weights, record
from project.cli_errors import explain
from project.data.base import BatchedDataModule
from project.errors import UserError
from project.model.classifier import ImageClassifier
from project.progress import silence_unfounded_advice
from project.ranks import decided_by_rank_zero
from project.runs import ROOT, Run, choose
from project.typed import (
    check_configs,
    configs_first,
    names_a_network,
    our_networks,
    sets_a_length,
    typed_or_configured,
)

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
        """Not here: the trainer needs the run's folder, see :func:`project.trainer.make_trainer`."""
        return None  # type: ignore[return-value]


class TestCLI(ProjectCLI):
    """The command line of ``test``: model and data of the checkpoint, Trainer flags, ``--output``."""

    __test__ = False  # pytest: this is no test class

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--output", type=str | None, default=None, help="Also write the metrics to FILE.json or FILE.csv."
        )


def read_configuration(argv: list[str], prog: str) -> tuple[ProjectCLI, Run, list[str]]:
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
        return cli or ProjectCLI(argv, prog), run, []
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
    return cli, run, changes


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
