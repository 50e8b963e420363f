"""What Lightning's loops count and decide, and its own checkpoint lacks or has wrong."""

from typing import Any, Literal

from lightning.pytorch import Trainer
from unbroken import lightning_internals
from unbroken.parts.part import Note, Part

# Where in the loops a checkpoint is taken: before a batch, between two epochs (or after the last),
# inside validation.
SavePoint = Literal["batch", "epoch", "validation"]
BETWEEN_EPOCHS: SavePoint = "epoch"


class ValidatedBatches(Part):
    """Batches that validations have read, by loader: the steps of what they log in a step."""

    name = "validated"

    def take(self, trainer: Trainer) -> dict[int, int]:
        return dict(lightning_internals.validated_batches(trainer))

    def give_back(self, trainer: Trainer, value: dict[int, int]) -> None:
        lightning_internals.validated_batches(trainer).update(value)


class WasValidated(Part):
    """Whether a validation has followed the last batch, which ended an optimizer step."""

    name = "was_validated"
    of_each_rank = False
    changes_in_validation = False

    def __init__(self) -> None:
        self.is_so = False

    def take(self, trainer: Trainer) -> bool:
        return self.is_so

    def give_back(self, trainer: Trainer, value: bool) -> None:
        self.is_so = value


class EarlyStop(Note):
    """Whether a callback has asked the Trainer to stop early.

    A run that had stopped early stays so, unless the user has changed a setting, such as a patience
    or a time limit. Restoring sees to it as it reads the checkpoint, because the loops ask before
    training starts.
    """

    name = "should_stop"
    of_each_rank = False

    def take(self, trainer: Trainer) -> bool:
        return trainer.should_stop


def states_of_loaders(fit: dict[str, Any]) -> list[Any]:
    """Take Lightning's own states of loaders out of the saved state of the fit loop."""
    states: list[Any] = fit.get("state_dict", {}).pop("combined_loader", [])
    return states


def clean_counters(fit: dict[str, Any], place: SavePoint, validated: bool) -> None:
    """Rewrite the saved counters of the fit loop, in place, so that everything is done or not
    begun.

    Inside a hook some counters are ahead of others, and Lightning's restart would repeat or skip a
    validation, an epoch or a log step.

    Args:
        fit: What ``trainer.fit_loop.state_dict()`` returned.
        place: Where the checkpoint is taken.
        validated: Whether a validation has followed the last batch, which ended an optimizer step.
    """
    # Lightning's own states of the loaders may be a batch ahead. See LoaderStates.
    states_of_loaders(fit)
    batches = fit["epoch_loop.batch_progress"]
    validation = fit["epoch_loop.val_loop.batch_progress"]
    epochs = fit["epoch_progress"]
    begun = [batches["total"], batches["current"], validation["total"]]
    if place == BETWEEN_EPOCHS:
        begun += [epochs["total"], epochs["current"]]
    for counters in begun:
        for name in counters:
            counters[name] = counters["completed"]
    if place != "validation":
        batches["is_last_batch"] = False
    if place == "batch" and validated:
        # Where a validation was due after a batch, a resuming loop of Lightning's ends that batch a
        # second time, and counts its step once more. A plain Trainer shall have the right number
        # after that: the step is taken off here. A resume by ExactCheckpoint has no second end
        # (prepare_resumed_epoch in lightning_internals.py), and adds the step again there.
        fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    if place == "validation":
        # The resumed run starts the validation again. Lightning's loop does so where one more batch
        # of all validations was begun than is done, and none of this one.
        before = validation["total"]["completed"] - validation["current"]["completed"]
        for name in validation["current"]:
            validation["current"][name] = 0
        validation["total"].update(
            ready=before + 1, started=before + 1, processed=before, completed=before
        )
