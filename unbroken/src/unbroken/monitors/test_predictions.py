"""What the network predicted in the test pass: confusion matrix and most confident mistakes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from unbroken.monitors.monitor import Monitor, never_ends_the_run
from unbroken.results.run_result import Mistake, RunResult

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# A confusion matrix of more classes fills memory, and nobody reads it.
MOST_CLASSES = 1000


class TestPredictions(Monitor):
    """Counts predictions by class during the test pass, and keeps the most confident mistakes of
    all ranks.

    For classifiers alone: ``test_step`` returns logits, float (batch, classes), for (inputs,
    integer labels (batch,)). Mistakes are kept if inputs are images: (batch, 1 or 3, height,
    width), uint8 or 0-1.

    Args:
        most: Mistakes that are kept.
    """

    __test__ = False  # pytest: this is no test class

    def __init__(self, most: int = 24) -> None:
        self.most = most
        # int64 (classes, classes), row: label; None before a test pass.
        self.confusion: np.ndarray | None = None
        self.mistakes: list[Mistake] = []  # surest first

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Add the confusion matrix and the mistakes for the report and W&B."""
        result.confusion = self.confusion
        result.mistakes = self.mistakes

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.confusion = None
        self.mistakes = []

    @never_ends_the_run
    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        classified = classified_batch(outputs, batch)
        if classified is None:
            return
        counts = classified.confusion()
        if self.confusion is None:
            self.confusion = counts
        elif self.confusion.shape == counts.shape:
            self.confusion = self.confusion + counts
        else:
            # A second test loader with other classes.
            return
        self._keep(classified.mistakes(self.most))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = self.gather_from_ranks((self.confusion, self.mistakes))
        self.confusion = None
        self.mistakes = []
        if ranks is not None:
            self._join(ranks)

    @never_ends_the_run
    def _join(self, ranks: list[tuple[np.ndarray | None, list[Mistake]]]) -> None:
        for confusion, mistakes in ranks:
            if self.confusion is None:
                self.confusion = confusion
            elif confusion is not None:
                self.confusion = self.confusion + confusion
            self._keep(mistakes)

    def _keep(self, mistakes: Iterable[Mistake]) -> None:
        """Keep the surest of these and of those that are kept already."""
        surest_first = sorted([*self.mistakes, *mistakes], key=lambda mistake: -mistake.probability)
        self.mistakes = surest_first[: self.most]


@dataclass
class ClassifiedBatch:
    """A batch of a classifier's test, on the CPU save for its inputs."""

    inputs: Any
    labels: Tensor  # int64 (batch,)
    predictions: Tensor  # int64 (batch,)
    probabilities: Tensor  # float32 (batch,), 0-1, of the predictions
    classes: int

    @property
    def known(self) -> Tensor:
        """Whether a label is a class, bool (batch,). Others, such as -100, say that a sample does
        not count.
        """
        return (self.labels >= 0) & (self.labels < self.classes)

    def confusion(self) -> np.ndarray:
        """Samples by label (row) and prediction, int64 (classes, classes)."""
        # NumPy counts: torchmetrics takes gigabytes with --deterministic true.
        cells = (self.labels * self.classes + self.predictions)[self.known]
        counts = np.bincount(cells.numpy(), minlength=self.classes**2)
        return counts.reshape(self.classes, self.classes)

    def mistakes(self, most: int) -> list[Mistake]:
        """The surest mistakes, with their pictures; none where inputs are not images."""
        images = self.inputs
        if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3):
            return []
        is_wrong = self.known & (self.predictions != self.labels)
        sureness = torch.where(is_wrong, self.probabilities, 0.0)
        surest = sureness.topk(min(most, len(sureness))).indices
        shown = images[surest].cpu()
        if shown.dtype is not torch.uint8:
            shown = (shown.float().clamp(0, 1) * 255).round().byte()
        pictures = shown.permute(0, 2, 3, 1).numpy()  # (mistakes, height, width, channels)
        found: list[Mistake] = []
        for picture, place in zip(pictures, surest, strict=True):
            if sureness[place] > 0:
                found.append(
                    Mistake(
                        picture,
                        label=int(self.labels[place]),
                        prediction=int(self.predictions[place]),
                        probability=float(sureness[place]),
                    )
                )
        return found


def classified_batch(outputs: Any, batch: Any) -> ClassifiedBatch | None:
    """What a test step returned for a batch, where these are logits of a classifier; else None."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return None
    labels = batch[1]
    if not isinstance(outputs, Tensor) or not isinstance(labels, Tensor):
        return None
    if outputs.ndim != 2 or not outputs.is_floating_point():
        return None
    if labels.shape != outputs.shape[:1] or labels.dtype not in INTEGERS or len(labels) == 0:
        return None
    classes = outputs.shape[1]
    if not 1 < classes <= MOST_CLASSES:
        return None
    # The test is one pass: it may wait for the device.
    probabilities, predictions = outputs.float().cpu().softmax(dim=1).max(dim=1)
    return ClassifiedBatch(batch[0], labels.long().cpu(), predictions, probabilities, classes)
