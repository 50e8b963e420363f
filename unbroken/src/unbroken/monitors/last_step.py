"""What a module logs in an epoch's last step stands in every logger, not only on the screen."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class LogLastStep(Callback):
    """Has Lightning log the last step of every epoch, however large ``--log_every_n_steps`` is.

    Lightning gives loggers what a module logs in its steps (``self.log`` without ``on_epoch``) only
    at every so many steps. Of an epoch with fewer batches they get nothing, though the value is
    printed. Lightning warns of that and does nothing about it.

    Put it behind callbacks that ask for ``trainer.log_every_n_steps`` in ``on_train_batch_end``: it
    is 1 from there until Lightning has logged the step.
    """

    # No hook of this puts other weights in for a validation.
    validates_trained_weights = True

    def __init__(self) -> None:
        # The Trainer's own number; None where it is in place.
        self._every: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = trainer.is_last_batch or trainer.global_step == trainer.max_steps
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # With 0 nothing is logged: the user wants it so.
        if is_last and every > 0 and self._every is None:
            self._every = every
            trainer.log_every_n_steps = 1  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._put_back(trainer)

    def _put_back(self, trainer: Trainer) -> None:
        if self._every is not None:
            trainer.log_every_n_steps = self._every  # type: ignore[attr-defined]
            self._every = None
