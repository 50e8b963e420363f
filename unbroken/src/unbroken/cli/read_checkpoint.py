"""How the commands read a checkpoint: its configuration, its module with weights, its weights
alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.parameter import is_lazy
from unbroken import contract
from unbroken.chosen import Chosen
from unbroken.cli.cli import Configuration, configure, differences
from unbroken.cli.defaults import default_file
from unbroken.cli.moved_names import section_of_now, with_names_of_now
from unbroken.cli.program import Program
from unbroken.cli.trainer_flags import reading_only
from unbroken.cli.typed import CLASS_PATH, CommandLine
from unbroken.errors import UserError, printable
from unbroken.mirror.mirror import Mirror
from unbroken.run_folder import ROOT, RunFolder, choose, find_checkpoint
from unbroken.stopping.ranks import decided_by_rank_zero, say
from unbroken.storage.checkpoint_files import read, record
from unbroken.storage.contents import CHOSEN
from unbroken.storage.seals import fingerprint, refuse_other_contents, without_states
from unbroken.storage.weights import load_weights, misfits_as_errors, refuse_other_kinds_of_numbers
from unbroken.tables import flat
from unbroken.trust.imports import imports_asked_of
from unbroken.trust.sizes import bounded_by
from unbroken.trust.strangers import Stranger

MOST_NAMES = 8  # of tensors, in a line


def read_configuration(program: Program, argv: list[str]) -> tuple[Configuration, RunFolder]:
    """Parse ``argv`` and find its run. A resumed run uses the checkpoint's configuration; what is
    typed wins.
    """
    line = CommandLine(argv, below=default_file(program))
    run_name = line.value("run_name")
    ckpt_path = line.value("ckpt_path")
    root = Path(line.value("trainer.default_root_dir") or ROOT)
    is_new = ckpt_path is None or (ckpt_path == "auto" and run_name is None)
    config = None
    if is_new or line.asks_for_help:
        # A wrong flag leaves no folder behind.
        config = configure(program, "fit", argv)
    url = line.value("mirror")
    # A rehearsal leaves no run behind.
    is_rehearsal = line.value("trainer.fast_dev_run") not in (None, "false", "False", "0")
    mirror = None if url is None or is_rehearsal else Mirror(url)
    try:
        decided = decided_by_rank_zero(
            "run", lambda: vars(choose(root, run_name, ckpt_path, mirror))
        )
        run = RunFolder(**decided)
    except BaseException:
        if mirror is not None:
            mirror.release()
        raise
    run.mirror = mirror
    try:
        if run.checkpoint is None:
            return config or configure(program, "fit", argv), run
        # With auto, the same line starts a run and goes on with it.
        if line.value("init_weights") is not None and ckpt_path != "auto":
            raise UserError(
                "--init_weights starts a new run, --ckpt_path goes on with one: remove one of them."
            )
        config = _resumed_configuration(program, line, argv, run, run.checkpoint)
    except BaseException:
        run.discard()
        run.release()
        raise
    return config, run


def _resumed_configuration(
    program: Program, line: CommandLine, argv: list[str], run: RunFolder, checkpoint: Path
) -> Configuration:
    """The configuration of a run that goes on; what differs from the checkpoint's is noted in
    ``run.changes``.
    """
    contents = read(checkpoint, check_sums=True)
    refuse_other_contents(contents, run.fingerprint, checkpoint)
    known = record(contents, checkpoint, to_resume=True)
    if not (run.is_own or is_trusted(line)):
        raise UserError(
            f"--ckpt_path {checkpoint} has no seal of yours, and a resume takes over all that it"
            " says. If you trust it: --trust_checkpoint true, or share a key (UNBROKEN_KEY)."
            f" Its weights alone: --init_weights {checkpoint}."
        )
    before = with_names_of_now(known["config"], program.moved)
    base = dict(before)
    unknown = leave_out_what_is_no_longer_taken(program, base)
    if unknown:
        raise UserError(
            f"--ckpt_path {checkpoint}: {unknown}. To start a new run from its weights:"
            f" --init_weights {checkpoint}."
        )
    if line.sets_a_length:
        # The typed limit counts. The saved max_epochs could come first.
        base["trainer"] = {**(base.get("trainer") or {}), "max_epochs": -1}
    chosen = Chosen(known.get(CHOSEN))
    config = configure(program, "fit", argv, base, chosen)
    # Weights that do not fit become one line here; the Trainer would end in a traceback.
    load_weights(config.module, contents, checkpoint, late=True, again=True)
    if isinstance(config.datamodule, contract.StaysWithSource):
        # It has several sources, and the earlier run's is used.
        config.datamodule.stay_with(known.get("data_source"))
    run.changes = changes_between(before, config.resolved, line)
    if run.finished:
        # Commands that do not train need nothing of what this imports.
        from unbroken.checkpoint.resume import reached_limit

        run.reached = reached_limit(contents, config.trainer)
    return config


def changes_between(before: dict[str, Any], now: dict[str, Any], line: CommandLine) -> list[str]:
    """A line for each setting that the user has changed. An option that the run did not have and
    that he has not given is one that this version has added: nothing has changed by it.
    """
    had = flat(before)

    def is_the_users(name: str) -> bool:
        return name in had or any(f"{name}.".startswith(f"{given}.") for given in line.given)

    the_users = {name: value for name, value in flat(now).items() if is_the_users(name)}
    return [printable(change) for change in differences(had, the_users)]


def is_trusted(line: CommandLine) -> bool:
    """Whether the user says that a checkpoint counts as his own."""
    return (line.value("trust_checkpoint") or "").lower() == "true"


@dataclass
class Loaded:
    """What a checkpoint holds, ready for use on the CPU."""

    # Weights loaded, in eval mode
    module: LightningModule
    # As in training; not set up, nothing read from disk
    datamodule: LightningDataModule | None
    config: Configuration
    # run_name, data_source, precision, epoch, global_step, metrics, ...
    run: dict[str, Any]
    path: Path
    # Whether it is the user's own, or counts as that
    is_own: bool = True
    # Settings of model and data that differ from the checkpoint's
    changes: list[str] = field(default_factory=list)
    # Of the user's own contents, see :func:`unbroken.storage.seals.fingerprint`
    fingerprint: str = ""
    # What is used of a stranger's. None: the file is the user's own.
    of_stranger: dict[str, Any] | None = None

    def as_judged(self, trainer: Trainer) -> contextlib.AbstractContextManager[None]:
        """Inside, a Trainer of :func:`unbroken.cli.trainer_flags.trainer_flags` that restores the
        checkpoint gets what was judged. It calls setup again, which may make layers anew.
        """
        if self.of_stranger is None:
            return reading_only(trainer, self.fingerprint)
        return reading_only(trainer, None, contents=self.of_stranger)

    @property
    def class_names(self) -> list[str]:
        """The classes that the module, or else the data module, names; none where neither does."""
        for owner in (self.module, self.datamodule):
            if isinstance(owner, contract.NamesClasses) and owner.class_names:
                return list(owner.class_names)
        return []

    def precision(self, typed: Any) -> Any:
        """The precision to evaluate in: what was typed, or else float64 where the run's was."""
        if typed is None and self.run.get("precision") == "64-true":
            return "64-true"
        return typed


def load(
    program: Program, path: Path, argv: list[str] | None = None, again: bool = False
) -> Loaded:
    """The module and data module of a checkpoint, from the checkpoint alone, or a UserError.

    Args:
        program: Whose command it is.
        path: The file.
        argv: Arguments of the command ``test`` that beat what the checkpoint holds.
        again: The weights will be loaded once more by Lightning, see :func:`load_weights`.
    """
    arguments = argv or []
    # It is read once: what is judged is what is used.
    contents = read(path, check_sums=True)
    run = record(contents, path)
    line = CommandLine(arguments, program.networks)
    own = run["is_own"] or is_trusted(line)
    # Of the contents as they were read. What follows may change them.
    judged = fingerprint(contents) if own else ""
    saved = run.pop("config")
    stranger = None
    if own:
        base = with_names_of_now(saved, program.moved)
        # These are flags of another machine. A test that needs gradients needs them on any.
        trainer = base.pop("trainer", None) or {}
        if trainer.get("inference_mode") is False:
            base["trainer"] = {"inference_mode": False}
    else:
        packages = (program.package, *program.own_code)
        now = partial(section_of_now, moved=program.moved)
        stranger = Stranger(path, packages, line.given, now)
        base = stranger.settings(saved)
    unknown = leave_out_what_is_no_longer_taken(program, base)
    if unknown:
        say(f"{path}: {unknown}.")
    leave_out_compiling_and_downloads(base)
    before = base if stranger is None else base | stranger.left_out
    # Lightning loads only what is the user's.
    again = again and own
    with contextlib.ExitStack() as gate:
        if stranger is not None:
            gate.enter_context(imports_asked_of(stranger))
        tensors = len(contents["state_dict"])
        with contextlib.nullcontext() if stranger is None else bounded_by(path, tensors):
            config = configure(program, "test", arguments, base, stranger=stranger)
            fits = load_weights(config.module, contents, path, late=True, again=again, own=own)
        if contract.describes_data(config.datamodule):
            config.datamodule.describe(run.pop("data", {}))
        if not fits and not again:
            set_up(config)
            load_weights(config.module, contents, path, again=True, own=own)
    of_stranger = None if own else without_states(contents)
    if of_stranger is not None:
        # Lightning looks for loops, and for the data module's state under its class's name. That
        # the network is another one was told already.
        for name in ("loops", "network", type(config.datamodule).__qualname__):
            of_stranger.pop(name, None)
    differing = [printable(line) for line in differences(before, config.resolved)]
    changes = [line for line in differing if line.startswith(("model", "data"))]
    return Loaded(
        module=config.module.eval(),
        datamodule=config.datamodule,
        config=config,
        run=run,
        path=path,
        is_own=own,
        changes=changes,
        fingerprint=judged,
        of_stranger=of_stranger,
    )


def leave_out_what_is_no_longer_taken(program: Program, base: dict[str, Any]) -> str:
    """Take those settings out of a checkpoint's configuration that the program's default classes do
    not take, as an older version of them may have; returns what to say of them, or nothing.
    """
    told = []
    for part, kind in (("model", program.model), ("data", program.data)):
        section = base.get(part)
        if kind is None or not isinstance(section, dict):
            continue
        arguments = section.get("init_args")
        if section.get(CLASS_PATH) != program.default_classes[part] or not arguments:
            continue
        parameters = inspect.signature(kind).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            continue
        unknown = arguments.keys() - {parameter.name for parameter in parameters}
        kept = {name: value for name, value in arguments.items() if name not in unknown}
        base[part] = {**section, "init_args": kept}
        told += [f"{part}.{name}" for name in sorted(unknown)]
    if not told:
        return ""
    return f"an older version wrote it, whose settings {first_names(told)} are no longer taken"


def leave_out_compiling_and_downloads(base: dict[str, Any]) -> None:
    """Compile nothing, and give the network no pretrained ``weights``, often a download: the
    checkpoint has its own.
    """
    module = (base.get("model") or {}).get("init_args")
    if not isinstance(module, dict):
        return
    if "compile" in module:
        module["compile"] = False
    network = module.get("network")
    arguments = network.get("init_args") if isinstance(network, dict) else None
    if isinstance(arguments, dict) and "weights" in arguments:
        arguments["weights"] = None


def set_up(config: Configuration) -> None:
    """Let a module make the layers that it makes in ``setup``, as it is called for a test, or for a
    prediction where the module has no test.
    """
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        limit_test_batches=0,
        limit_predict_batches=0,
    )
    # Without a test_step Lightning refuses a test before it calls setup.
    has_test = is_overridden("test_step", config.module)
    call_setup = trainer.test if has_test else trainer.predict
    # The data may be missing, for example. Then the weights do not fit, which is told later.
    with contextlib.suppress(Exception):
        call_setup(config.module, config.datamodule)


# What draws in a setup() that comes later, such as a split, draws as in a run without it.
@isolate_rng()
def start_from(module: LightningModule, name: str | None, root: Path) -> list[str]:
    """Give a new run's module the weights of another's checkpoint that fit by name and shape;
    returns what to say.

    Args:
        module: That of the new run.
        name: ``--init_weights``: a file, or ``best`` or ``last`` of the newest run. None: nothing.
        root: The folder of the runs.
    """
    if name is None:
        return []
    path = find_checkpoint(name, root, option="--init_weights")
    module.configure_model()
    given = read(path)["state_dict"]
    own = module.state_dict()

    def fits(key: str, value: Any) -> bool:
        if key not in own or is_lazy(own[key]):
            # A lazy layer takes any size.
            return key in own
        return getattr(value, "shape", None) == getattr(own[key], "shape", None)

    fitting = {key: value for key, value in given.items() if fits(key, value)}
    if not fitting:
        raise UserError(f"--init_weights {name}: nothing in it fits the module by name and shape.")
    with misfits_as_errors(f"--init_weights {path}"):
        refuse_other_kinds_of_numbers(module, fitting)
        module.load_state_dict(fitting, strict=False)
    lines = [f"--init_weights {path}: {len(fitting)} of {len(own)} tensors taken."]
    left = own.keys() - fitting.keys()
    if left:
        lines.append(f"--init_weights: these keep their random start: {first_names(left)}")
    foreign = given.keys() - own.keys()
    if foreign:
        what = "these of the checkpoint are not in the module, or not before its setup"
        lines.append(f"--init_weights: {what}: {first_names(foreign)}")
    return lines


def first_names(names: Iterable[Any]) -> str:
    """The first names in their order, for a line. Those of a checkpoint may be anything."""
    ordered = sorted(printable(str(name)[:80]) for name in names)
    more = " ..." if len(ordered) > MOST_NAMES else ""
    return ", ".join(ordered[:MOST_NAMES]) + more
