"""What cannot be resumed exactly, in a line each: a run says so at its start."""

from typing import Any

from lightning.pytorch import Callback, Trainer, callbacks

from project.engine.loading import ExactLoading

# Lightning's callbacks with which a resume is not exact, and why.
NOT_EXACT: dict[type[Callback], str] = {
    callbacks.BatchSizeFinder: "it searches again at every start",
    callbacks.LearningRateFinder: "it searches again at every start",
    callbacks.ModelPruning: "a checkpoint holds the pruned weights without their masks",
    callbacks.SpikeDetection: "Lightning cannot load its state, so its mean begins anew",
}


def what_is_not_exact(trainer: Trainer, loading: ExactLoading) -> list[str]:
    """A line for everything with which a resume is not exact, or not exact inside an epoch.

    Where a run can only go on from an epoch's end, ``loading`` is told.
    """
    notes: list[str] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, callbacks.StochasticWeightAveraging):
            # It acts at an epoch's start, which is not repeated.
            loading.anywhere = False
            notes.append(f"with {name} a run resumes from its last epoch's end.")
        for kind, reason in NOT_EXACT.items():
            if isinstance(callback, kind):
                notes.append(f"a resume is not exact with {name}: {reason}.")
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    if every > 1:
        what = "with --reload_dataloaders_every_n_epochs above 1"
        notes.append(f"a resume is not exact {what}: it counts anew.")
    return notes


def begins_averaged_batch_norms(trainer: Trainer) -> bool:
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


def put_averages_into_module(trainer: Trainer) -> None:
    """Where nothing was left to train: let WeightAveraging give the module its averaged weights.

    It does so in ``on_train_end``, which Lightning does not call then. The module would end with
    the trained weights.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.WeightAveraging):
            callback.on_train_end(trainer, trainer.lightning_module)


def mend_states_of_lightnings_callbacks(trainer: Trainer, states: dict[str, Any]) -> None:
    """Mend saved states that Lightning could not load, or that would hide what the user typed."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, callbacks.SpikeDetection):
            states.pop(callback.state_key, None)
        if isinstance(callback, callbacks.EarlyStopping) and callback.state_key in states:
            states[callback.state_key]["patience"] = callback.patience
