"""What a module logs in an epoch's last step stands in every logger, not only on the screen."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from unbroken.parts.trainer_settings import ForAMoment, lasting


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

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = trainer.is_last_batch or trainer.global_step == trainer.max_steps
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        # With 0 nothing is logged: the user wants it so.
        if is_last and every > 0 and not isinstance(every, ForAMoment):
            trainer.log_every_n_steps = ForAMoment(1, every)  # type: ignore[attr-defined]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._put_back(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._put_back(trainer)

    def _put_back(self, trainer: Trainer) -> None:
        # Another hook may have set a number of the user's meanwhile. That one stays.
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        trainer.log_every_n_steps = lasting(every)  # type: ignore[attr-defined]
