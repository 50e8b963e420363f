"""Errors of Lightning and torch that a user can mend, as one line. One table says which, and what
is told.

Lightning refuses a flag with an exception from deep inside, often only when training starts. Such
an error is recognised by the phase it falls into, the module that raised it, and its text. What the
user's own code raises keeps its traceback.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from unbroken.errors import UserError
from unbroken.tensors.unsized import CANNOT_BE_AVERAGED, CANNOT_BE_SHARED

OURS = __name__.split(".")[0]
RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector"
LIGHTNING = ("lightning.",)
STARTS_A_RUN = (
    "lightning",
    *(f"{OURS}.{room}" for room in ("checkpoint", "loading", "parts", "stopping", "storage")),
    f"{OURS}.run.run_record",
)
# Callbacks of ours that keep a state
OUR_CALLBACKS = (f"{OURS}.run.progress", f"{OURS}.run.wrong_numbers")
RESTORES = (*STARTS_A_RUN, *OUR_CALLBACKS, "torch", "numpy", "random", "packaging")
OPTIMIZERS = ("torch.optim",)
COUNTERS = ("lightning.pytorch.loops.progress",)
# Where ranks exchange something
EXCHANGES = "torch.distributed.distributed_c10d"
# The last raises in the training what was raised in a worker.
LOADERS = ("torch.utils.data", "torch.multiprocessing", "multiprocessing.", "torch._utils")
ANYWHERE = ("",)


class Phase(Flag):
    """When an error is raised."""

    STARTING = auto()  # a training, before its first step
    TRAINING = auto()  # from its first step on, with the test at its end
    TESTING = auto()  # a test that follows no training
    BEFORE_A_STEP = STARTING | TESTING
    ANY = STARTING | TRAINING | TESTING


@dataclass(frozen=True)
class Refusal:
    """A kind of error, and what the user is told.

    Attributes:
        message: What is told. ``{text}`` is the error's own text on one line, ``{kind}`` its class,
            ``{checkpoint}`` the file that is used, ``{used}`` what for.
        phase: When it is raised.
        raised_in: How the name of the module begins that raised it.
        passed_through: A module that called, directly or not, what raised it; empty for any.
        kinds: Its classes.
        text: A regular expression that its text has.
        needs_checkpoint: Whether it is one only where a checkpoint is used.
    """

    message: str
    phase: Phase = Phase.ANY
    raised_in: tuple[str, ...] = ANYWHERE
    passed_through: str = ""
    kinds: tuple[type[BaseException], ...] = (Exception,)
    text: str = ""
    needs_checkpoint: bool = False


REFUSED = (MisconfigurationException, ValueError, OverflowError)
MISFIT = (
    "--ckpt_path {checkpoint} cannot be {used}: it holds something else than such a run saves"
    " ({kind}: {text}). Give another checkpoint."
)
# The first that fits is told.
TABLE = (
    Refusal(
        "the processes that load data need more shared memory than /dev/shm has."
        " Give it more (docker run --shm-size 1g), or use --data.num_workers 0.",
        raised_in=LOADERS,
        text="Bus error|out of shared memory|allocate shared memory|No space left on device.*shm"
        "|write .*/torch_",
    ),
    Refusal(
        "a process that loads data has died ({text}). Often the machine's memory was used up:"
        " use fewer --data.num_workers. --ckpt_path auto goes on with the run.",
        raised_in=LOADERS,
        # The second is what a worker's end of a connection says, where it died as it was asked.
        text=r"DataLoader worker \(pid|Connection (reset by peer|refused)",
    ),
    Refusal(
        "--ckpt_path: {text}",
        passed_through=RESTORING,
        text="loading state_dict",
        needs_checkpoint=True,
    ),
    # What EarlyStopping, ReduceLROnPlateau and ModelCheckpoint say of a metric that nobody logs
    Refusal(
        "{text}",
        raised_in=LIGHTNING,
        text="which is not available|could not find the monitored key",
    ),
    Refusal(
        "the Trainer refuses a flag: {text} Raise --max_epochs.",
        phase=Phase.BEFORE_A_STEP,
        raised_in=LIGHTNING,
        kinds=REFUSED,
        text="restored a checkpoint with current_epoch",
    ),
    # No flag is wrong where the user's class lacks what every training needs.
    Refusal(
        "the class of --model, or that of --data, lacks a method: {text}",
        phase=Phase.BEFORE_A_STEP,
        raised_in=LIGHTNING,
        kinds=(MisconfigurationException,),
        text="method defined|must be implemented",
    ),
    # A class that only holds others, such as ModuleList, or that others are made from
    Refusal(
        "such a class cannot be used by itself: {text}.",
        raised_in=("torch.nn.modules.module", f"{OURS}.data"),
        kinds=(NotImplementedError,),
        text='is missing the required "forward" function|must define',
    ),
    # For a prediction Lightning makes each loader anew, and passes a batch size twice.
    Refusal(
        "Lightning cannot predict with a loader whose arguments have no names: write them, as in"
        " DataLoader(data, batch_size=32).",
        raised_in=LIGHTNING,
        kinds=(MisconfigurationException,),
        text="more than one `__init__` argument can be passed",
    ),
    Refusal(
        "the Trainer refuses a flag: {text}",
        phase=Phase.BEFORE_A_STEP,
        raised_in=LIGHTNING,
        kinds=REFUSED,
    ),
    # The running sums of the metrics
    Refusal(
        MISFIT,
        phase=Phase.STARTING,
        passed_through=f"{OURS}.checkpoint.resume",
        raised_in=(f"{OURS}.tasks.supervised", f"{OURS}.tasks.running_sums"),
        needs_checkpoint=True,
    ),
    Refusal(
        CANNOT_BE_SHARED,
        phase=Phase.BEFORE_A_STEP,
        raised_in=("torch.nn.parallel",),
        text="ninitialized parameters can't be used",
    ),
    Refusal(
        "--strategy ddp waits for a gradient of every parameter, and this step leaves some without"
        " one. Add --strategy ddp_find_unused_parameters_true.",
        passed_through="lightning.pytorch.strategies.ddp",
        text="parameters that were not used in producing",
    ),
    # WeightAveraging and StochasticWeightAveraging copy the module.
    Refusal(
        CANNOT_BE_AVERAGED,
        phase=Phase.BEFORE_A_STEP,
        passed_through="torch.optim.swa_utils",
        text="use an uninitialized parameter",
    ),
    Refusal(
        CANNOT_BE_AVERAGED,
        phase=Phase.BEFORE_A_STEP,
        passed_through="lightning.pytorch.callbacks.stochastic_weight_avg",
        text="use an uninitialized parameter",
    ),
    Refusal(
        "the Trainer refuses the strategy: {text}.",
        phase=Phase.BEFORE_A_STEP,
        raised_in=("torch.distributed",),
        kinds=(AssertionError, ValueError),
        text="nknown backend|nvalid backend",
    ),
    Refusal(MISFIT, phase=Phase.STARTING, raised_in=STARTS_A_RUN, needs_checkpoint=True),
    Refusal(MISFIT, passed_through=RESTORING, raised_in=RESTORES, needs_checkpoint=True),
    Refusal(MISFIT, raised_in=OPTIMIZERS, needs_checkpoint=True),
    # Counters that are no numbers
    Refusal(MISFIT, raised_in=COUNTERS, needs_checkpoint=True),
)


@contextmanager
def refusals_as_errors(
    checkpoint: Path | None, has_begun: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Turn the errors of :data:`TABLE` into a :class:`UserError`; any other stays what it is.

    Args:
        checkpoint: The file that a training resumes from, or that is tested.
        has_begun: Whether the first step of the training has begun; None around a test.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = _message_without_methods(error)
        if message is not None:
            raise UserError(message) from None
        if is_of_the_ranks(error):
            raise
        phase = _phase(has_begun)
        modules = modules_of(error)
        for refusal in TABLE:
            if _fits(refusal, error, phase, modules, checkpoint):
                raise UserError(_told(refusal, error, phase, checkpoint)) from None
        raise


def _phase(has_begun: Callable[[], bool] | None) -> Phase:
    if has_begun is None:
        return Phase.TESTING
    return Phase.TRAINING if has_begun() else Phase.STARTING


def modules_of(error: BaseException) -> list[str]:
    """The modules that an error came through; the last one raised it."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]


def is_of_the_ranks(error: Exception) -> bool:
    """Whether ranks could not exchange something, as where one of them has died. It says nothing of
    what they were about to do, such as to load a checkpoint.
    """
    return isinstance(error, RuntimeError) and modules_of(error)[-1] == EXCHANGES


def _fits(
    refusal: Refusal,
    error: Exception,
    phase: Phase,
    modules: list[str],
    checkpoint: Path | None,
) -> bool:
    if refusal.needs_checkpoint and checkpoint is None:
        return False
    if refusal.passed_through and refusal.passed_through not in modules:
        return False
    return (
        phase in refusal.phase
        and modules[-1].startswith(refusal.raised_in)
        and isinstance(error, refusal.kinds)
        and re.search(refusal.text, _one_line(error)) is not None
    )


def _told(refusal: Refusal, error: Exception, phase: Phase, checkpoint: Path | None) -> str:
    return refusal.message.format(
        text=_one_line(error),
        kind=type(error).__name__,
        checkpoint=checkpoint,
        used="tested" if phase is Phase.TESTING else "resumed",
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _message_without_methods(error: Exception) -> str | None:
    """The user's module calls a method of TensorBoard's, such as ``add_scalar``, that a W&B run
    lacks.
    """
    if not isinstance(error, AttributeError):
        return None
    owner = str(type(error.obj))
    if str(error.name).startswith("add_") and "'wandb." in owner:
        return f"self.logger.experiment is W&B's, without {error.name}. Add --tensorboard true."
    return None
