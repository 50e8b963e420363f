"""The one time a run looks at the test set: best.ckpt, measured as it will predict anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from project.callbacks.checkpoint import RunCheckpoint
from project.cli import ProjectCLI
from project.errors import UserError


def test_best(trainer: Trainer, cli: ProjectCLI, keeper: RunCheckpoint) -> dict[str, Any]:
    """Metrics of best.ckpt on the test set: the one time a run looks at it."""
    if not keeper.best_path.exists():
        raise UserError(
            "--ckpt_path: that checkpoint has trained as long as it should, nothing is left to do. Raise --max_epochs."
        )
    # In float32: the figure is then what the checkpoint predicts on any device, also on a CPU.
    if isinstance(trainer.precision_plugin, (MixedPrecision, HalfPrecision, DoublePrecision)):
        trainer.strategy.precision_plugin = Precision()
        cli.model.float()
    with float32_products():
        (metrics,) = trainer.test(
            cli.model, datamodule=cli.datamodule, ckpt_path=str(keeper.best_path), weights_only=True, verbose=False
        )
    return dict(metrics)


@contextmanager
def float32_products() -> Iterator[None]:
    """No TF32, which GPUs use for convolutions by default and for matrix products with ``--matmul_precision high``."""
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
