"""What a resumed run gets back, and when: read with the checkpoint, given back after all hooks of
the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, Timer
from lightning.pytorch.utilities.model_helpers import is_overridden
from unbroken import lightning_internals
from unbroken.checkpoint.cut_epoch import go_inside
from unbroken.loading import DataStart, RunLoaders
from unbroken.parts.loaders import BatchSizes
from unbroken.parts.loops import BETWEEN_EPOCHS, SavePoint, states_of_loaders
from unbroken.parts.part import Part
from unbroken.parts.users_callbacks import users_callbacks
from unbroken.storage.contents import RUN_KEY, record_in

# These are called again by a resumed run, though the run that was killed had called them.
START_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")


@dataclass
class Resume:
    """The state of a checkpoint, as far as Lightning does not restore it."""

    place: SavePoint
    # The kept parts of every rank, by name, and those that are of all ranks.
    ranks: list[dict[str, Any]]
    shared: dict[str, Any]
    samples_per_batch: int
    # How its loaders cut their batches. Empty in a checkpoint of an earlier version.
    batch_sizes: list[dict[str, Any]]
    # Where training goes on in its loaders.
    data_start: DataStart
    # Whether the run had stopped early and is to stay so.
    should_stop: bool
    # Whether the run was stopped in the validation after its last step.
    was_cut_after_last_step: bool
    run_id: str | None

    @classmethod
    def of(cls, checkpoint: dict[str, Any], trainer: Trainer, changed: bool) -> Resume:
        """Read a checkpoint's state. Where the run ended inside an epoch and has more to do, the
        state is the one from inside this epoch.

        Then the checkpoint's own entries are changed in place: those that Lightning restores after
        this, and those of module and data module, which are loaded once more.
        """
        saved = checkpoint[RUN_KEY]
        state = dict(saved["state"])
        should_stop = bool(state.get("should_stop")) and not changed
        inside = state.pop("inside_epoch", None)
        if inside is not None and not should_stop and has_more_steps(trainer, checkpoint):
            state = inside["state"]
            go_inside(trainer, checkpoint, inside)
        ranks = state.pop("ranks")
        place = state.pop("place")
        samples_per_batch = state.pop("samples_per_batch")
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        # On more devices than before a new rank goes on where an earlier one was.
        of_rank = ranks[trainer.global_rank % len(ranks)]
        data_start = DataStart(
            epoch=epoch_of(checkpoint, place),
            batches=0 if place == BETWEEN_EPOCHS else batches["current"]["completed"],
            samples_per_batch=samples_per_batch,
            loader_states=of_rank["loaders"],
            epoch_is_trained=batches["is_last_batch"],
        )
        ended = checkpoint["global_step"] == trainer.max_steps
        return cls(
            place=place,
            ranks=ranks,
            shared=state,
            samples_per_batch=samples_per_batch,
            batch_sizes=of_rank.get(BatchSizes.name, []),
            data_start=data_start,
            should_stop=should_stop,
            was_cut_after_last_step=place == "validation" and ended,
            run_id=saved.get("run_id"),
        )

    def give_back(self, trainer: Trainer, parts: Sequence[Part]) -> None:
        """Give parts back, in the order of the list.

        What a checkpoint lacks stays as it is. So do the parts of each rank where the checkpoint
        has those of another number of ranks.
        """
        mine = self.mine(trainer)
        for part in parts:
            values = mine if part.of_each_rank else self.shared
            if part.name in values:
                part.give_back(trainer, values[part.name])

    def prepare_epoch(self, trainer: Trainer, before_batches: Callable[[], None]) -> None:
        """Let Lightning begin with what the run was stopped before: a batch, or a validation.

        Lightning calls ``before_batches`` later, when it begins to read the epoch's batches.
        """
        lightning_internals.prepare_resumed_epoch(
            trainer,
            before_batches,
            is_before_batch=self.place == "batch",
            was_validated=bool(self.shared.get("was_validated")),
        )
        if self.place == "validation" and self.should_stop:
            lightning_internals.stop_after_validation(trainer)

    def mine(self, trainer: Trainer) -> dict[str, Any]:
        """This rank's own parts, where the checkpoint has those of as many ranks."""
        if len(self.ranks) != trainer.world_size:
            return {}
        return self.ranks[trainer.global_rank]

    def recount_batches(self, trainer: Trainer, loading: RunLoaders) -> str | None:
        """Where a run had other ranks or batches, make Lightning's count of batches agree with the
        loader's; returns a line that says so.
        """
        ranks_before = len(self.ranks)
        size_before = self.samples_per_batch
        ranks_now = trainer.world_size
        size_now = loading.samples_per_batch
        is_known = size_before and size_now
        if not is_known or (ranks_before, size_before) == (ranks_now, size_now):
            return None
        counters: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        done = loading.positions[0].start_batch  # type: ignore[attr-defined]
        counters.ready = done
        counters.started = done
        counters.processed = done
        counters.completed = done
        now = f"{ranks_now} device(s) and global batch {size_now}"
        before = f"{ranks_before} and {size_before}"
        change = f"resumed with {now} instead of {before}"
        return f"{change}: it goes on from the right sample, not exactly."


def has_more_steps(trainer: Trainer, checkpoint: dict[str, Any]) -> bool:
    """Whether the Trainer's ``max_steps`` is not reached."""
    return trainer.max_steps == -1 or checkpoint["global_step"] < trainer.max_steps


def reached_limit(checkpoint: dict[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Which limit a training from this checkpoint has reached before its first step.

    Args:
        checkpoint: It was saved by this library.
        settings: Arguments of the Trainer: ``max_epochs``, ``max_steps`` and ``max_time``.

    Returns:
        One of these names; None where something is left to train.
    """
    max_steps = settings["max_steps"]
    if 0 <= max_steps <= checkpoint["global_step"]:
        return "max_steps"
    epochs: int = checkpoint["epoch"]
    if "inside_epoch" in (record_in(checkpoint).get("state") or {}):
        # A limit has cut the last one, and the training goes on inside it.
        epochs -= 1
    max_epochs = settings["max_epochs"]
    if max_epochs is not None and 0 <= max_epochs <= epochs:
        return "max_epochs"
    try:
        timer = Timer(settings["max_time"])
    except (MisconfigurationException, TypeError):
        # The Trainer refuses it.
        return None
    clock = checkpoint["callbacks"].get(timer.state_key)
    if clock is not None:
        timer.load_state_dict(clock)
        left = timer.time_remaining()
        if left is not None and left <= 0:
            return "max_time"
    return None


def epoch_of(checkpoint: dict[str, Any], place: SavePoint) -> int:
    """The epoch that a run resumes in.

    ``checkpoint["epoch"]`` is the Trainer's number at the save. Of a checkpoint that resumes inside
    an epoch which a limit has cut, it is one too many: this was saved after the epoch's end.
    """
    if place == BETWEEN_EPOCHS:
        return int(checkpoint["epoch"])
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]
    return int(epochs["current"]["processed"])


def start_of_anothers(checkpoint: dict[str, Any]) -> DataStart:
    """Where training goes on from a checkpoint that was saved from outside, such as by
    ``trainer.save_checkpoint`` or ModelCheckpoint.
    """
    loops = checkpoint["loops"]["fit_loop"]
    # Lightning would load them into loaders that have begun already.
    states = states_of_loaders(loops)
    epochs = loops["epoch_progress"]["current"]
    if epochs["completed"] == epochs["started"]:
        # No epoch had begun, or the hooks of its start were called. The batches are those of the
        # epoch before.
        return DataStart(checkpoint["epoch"], lightnings_states=states)
    batches = loops["epoch_loop.batch_progress"]
    return DataStart(
        checkpoint["epoch"],
        batches["current"]["ready"],
        epoch_is_trained=batches["is_last_batch"],
        lightnings_states=states,
    )


def uses_hooks(trainer: Trainer) -> bool:
    """Whether the module or a callback of the user's has a hook that a resumed run calls again."""
    parts = [trainer.lightning_module, *users_callbacks(trainer)]
    return any(is_overridden(name, part) for part in parts for name in START_HOOKS)


def call_epoch_start_again(trainer: Trainer) -> None:
    """Call ``on_train_epoch_start`` of the module and of the user's callbacks, for an epoch that
    goes on.

    It brings what they set for an epoch and nobody keeps, such as an attribute of a callback.
    Lightning leaves the hook out there. What is kept, or noted before (before_hooks.py), is given
    back after it.
    """
    module = trainer.lightning_module
    again = users_callbacks(trainer)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler) and callback not in again:
            again.append(callback)
    for callback in again:
        callback.on_train_epoch_start(trainer, module)
    lightning_internals.call_module_hook(trainer, "on_train_epoch_start")
