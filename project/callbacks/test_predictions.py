"""What the network predicted in the test pass: confusion matrix and most confident mistakes."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project.engine.ranks import of_all_ranks
from project.engine.summary import Mistake

MOST_CLASSES = 1000  # a confusion matrix of more fills memory, and nobody reads it


class TestPredictions(Callback):
    """Counts predictions by class during the test pass, and keeps the ``most`` confident mistakes of all ranks.

    For classifiers alone: ``test_step`` returns logits, float (batch, classes), for (inputs, integer labels (batch,)).
    Mistakes are kept if inputs are images: (batch, 1 or 3, height, width), uint8 or 0-1. Nothing waits for the device.
    """

    __test__ = False  # pytest: this is no test class

    def __init__(self, most: int = 24) -> None:
        self.most = most
        self.confusion: np.ndarray | None = None  # int64 (classes, classes), row: label; None before a test pass
        self.mistakes: list[Mistake] = []  # surest first
        self._counts: Tensor | None = None  # (classes × classes,)
        self._kept: list[dict[str, Tensor]] = []  # of the surest mistakes so far: sureness, label, prediction, image

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.confusion, self.mistakes, self._counts, self._kept = None, [], None, []

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: int, **__: int
    ) -> None:
        if not _is_classified(outputs, batch):
            return
        images, labels, classes = batch[0], batch[1].long(), outputs.shape[1]
        probabilities, predictions = outputs.float().softmax(dim=1).max(dim=1)  # (batch,)
        if self._counts is None:
            self._counts = torch.zeros(classes * classes, dtype=torch.int32, device=outputs.device)
        elif len(self._counts) != classes * classes:  # a second test loader with other classes
            return
        # torch.bincount and torchmetrics' confusion matrix, built on it, wait for the device at every batch
        known = (labels >= 0) & (labels < classes)  # others, such as -100, say that a sample does not count
        self._counts.index_add_(0, labels.clamp(0, classes - 1) * classes + predictions, known.int())
        # right predictions sort last, so nothing must wait for the number of wrong ones
        sureness = torch.where(known & (predictions != labels), probabilities, -1.0)
        here = {"sureness": sureness, "label": labels, "prediction": predictions}
        if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3):
            here["image"] = images
        self._kept = [self._surest([self._surest([here]), *self._kept])]

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = None
        if self._counts is not None:
            mine = (self._counts.long().cpu(), {key: value.cpu() for key, value in self._kept[0].items()})
        ranks = [part for part in of_all_ranks(mine) if part is not None]
        self._counts, self._kept = None, []
        if not ranks:
            return
        counts = sum(counts for counts, _ in ranks)
        self.confusion = counts.view(round(len(counts) ** 0.5), -1).numpy()
        kept = self._surest([kept for _, kept in ranks])
        if "image" not in kept:
            return
        images = kept["image"]
        if images.dtype is not torch.uint8:
            images = (images.float().clamp(0, 1) * 255).round().byte()
        pictures = images.permute(0, 2, 3, 1).numpy()
        rows = zip(kept["sureness"], kept["label"], kept["prediction"], pictures, strict=True)
        self.mistakes = [Mistake(image, int(y), int(p), float(sure)) for sure, y, p, image in rows if sure >= 0]

    def _surest(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The surest of the rows of several parts; without images where these differ in size."""
        shared = [key for key in parts[0] if len({part[key].shape[1:] if key in part else None for part in parts}) == 1]
        rows = {key: torch.cat([part[key] for part in parts]) for key in shared}
        first = rows["sureness"].topk(min(self.most, len(rows["sureness"]))).indices
        return {key: value[first] for key, value in rows.items()}


def _is_classified(outputs: Any, batch: Any) -> bool:
    """Whether these are logits of a classifier, and the labels that belong to them."""
    labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if not (isinstance(outputs, Tensor) and isinstance(labels, Tensor)):
        return False
    logits = outputs.is_floating_point() and outputs.ndim == 2 and 1 < outputs.shape[1] <= MOST_CLASSES
    integers = labels.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return logits and integers and len(outputs) > 0 and labels.shape == outputs.shape[:1]
