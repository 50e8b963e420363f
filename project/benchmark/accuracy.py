"""A configuration over several seeds: accuracy, time, and the time to a target, also of a plain PyTorch loop."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from project import fit
from project.benchmark import Row, Settings
from project.benchmark.devices import best_device
from project.benchmark.overhead import InMemory, PerSampleImages, plain_epoch
from project.benchmark.timing import EpochClock, afresh, median_and_spread, progress, scratch_run
from project.engine.cli import Configuration
from project.engine.summary import Summary
from project.errors import UserError

MOST_EPOCHS = 14  # what pytorch/examples trains for MNIST
IMAGE_SHAPE = (1, 28, 28)  # of its network


def measure(config: Configuration, settings: Settings) -> list[Row]:
    """One row for the configuration, and with ``--baseline`` one for the plain PyTorch loop.

    ``test/accuracy`` is that of the best checkpoint (chosen on validation) on the test set, seen once per run; ``std``
    that of the seeds. ``fit_s`` is training with its validations and savings, from the first step. ``to_target_s`` ends
    where validation first reaches the target; it is left out where fewer than half of the seeds reach it.
    """
    most_epochs = 0 if not settings.baseline else 1 if settings.quick else MOST_EPOCHS
    plain = PlainLoop(config) if settings.baseline else None  # refuses other data before the seeds are trained
    with progress("accuracy", settings.n + most_epochs) as bar:
        runs = []
        for seed in range(settings.n):
            bar.set_postfix_str(f"seed {seed}")
            runs.append(one_run(config, seed, settings.target))
            bar.update()
        first, seconds = runs[0][0], [summary.fit_seconds for summary, _ in runs]
        scores = [summary.metrics["test/accuracy"] for summary, _ in runs]
        times = [time for _, time in runs if time is not None]
        row: Row = {
            "configuration": " ".join(settings.fit_flags) or "default",
            "device": first.device,
            "data_source": first.data_source,
            "epochs": first.epochs,
            "test/accuracy": statistics.mean(scores),
            "std": statistics.stdev(scores) if len(scores) > 1 else None,
            "lowest": min(scores),
            "at_target": f"{sum(score >= settings.target for score in scores)} of {len(scores)}",
            **median_and_spread("fit_s", seconds),
            "target": settings.target,
        }
        if 2 * len(times) >= len(runs):
            row["to_target_s"] = statistics.median(times)
        row |= {"test_accuracies": scores, "all_fit_s": seconds}
        if plain is None:
            return [row]
        name = "plain loop (pytorch/examples' kind)"
        baseline: Row = {"configuration": name, "device": first.device, "n": 1, "target": settings.target}
        baseline |= plain.train(settings.target, most_epochs, bar)
    if "to_target_s" in baseline:
        row["times_faster_than_plain"] = baseline["to_target_s"] / row["fit_s"]
    return [row, baseline]


def one_run(config: Configuration, seed: int, target: float) -> tuple[Summary, float | None]:
    """A whole run of ``fit``, and the seconds to the target on validation, None where it was not reached.

    Raises:
        UserError: The module logs no ``test/accuracy``.
    """
    config, clock = afresh(config, seed), EpochClock()
    with scratch_run() as run:
        summary = fit.train(config, run, fit.build(config, run, extra=[clock]))
    if "test/accuracy" not in summary.metrics:
        raise UserError(
            f"--model: this table needs a module that logs test/accuracy, not {type(config.module).__name__}."
        )
    return summary, next((seconds for seconds, accuracy in clock.validations if accuracy >= target), None)


# The loop that most people start from: the kind that pytorch/examples has for MNIST.


class ExampleNetwork(nn.Module):
    """Two convolutions, one pooling, two linear layers with dropout: 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classify = nn.Sequential(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 1, 28, 28) → logits (batch, 10)."""
        return F.log_softmax(self.head(self.classify(self.features(images))), dim=1)


class PlainLoop:
    """Trains as the example does until the test accuracy, looked at after every epoch, reaches a target.

    All training samples (also those that we hold out for validation), batch 64, per-sample transforms through Pillow,
    Adadelta from 1.0 and 0.7 times that after each epoch. Its test after each epoch is not part of the time.

    Raises:
        UserError: The data are no grey images of 28 × 28 pixels in 10 classes, or do not lie in memory.
    """

    def __init__(self, config: Configuration) -> None:
        train, val, test = (InMemory.of(config, split) for split in ("train", "val", "test"))
        shape, classes = tuple(train.images.shape[1:]), int(train.labels.max()) + 1
        if shape != IMAGE_SHAPE or classes > 10:
            raise UserError(f"--baseline needs images of {IMAGE_SHAPE} in 10 classes, got {shape} in {classes}.")
        both: Dataset[Any] = ConcatDataset([PerSampleImages(part) for part in (train, val)])
        self.loader: DataLoader[Any] = DataLoader(both, batch_size=64, shuffle=True)
        self.test_loader: DataLoader[Any] = DataLoader(PerSampleImages(test), batch_size=1000)
        self.device = best_device(config)

    def train(self, target: float, most_epochs: int, bar: Any) -> Row:
        """``epochs``, ``test/accuracy`` at the end, ``fit_s``, and ``to_target_s`` where the target was reached."""
        seed_everything(0, verbose=False)
        network = ExampleNetwork().to(self.device)
        optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        row: Row = {"fit_s": 0.0}
        for epoch in range(1, most_epochs + 1):
            bar.set_postfix_str(f"plain loop, epoch {epoch}")
            row["fit_s"] += plain_epoch(network, optimizer, self.loader, self.device).train_s
            schedule.step()
            row |= {"epochs": epoch, "test/accuracy": self._test(network)}
            bar.update()
            if row["test/accuracy"] >= target:
                return {**row, "to_target_s": row["fit_s"]}
        return row

    @torch.no_grad()
    def _test(self, network: nn.Module) -> float:
        network.eval()
        correct = total = 0
        for images, labels in self.test_loader:
            correct += int((network(images.to(self.device)).argmax(dim=1) == labels.to(self.device)).sum())
            total += len(labels)
        return correct / total
