"""An epoch's printed values are always in its row, also with fewer batches than a log interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor
from unbroken.loggers.metrics_csv import MetricsCSV
from unbroken.monitors.last_step import LogLastStep

from tests.monitored import (
    Linear,
    Points,
    make_trainer,
    one_thread,  # noqa: F401 - the fixture of every test here
    read,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Plain(Linear):
    """A module that logs as Lightning's documentation shows it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        self.log("train/mean", loss, on_step=False, on_epoch=True)
        return loss


class Printed(Callback):
    """Keeps what an epoch's line prints, as the next epoch begins or training ends."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("log_every_n_steps", [50, 2, 1])
def test_the_printed_value_is_in_the_row_of_the_epochs_last_step(
    tmp_path: Path, log_every_n_steps: int, validates: bool
) -> None:
    printed = Printed()
    csv = MetricsCSV(tmp_path / "metrics.csv")
    trainer, rows = make_trainer(
        tmp_path, printed, LogLastStep(), max_epochs=3, log_every_n_steps=log_every_n_steps
    )
    trainer.loggers = [rows, csv]
    validation = Points(16, 8).loader() if validates else None
    trainer.fit(Plain(), Points(24, 8).loader(), validation)
    assert trainer.log_every_n_steps == log_every_n_steps
    ends = {row["step"]: row["train/loss"] for row in read(csv.path) if "train/mean" in row}
    assert ends == dict(zip([2, 5, 8], printed.losses, strict=True))
    logged = [step for step, row in rows.rows if "train/loss" in row]
    assert len(logged) == len(set(logged)), "no value is logged twice"


def test_a_run_that_stops_inside_an_epoch_has_its_last_value(tmp_path: Path) -> None:
    trainer, rows = make_trainer(tmp_path, LogLastStep(), max_epochs=-1, max_steps=2)
    trainer.fit(Plain(), Points(80, 8).loader())
    assert [step for step, row in rows.rows if "train/loss" in row] == [1]


def test_a_run_that_wants_no_log_steps_has_none(tmp_path: Path) -> None:
    trainer, rows = make_trainer(tmp_path, LogLastStep(), log_every_n_steps=0)
    trainer.fit(Plain(), Points(24, 8).loader())
    assert not [row for _, row in rows.rows if "train/loss" in row]
