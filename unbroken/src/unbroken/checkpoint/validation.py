"""The validation that a stop may cut: a resumed run begins it again."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from unbroken import contract, lightning_internals
from unbroken.checkpoint.before_hooks import (
    BeforeHooks,
    OptimizerGroups,
    Schedules,
    SwappedWeights,
    give_back_all,
)
from unbroken.checkpoint.kept import KeptParts
from unbroken.checkpoint.shared_buffers import share_buffers_in_next_pass
from unbroken.checkpoint.snapshot import Snapshot
from unbroken.loading.log_steps import is_optimizer_step
from unbroken.parts.users_callbacks import NOT_THE_USERS
from unbroken.stopping.ranks import say


class Validation:
    """The state at the start of the validation that runs."""

    def __init__(self, kept: KeptParts) -> None:
        self._kept = kept
        # None: no validation runs, or it is the sanity check, where a stop saves nothing.
        self._snapshot: Snapshot | None = None
        # What its hooks may change of the training.
        self._before_hooks: list[BeforeHooks] = []
        # The versions of weights of which no copy is noted.
        self._versions: dict[str, tuple[int, int]] = {}
        # Whether an earlier validation has changed weights by other ways than the hooks of its
        # start. From then on a copy is made for each.
        self._has_changed_before = False

    @property
    def runs(self) -> bool:
        """Whether a validation runs whose start a stop can save."""
        return self._snapshot is not None

    def starts(self, trainer: Trainer) -> None:
        """Take what a stop inside the validation saves."""
        self._before_hooks = []
        self._versions = {}
        if self._may_change_weights(trainer) and not trainer.sanity_checking:
            self._before_hooks = [SwappedWeights(trainer)]
        else:
            self._versions = lightning_internals.versions_of(trainer.lightning_module)
        if trainer.sanity_checking:
            return
        self._before_hooks += [Schedules(trainer), OptimizerGroups(trainer)]
        self._snapshot = self._kept.take_before_validation(trainer)

    def state_for_a_stop(self, trainer: Trainer) -> Snapshot | None:
        """The state as it was when the validation began, to be saved; None where it cannot be had,
        and the run goes on from the checkpoint before.
        """
        snapshot = self._snapshot
        assert snapshot is not None
        module = trainer.lightning_module
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging):
                # Put the trained weights back before they are saved.
                callback.on_validation_epoch_end(trainer, module)
        if self._has_changed_weights(trainer):
            say("this validation has changed weights: the run goes on from the checkpoint before.")
            return None
        give_back_all(self._before_hooks, trainer)
        # The user's own on_save_checkpoint is called later and saves what his objects hold then.
        self._kept.return_objects_to(trainer, snapshot)
        self._kept.add_unchanged(trainer, snapshot)
        return snapshot

    def is_over(self, trainer: Trainer) -> None:
        """Forget the state at its start: a stop from here on saves the one after it."""
        if self._has_changed_weights(trainer):
            self._has_changed_before = True
        self._snapshot = None
        self._before_hooks = []
        self._versions = {}
        share_buffers_in_next_pass(trainer)
        if not trainer.sanity_checking:
            last_batch = trainer.fit_loop.epoch_loop.batch_idx
            self._kept.was_validated.is_so = is_optimizer_step(trainer, last_batch)

    def _may_change_weights(self, trainer: Trainer) -> bool:
        """Whether a hook of the user's may validate other weights than are trained."""
        if self._has_changed_before:
            return True
        everyone = (*trainer.callbacks, trainer.lightning_module)  # type: ignore[attr-defined]
        return not all(keeps_trained_weights(part) for part in everyone)

    def _has_changed_weights(self, trainer: Trainer) -> bool:
        """Whether this validation has changed weights of which there is no copy.

        Averaged weights are put in the place of the trained ones and back.
        """
        if lightning_internals.averaged_models(trainer):
            return False
        now = lightning_internals.versions_of(trainer.lightning_module)
        # One that is there now alone was lazy, and had no value that could be changed.
        return any(now.get(name) != version for name, version in self._versions.items())


def keeps_trained_weights(part: Any) -> bool:
    """Whether no hook of a module or callback puts other weights in for a validation."""
    if isinstance(part, contract.ValidatesTrainedWeights) and part.validates_trained_weights:
        return True
    hooks = (part.on_validation_start, part.on_validation_epoch_start)
    return all(hook.__module__.startswith(NOT_THE_USERS) for hook in hooks)
