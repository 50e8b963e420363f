"""Lets the W&B run start when training does, with what is known by then."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from project.callbacks.log_steps import skip_idle_hooks
from project.wandb_logging import WandbRunLogger


class WandbStart(Callback):
    """Begins a :class:`project.wandb_logging.WandbRunLogger`, and adds device, precision and data to its configuration.

    Not before training starts, so that a run which cannot start leaves no W&B files behind.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        skip_idle_hooks(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbRunLogger):
                logger.begin(
                    {
                        "device": str(trainer.strategy.root_device.type),
                        "precision": trainer.precision,
                        "world_size": trainer.world_size,
                        "data_source": getattr(trainer.datamodule, "data_source", None),  # type: ignore[attr-defined]
                        "parameters": sum(p.numel() for p in pl_module.parameters()),
                    }
                )
