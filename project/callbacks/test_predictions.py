"""What the network predicted in the test pass: confusion matrix and most confident mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from project.engine.log_steps import skip_idle_hooks


@dataclass(frozen=True)
class Mistake:
    """A test image that was given another label than its own."""

    image: np.ndarray  # uint8 (height, width, channels), as it was before normalisation
    label: int
    prediction: int
    probability: float  # 0-1, of the prediction


class TestPredictions(Callback):
    """Counts predictions by class during the test pass, and keeps the mistakes that the network was surest of.

    Needs a ``test_step`` that returns logits (batch, classes) for a batch of (images, labels); with any other there
    is nothing to show and nothing is counted. Results are of all ranks together. Nothing here waits for the device
    before the pass has ended.

    Args:
        most: Mistakes to keep.
    """

    __test__ = False  # pytest: this is no test class

    def __init__(self, most: int = 24) -> None:
        self.most = most
        self.confusion: np.ndarray | None = None
        """int64 (classes, classes): row is the label, column the prediction. None before a test pass."""
        self.mistakes: list[Mistake] = []
        """Surest first."""
        self._counts: Tensor | None = None  # (classes × classes,)
        self._kept: dict[str, Tensor] = {}  # of the surest mistakes so far: sureness, label, prediction, image

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        skip_idle_hooks(self)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.confusion, self.mistakes = None, []
        self._counts, self._kept = None, {}

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not (
            isinstance(outputs, Tensor) and outputs.ndim == 2 and isinstance(batch, (tuple, list)) and len(outputs)
        ):
            return
        images, labels = batch[0], batch[1]
        classes = outputs.shape[1]
        probabilities, predictions = outputs.float().softmax(dim=1).max(dim=1)  # (batch,)
        if self._counts is None:
            self._counts = torch.zeros(classes * classes, dtype=torch.int32, device=outputs.device)
        # torch.bincount and torchmetrics' confusion matrix, built on it, wait for the device at every batch
        self._counts.index_add_(0, labels * classes + predictions, torch.ones_like(labels, dtype=torch.int32))
        # Right predictions sort last, so that there is no need to wait for how many are wrong.
        sureness = torch.where(predictions == labels, -1.0, probabilities)
        here = {"sureness": sureness, "label": labels, "prediction": predictions, "image": images}
        self._kept = self._surest(here if not self._kept else _joined(self._surest(here), self._kept))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = None
        if self._counts is not None:
            mine = (self._counts.long().cpu(), {key: value.cpu() for key, value in self._kept.items()})
        ranks = [part for part in _of_all_ranks(mine) if part is not None]
        self._counts, self._kept = None, {}
        if not ranks:
            return
        counts = sum(part[0] for part in ranks)
        classes = round(len(counts) ** 0.5)
        self.confusion = counts.view(classes, classes).numpy()
        kept = ranks[0][1]
        for _, more in ranks[1:]:
            kept = _joined(kept, more)
        kept = self._surest(kept)
        pictures = _pictures(kept["image"], trainer.datamodule)  # type: ignore[attr-defined]
        rows = zip(kept["sureness"], kept["label"], kept["prediction"], pictures, strict=True)
        self.mistakes = [Mistake(image, int(y), int(p), float(sure)) for sure, y, p, image in rows if sure >= 0]

    def _surest(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        first = rows["sureness"].topk(min(self.most, len(rows["sureness"]))).indices
        return {key: value[first] for key, value in rows.items()}


def _joined(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.cat([one[key], other[key]]) for key in one}


def _of_all_ranks(value: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _pictures(images: Tensor, datamodule: Any) -> list[np.ndarray]:
    """Normalised images (n, channels, height, width) → uint8 (height, width, channels) each."""
    channels = images.shape[1]
    mean, std = getattr(datamodule, "mean", [0.0]), getattr(datamodule, "std", [1.0])
    if len(mean) not in (1, channels):
        rank_zero_warn(f"mean has {len(mean)} channels, the images {channels}: the mistakes are shown as they are.")
        mean, std = [0.0], [1.0]
    unit = images.float() * torch.tensor(std).view(1, -1, 1, 1) + torch.tensor(mean).view(1, -1, 1, 1)
    return list((unit.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy())
