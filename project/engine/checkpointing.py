"""Temporary: the run's checkpoint of fit, until fit uses ExactCheckpoint itself."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks

from project.data import BatchedDataModule
from project.engine import exact_checkpoint
from project.engine.checkpoint_files import RUN_KEY
from project.engine.cli import Configuration
from project.engine.exact_checkpoint import NOT_EXACT as NOT_EXACT
from project.engine.exact_checkpoint import ExactCheckpoint
from project.engine.following import Best as Best
from project.engine.parts.rows import MetricRows
from project.engine.restore import Run, point_latest_at
from project.engine.summary import versions, write_config
from project.engine.trainer import requeue_signal
from project.tables import flat


class RunCheckpoint(ExactCheckpoint):
    def __init__(self, config: Configuration, run: Run, best: Best, rows: Any) -> None:
        saves = config.trainer["enable_checkpointing"] is not False
        super().__init__(
            run.folder,
            every=config.options.checkpoint_every,
            parts=[MetricRows(rows)],
            run_id=run.run_id,
            changed=bool(run.changes),
            requeue_signal=requeue_signal(config),
        )
        self.saves = saves
        from project.engine import signals

        signals.watch(run.discard)
        self.best = best
        self.rows = rows
        self.record = dict[str, Any](
            run_name=run.name, run_id=run.run_id, config=config.resolved, versions=versions()
        )

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        if trainer.state.fn == "fit":
            saved = checkpoint.get(RUN_KEY) or {}
            before, now = (
                flat(each).get("model.optimizer")
                for each in (saved.get("config", {}), self.record["config"])
            )
            if before != now:
                self.loading.notes.append(f"optimizer {before} → {now}: its state starts anew.")
                checkpoint["optimizer_states"] = []
                if "start" in (saved.get("state") or {}):
                    saved["state"]["start"] = None
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            point_latest_at(self.folder)
            write_config(self.folder, self.record["config"])
            if self._resume is None and trainer.global_step == 0:
                self.rows.keep_rows(0)
                for name in ("summary.json", "report.html"):
                    (self.folder / name).unlink(missing_ok=True)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        data: Any = trainer.datamodule
        checkpoint.setdefault(RUN_KEY, {}).update(
            {
                **self.record,
                "epoch": trainer.current_epoch,
                "global_step": trainer.global_step,
                "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
                "data_source": getattr(data, "data_source", None),
                "data": data.description() if isinstance(data, BatchedDataModule) else {},
                "precision": trainer.precision,
                "world_size": trainer.world_size,
            }
        )
        super().on_save_checkpoint(trainer, pl_module, checkpoint)


class CheckpointPaths(callbacks.Callback):
    def __init__(self, run):
        pass
