"""A Trainer script whose steps gather what all ranks hold: gathering_script.py FOLDER DEVICES
SAMPLES...

Each number of samples is a training of its own. With ``KILL_AT`` in the environment rank zero kills
itself after that step.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.utilities.distributed import gather_all_tensors
from unbroken import ExactCheckpoint

from tests.plain_module import rows

BATCH_SIZE = 8


class Contrasts(LightningModule):
    """A contrastive loss over the batches of all ranks, with batch norms.

    Args:
        samples: For training.
        evaluated: For each validation.
        how: How a validation gathers: ``plainly`` by Lightning's all_gather, ``any size`` by the
            one of torchmetrics, or ``not``.
    """

    def __init__(self, samples: int = 105, evaluated: int = 33, how: str = "not") -> None:
        super().__init__()
        self.samples = samples
        self.evaluated = evaluated
        self.how = how
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        # For each batch of this training: how many samples each rank had.
        self.sizes: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        embedded = nn.functional.normalize(self.net(batch[0]))
        everyone = self.all_gather(embedded, sync_grads=True).reshape(-1, 3)
        mine = torch.arange(len(embedded)) + self.trainer.global_rank * len(embedded)
        self.sizes.append(self.all_gather(torch.tensor(len(embedded))).reshape(-1).tolist())
        loss = nn.functional.cross_entropy(embedded @ everyone.T / 0.5, mine)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        embedded = self.net(batch[0])
        everyone = embedded
        if self.how == "plainly":
            everyone = self.all_gather(embedded).reshape(-1, 3)
        elif self.how == "any size":
            everyone = torch.cat(gather_all_tensors(embedded))
        self.log("val_loss", torch.cdist(embedded, everyone).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(self.samples, 0), BATCH_SIZE, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows(self.evaluated, 1), BATCH_SIZE)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 0 and self.trainer.global_step == int(os.environ.get("KILL_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    # The ranks share the cores of one machine.
    torch.set_num_threads(1)
    folder = sys.argv[1]
    devices = int(sys.argv[2])
    for samples in map(int, sys.argv[3:]):
        seed_everything(7, verbose=False)
        keep = ExactCheckpoint(f"{folder}-{samples}", every="2")
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=devices,
            # With more than two ranks DDP keeps the order of its sums only so.
            strategy="ddp" if devices < 3 else "ddp_find_unused_parameters_true",
            callbacks=[keep],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Contrasts(samples)
        share = math.ceil(samples / devices)
        if share % BATCH_SIZE == 1:
            # A batch norm refuses a batch of one sample, with a plain Trainer, too.
            module.net[1] = nn.Identity()
        trainer.fit(module, ckpt_path=keep.resume_from)
        if trainer.is_global_zero:
            full = [[BATCH_SIZE] * devices] * (share // BATCH_SIZE)
            rest = [[share % BATCH_SIZE] * devices] if share % BATCH_SIZE else []
            assert module.sizes == (full + rest) * 2, (samples, module.sizes)
            print("trained", samples, flush=True)


if __name__ == "__main__":
    main()
