"""What cannot be resumed exactly, in a line each: a run says so at its start."""

from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, callbacks
from torch.nn.parallel import DistributedDataParallel
from unbroken import lightning_internals
from unbroken.loading import RunLoaders

# Lightning's callbacks with which a resume is not exact, and why.
NOT_EXACT: dict[type[Callback], str] = {
    callbacks.BatchSizeFinder: "it searches again at every start",
    callbacks.LearningRateFinder: "it searches again at every start",
    callbacks.ModelPruning: "a checkpoint holds the pruned weights without their masks",
    callbacks.SpikeDetection: "Lightning cannot load its state, so its mean begins anew",
}


def what_is_not_exact(trainer: Trainer) -> list[str]:
    """A line for everything with which a resume is not exact."""
    notes: list[str] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        for kind, reason in NOT_EXACT.items():
            if isinstance(callback, kind):
                notes.append(f"a resume is not exact with {name}: {reason}.")
    ranks = trainer.world_size
    model = trainer.strategy.model
    is_regrouped = isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
    if ranks > 2 and is_regrouped:
        # A sum of two numbers is the same in any order, one of three is not.
        notes.append(
            f"a resume of {ranks} ranks may differ in the last bits: DDP groups the gradients anew"
            " after its first step, and adds them up in another order."
            " --strategy ddp_find_unused_parameters_true keeps one order."
        )
    on_cuda = trainer.strategy.root_device.type == "cuda"
    if on_cuda and torch.backends.cudnn.benchmark:
        # cuDNN keeps no record of what it has chosen that could be given back to it.
        what = "cuDNN measures at every start which of its algorithms are the fastest"
        notes.append(f"a resume is not exact with --benchmark true: {what}.")
    state = lightning_internals.state_of_communication(trainer)
    if state is not None:
        notes.append(
            f"a resume is not exact with {type(state).__name__}: a checkpoint does not hold what a"
            " communication hook of DDP keeps, such as the errors of its compression."
        )
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if every > 1:
        what = "with --reload_dataloaders_every_n_epochs above 1"
        notes.append(f"a resume is not exact {what}: it counts anew.")
    if lightning_internals.validates_by_the_clock(trainer):
        notes.append(
            "a resume is not exact with a time as --val_check_interval: validations come at other"
            " steps at every start."
        )
    return notes


def why_callbacks_need_whole_epochs(trainer: Trainer) -> str | None:
    """A line where a callback's work can be resumed only between two epochs; else None."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StochasticWeightAveraging):
            # It acts at an epoch's start, which is not repeated.
            return f"with {type(callback).__name__} a run resumes from its last epoch's end."
    return None


def why_loaders_need_whole_epochs(trainer: Trainer, loading: RunLoaders) -> str | None:
    """A line where training reads loaders side by side that can only be begun together; else None.

    Lightning counts in each start which of them have come to their end. With lengths this makes no
    difference, for they say when an epoch ends.
    """
    ends_with_the_first = lightning_internals.mode_of_training_loaders(trainer) == "min_size"
    if len(loading.positions) == 1 or not loading.read_early or ends_with_the_first:
        return None
    return (
        "training reads loaders side by side, and not all have a length: a resumed run goes on from"
        " the last epoch's end."
    )


def is_before_epoch_for_batch_norms(trainer: Trainer) -> bool:
    """Whether training is before the epoch that StochasticWeightAveraging adds for batch norms.

    Lightning cannot go on there: in this epoch the callback makes neither its schedule nor its
    count, and steps once more with the gradients of the last batch.
    """
    if trainer.current_epoch >= (trainer.max_epochs or 0):
        return False
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StochasticWeightAveraging):
            return bool(trainer.current_epoch > callback.swa_end)
    return False


def is_after_epoch_for_batch_norms(trainer: Trainer) -> bool:
    """Whether the epoch that StochasticWeightAveraging adds for batch norms is over.

    The callback can end only a training whose last epoch it has seen itself.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.StochasticWeightAveraging):
            return bool(trainer.current_epoch > callback.swa_end + 1)
    return False


def mend_states_of_lightnings_callbacks(trainer: Trainer, states: dict[str, Any]) -> None:
    """Mend saved states that Lightning could not load, or that would hide what the user typed, and
    load what it leaves out.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.SpikeDetection):
            states.pop(callback.state_key, None)
        if isinstance(callback, callbacks.EarlyStopping) and callback.state_key in states:
            states[callback.state_key]["patience"] = callback.patience
        if isinstance(callback, callbacks.ModelCheckpoint) and callback.state_key in states:
            callback.current_score = states[callback.state_key]["current_score"]
