"""A configuration over several seeds: accuracy, time, and the time to a target; a plain loop to compare with."""

from __future__ import annotations

import statistics
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from project.benchmark.flags import Settings
from project.benchmark.overhead import best_device
from project.benchmark.plain_loop import time_to_target
from project.benchmark.steps import Steps
from project.benchmark.timing import median_and_spread
from project.benchmark.with_lightning import add_callbacks, fresh_model, scratch_folder, silenced
from project.engine import training
from project.engine.cli import ProjectCLI
from project.engine.run_folder import choose
from project.engine.trainer import make_trainer


class ReachedTarget(Callback):
    """Seconds from the start of training to the end of the first validation at or above a target."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.seconds: float | None = None
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reached = float(trainer.callback_metrics.get("val/accuracy", 0)) >= self.target
        if reached and self.seconds is None and not trainer.sanity_checking:
            self.seconds = time.perf_counter() - self._began


def measure(cli: ProjectCLI, settings: Settings) -> list[dict[str, Any]]:
    """One row for the configuration, and with ``--baseline`` one for the plain loop.

    ``test/accuracy`` is that of the best checkpoint (chosen on validation) on the test set, seen once per run; ``std``
    that of the seeds. ``fit_s`` is training with its validations and savings, from the first step. ``to_target_s`` ends
    where validation first reaches the target; it is left out where fewer than half of the seeds reach it.
    """
    steps = Steps("accuracy", settings.n + settings.baseline)
    runs = []
    for seed in range(settings.n):
        steps.begin(f"seed {seed}")
        runs.append(one_run(cli, seed, settings.target))
    scores = [run["test/accuracy"] for run in runs]
    times = [run["to_target"] for run in runs if run["to_target"] is not None]
    row: dict[str, Any] = {
        "configuration": " ".join(settings.fit_flags) or "default",
        "device": runs[0]["device"],
        "data_source": runs[0]["data_source"],
        "epochs": runs[0]["epochs"],
        "test/accuracy": statistics.mean(scores),
        "std": statistics.stdev(scores) if len(scores) > 1 else None,
        "lowest": min(scores),
        "at_target": f"{sum(score >= settings.target for score in scores)} of {len(scores)}",
        **median_and_spread("fit_s", [run["fit_seconds"] for run in runs]),
        "target": settings.target,
    }
    if 2 * len(times) >= len(runs):
        row["to_target_s"] = statistics.median(times)
    row["test_accuracies"] = scores
    row["all_fit_s"] = [run["fit_seconds"] for run in runs]
    rows = [row]
    if settings.baseline:
        seed_everything(0, verbose=False)
        most = {"most_epochs": 1} if settings.quick else {}
        plain = time_to_target(cli.datamodule, settings.target, best_device(), steps, **most)
        name = "plain loop (pytorch/examples' kind)"
        rows.append({"configuration": name, "device": runs[0]["device"], "n": 1, "target": settings.target, **plain})
        if "to_target_s" in plain:
            row["times_faster_than_plain"] = plain["to_target_s"] / row["fit_s"]
    steps.finish()
    return rows


def one_run(cli: ProjectCLI, seed: int, target: float) -> dict[str, Any]:
    """What a whole run's summary says, and its time to the target on validation."""
    fresh_model(cli, seed)
    reached = ReachedTarget(target)
    add_callbacks(cli, [reached])
    with scratch_folder() as folder, silenced():
        run = choose(folder, None, None)
        run.create()
        facts = training.train(cli, run, make_trainer(cli, run))
    return {**facts, "to_target": reached.seconds}
