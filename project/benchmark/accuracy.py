"""A configuration over several seeds: accuracy, time, and the time to a target, also of a plain PyTorch loop."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from project import fit
from project.benchmark import Row, Settings
from project.benchmark.devices import wanted_devices
from project.benchmark.overhead import InMemory, PerSampleImages, train_epoch
from project.benchmark.timing import EpochClock, afresh, median_and_spread, progress, scratch_run
from project.engine.cli import Configuration
from project.engine.summary import Summary
from project.errors import UserError

MOST_EPOCHS = 14  # what pytorch/examples trains for MNIST
IMAGE_SHAPE = (1, 28, 28)  # of its network


def measure_accuracy(config: Configuration, settings: Settings) -> list[Row]:
    """One row for the configuration, and with ``--baseline`` one for the plain PyTorch loop.

    ``test/accuracy`` is that of the best checkpoint (chosen on validation) on the test set, seen once per run; ``std``
    that of the seeds. ``fit_s`` is training with its validations and savings, from the first step. ``to_target_s`` ends
    where validation first reaches the target; it is left out where fewer than half of the seeds reach it.
    """
    plain = PlainLoop(config) if settings.baseline else None  # refuses other data before the seeds take their time
    runs: list[Summary] = []
    times: list[float] = []  # to the target
    for seed in progress("accuracy", range(settings.n)):
        clock, of_seed = EpochClock(), afresh(config, seed)
        with scratch_run() as run:
            runs.append(fit.train(of_seed, run, fit.build(of_seed, run, extra=[clock])))
        if "test/accuracy" not in runs[0].metrics:
            kind = type(config.module).__name__
            raise UserError(f"--model: this table needs a module that logs test/accuracy, not {kind}.")
        times += [seconds for seconds, accuracy in clock.validations if accuracy >= settings.target][:1]
    first, seconds = runs[0], [summary.fit_seconds for summary in runs]
    scores = [summary.metrics["test/accuracy"] for summary in runs]
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
        **({"to_target_s": statistics.median(times)} if 2 * len(times) >= len(runs) else {}),
        "test_accuracies": scores,
        "all_fit_s": seconds,
    }
    if plain is None:
        return [row]
    name = "plain loop (pytorch/examples' kind)"
    baseline: Row = {"configuration": name, "device": first.device, "n": 1, "target": settings.target}
    baseline |= plain.train(settings.target, 1 if settings.quick else MOST_EPOCHS)
    if "to_target_s" in baseline:
        row["times_faster_than_plain"] = baseline["to_target_s"] / row["fit_s"]
    return [row, baseline]


# The loop that most people start from: the kind that pytorch/examples has for MNIST.


def example_network() -> nn.Module:
    """Images (batch, 1, 28, 28) → log-probabilities (batch, 10); 1,199,882 parameters."""
    features = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    classifier = [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*features, *classifier, nn.LogSoftmax(dim=1))


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
        self.device = torch.device(wanted_devices(config)[-1])

    def train(self, target: float, most_epochs: int) -> Row:
        """``epochs``, ``test/accuracy`` at the end, ``fit_s``, and ``to_target_s`` where the target was reached."""
        seed_everything(0, verbose=False)
        network, device = example_network().to(self.device), self.device
        optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        row: Row = {"fit_s": 0.0}
        for epoch in progress("plain loop", range(1, most_epochs + 1)):
            row["fit_s"] += train_epoch(network, optimizer, self.loader, device).train_s
            schedule.step()
            with torch.no_grad():
                network.eval()
                right = [network(images.to(device)).argmax(1).cpu() == labels for images, labels in self.test_loader]
            row |= {"epochs": epoch, "test/accuracy": float(torch.cat(right).double().mean())}
            if row["test/accuracy"] >= target:
                return {**row, "to_target_s": row["fit_s"]}
        return row
