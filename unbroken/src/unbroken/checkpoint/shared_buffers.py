"""Buffers, such as BatchNorm's averages, that all ranks have from rank zero."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from unbroken import lightning_internals


def share_buffers(trainer: Trainer, module: LightningModule, cpu_group: Any) -> None:
    """Give all ranks rank zero's buffers, as a resumed run has them: before a validation, and at
    the end of training.

    DDP does so before a forward pass, but not while gradients accumulate, and not for averaged
    weights. NCCL takes nothing from the CPU; ``cpu_group`` does.
    """
    if trainer.world_size == 1:
        return
    for part in (module, *lightning_internals.averaged_models(trainer)):
        for buffer in part.buffers():
            group = cpu_group if buffer.device.type == "cpu" else None
            # NCCL takes no tensor that is transposed, say.
            whole = buffer.contiguous()
            torch.distributed.broadcast(whole, src=0, group=group)
            if whole is not buffer:
                buffer.copy_(whole)


def share_buffers_in_next_pass(trainer: Trainer) -> None:
    """Let DDP share rank zero's buffers before the forward pass that follows a validation.

    After a pass without gradients DDP leaves it out once. A checkpoint holds rank zero's buffers,
    so that a resumed run would go on with others than the ranks had.
    """
    model = trainer.model
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = True
