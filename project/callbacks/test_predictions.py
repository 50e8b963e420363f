"""What the network predicted in the test pass: confusion matrix and most confident mistakes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project.engine.ranks import of_all_ranks
from project.engine.summary import Mistake

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOST_CLASSES = 1000  # a confusion matrix of more fills memory, and nobody reads it


class TestPredictions(Callback):
    """Counts predictions by class during the test pass, and keeps the ``most`` confident mistakes of all ranks. For
    classifiers alone: ``test_step`` returns logits, float (batch, classes), for (inputs, integer labels (batch,)).
    Mistakes are kept if inputs are images: (batch, 1 or 3, height, width), uint8 or 0-1.
    """

    __test__ = False  # pytest: this is no test class

    def __init__(self, most: int = 24) -> None:
        self.most = most
        self.confusion: np.ndarray | None = (
            None  # int64 (classes, classes), row: label; None before a test pass
        )
        self.mistakes: list[Mistake] = []  # surest first

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.confusion, self.mistakes = None, []

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        if not (
            isinstance(outputs, Tensor)
            and isinstance(labels, Tensor)
            and labels.shape == outputs.shape[:1]
        ):
            return
        classes = outputs.shape[1] if outputs.ndim == 2 and outputs.is_floating_point() else 0
        if not 1 < classes <= MOST_CLASSES or labels.dtype not in INTEGERS or len(labels) == 0:
            return  # no logits of a classifier
        images, labels = batch[0], labels.long().cpu()  # the one pass may wait for it
        probabilities, predictions = outputs.float().cpu().softmax(dim=1).max(dim=1)  # (batch,)
        known = (labels >= 0) & (
            labels < classes
        )  # others, such as -100, say that a sample does not count
        cells = (labels * classes + predictions)[
            known
        ]  # torchmetrics takes gigabytes with --deterministic true
        counts = np.bincount(cells.numpy(), minlength=classes**2).reshape(classes, classes)
        if self.confusion is not None and self.confusion.shape != counts.shape:
            return  # a second test loader with other classes
        self.confusion = counts if self.confusion is None else self.confusion + counts
        if isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3):
            sureness = torch.where(known & (predictions != labels), probabilities, 0.0)
            surest = sureness.topk(min(self.most, len(sureness))).indices
            shown = images[surest].cpu()
            if shown.dtype is not torch.uint8:
                shown = (shown.float().clamp(0, 1) * 255).round().byte()
            pictures = shown.permute(0, 2, 3, 1).numpy()
            rows = zip(pictures, labels[surest], predictions[surest], sureness[surest], strict=True)
            self._keep(
                Mistake(image, int(y), int(p), float(sure))
                for image, y, p, sure in rows
                if sure > 0
            )

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = of_all_ranks((self.confusion, self.mistakes))
        counts = [confusion for confusion, _ in ranks if confusion is not None]
        self.confusion, self.mistakes = sum(counts) if counts else None, []
        self._keep(mistake for _, mistakes in ranks for mistake in mistakes)

    def _keep(self, mistakes: Iterable[Mistake]) -> None:
        """Keep the surest of these and of those that are kept already."""
        self.mistakes = sorted(
            [*self.mistakes, *mistakes], key=lambda mistake: -mistake.probability
        )[: self.most]
