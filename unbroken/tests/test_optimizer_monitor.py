"""What the optimizer worked with is logged as it was at that very step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from unbroken.loggers.metrics_csv import MetricsCSV
from unbroken.monitors.memory import MemoryMonitor
from unbroken.monitors.optimizer import OptimizerMonitor
from unbroken.monitors.throughput import ThroughputMonitor

from tests.monitored import Linear, Points, make_trainer, one_thread, read  # noqa: F401 - one_thread is a fixture
from tests.other_tasks import WithoutRate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class GradientNorms(Callback):
    """The norm of every step's gradients, computed by hand, before clipping."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(
            float(sum((p.grad.double() ** 2).sum() for p in pl_module.parameters()) ** 0.5)
        )


class Decaying(Linear):
    """Learning rate 0.125 for the first step, half of the last for each further one."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.125)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_rate_and_gradient_norm_are_those_of_the_logged_step(tmp_path, accumulate):
    by_hand = GradientNorms()
    options = {
        "gradient_clip_val": 1e-3,
        "log_every_n_steps": 2,
        "accumulate_grad_batches": accumulate,
    }
    trainer, rows = make_trainer(tmp_path, by_hand, OptimizerMonitor(), **options)
    trainer.fit(Decaying(), Points(8 * 6 * accumulate, 8).loader())
    expected = []
    for step in range(6):
        values = {"lr": 0.125 * 0.5**step}
        if step % 2:
            values["grad_norm"] = pytest.approx(by_hand.norms[step])
        expected.append((step, values))
    assert rows.of("optimizer") == expected
    assert len(by_hand.norms) == 6


def test_the_learning_rate_of_a_run_has_at_least_twenty_points_and_few_more(tmp_path):
    for steps, apart in ((100, 5), (39, 1), (7, 1)):
        trainer, rows = make_trainer(tmp_path, OptimizerMonitor(), log_every_n_steps=50)
        trainer.fit(Decaying(), Points(8 * steps, 8).loader())
        points = [step for step, values in rows.of("optimizer") if "lr" in values]
        assert points == list(range(apart - 1, steps, apart))


class Unrated(Linear):
    def configure_optimizers(self) -> Any:
        return WithoutRate(self.parameters(), {"pace": 0.02})


def test_an_optimizer_without_a_rate_has_a_norm(tmp_path):
    trainer, rows = make_trainer(tmp_path, OptimizerMonitor(), log_every_n_steps=2)
    trainer.fit(Unrated(), Points(8 * 4, 8).loader())
    assert [(step, {*values}) for step, values in rows.of("optimizer")] == [
        (1, {"grad_norm"}),
        (3, {"grad_norm"}),
    ]


class Untrained(Linear):
    def configure_optimizers(self) -> None:
        return None


def test_without_an_optimizer_there_is_nothing_to_log(tmp_path):
    monitor = OptimizerMonitor()
    trainer, rows = make_trainer(tmp_path, monitor, log_every_n_steps=2)
    trainer.fit(Untrained(), Points(8 * 4, 8).loader())
    assert rows.of("optimizer") == []
    assert not monitor.is_off


def test_under_16_mixed_the_norm_is_unscaled_and_the_scale_is_logged(tmp_path):
    plain, scaled = [
        make_trainer(
            tmp_path, OptimizerMonitor(), log_every_n_steps=1, limit_train_batches=1, **options
        )
        for options in (
            {},
            {
                "plugins": [
                    MixedPrecision(
                        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0)
                    )
                ]
            },
        )
    ]
    for trainer, _ in (plain, scaled):
        torch.manual_seed(1)
        trainer.fit(Linear(), Points(16, 8).loader())
    ((_, with_scaler),) = scaled[1].of("optimizer")
    ((_, without),) = plain[1].of("optimizer")
    assert "loss_scale" not in without
    assert with_scaler["loss_scale"] == 1024.0
    assert with_scaler["grad_norm"] == pytest.approx(without["grad_norm"], rel=0.01)


class Alternating(Linear):
    """Two optimizers by hand, the first of which steps twice in a batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, first, second):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=lr) for lr in (0.25, 0.5)]


def test_of_several_optimizers_the_first_is_logged_at_every_log_step(tmp_path):
    by_hand = GradientNorms()
    trainer, rows = make_trainer(tmp_path, by_hand, OptimizerMonitor(), log_every_n_steps=2)
    trainer.fit(Alternating(), Points(8 * 6, 8).loader())
    of_the_first = by_hand.norms[1::3]  # its second step of every batch
    at_log_steps = [(step, values) for step, values in rows.of("optimizer") if step % 2]
    assert at_log_steps == [
        (step, {"lr": 0.25, "grad_norm": pytest.approx(of_the_first[step])}) for step in (1, 3, 5)
    ]


class Logging(Linear):
    """Logs its loss at every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_monitors_stand_in_the_rows_of_the_loss(tmp_path, accumulate):
    throughput, csv = ThroughputMonitor(), MetricsCSV(tmp_path / "metrics.csv")
    monitors = [throughput, MemoryMonitor(), OptimizerMonitor()]
    options = {"log_every_n_steps": 2, "accumulate_grad_batches": accumulate}
    trainer, _ = make_trainer(tmp_path, *monitors, **options)
    trainer.loggers = [csv]
    trainer.fit(Logging(), Points(8 * 7 * accumulate, 8).loader())
    # Between them stand points of the learning rate's curve alone.
    rows = [row for row in read(csv.path) if "memory/rss_gib" in row]
    *at_log_steps, at_the_end = rows
    assert [row["step"] for row in at_log_steps] == [1, 3, 5]
    for row in at_log_steps:
        assert {"train/loss", "optimizer/lr", "optimizer/grad_norm", "memory/rss_gib"} <= set(row)
        assert ("throughput/step_ms" in row) == (row["step"] > 1)  # two steps warm up
    assert at_the_end["step"] == 6
    assert {"throughput/step_ms", "memory/rss_gib"} <= set(at_the_end)
    assert "optimizer/grad_norm" not in at_the_end
    # for callbacks that follow one, and for checkpoints: not rounded to float32
    assert float(trainer.callback_metrics["throughput/step_ms"]) == at_the_end["throughput/step_ms"]
