"""The plain task, and what a Trainer can be told."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.situations.situation import Manual, Task, add

add("plain", Task)
add("accumulates_2", Task, accumulate_grad_batches=2)
add("accumulates_3_over_a_partial_end", Task, accumulate_grad_batches=3)
add("clips_by_norm", Task, gradient_clip_val=0.1)
add("clips_by_value", Task, gradient_clip_val=0.01, gradient_clip_algorithm="value")
add("validates_every_2_batches", Task, val_check_interval=2)
add("validates_twice_an_epoch", Task, val_check_interval=0.5)
add("validates_inside_accumulated_steps", Task, val_check_interval=3, accumulate_grad_batches=2)
add("validates_over_epochs", Task, val_check_interval=5, check_val_every_n_epoch=None)
add("validates_every_second_epoch", Task, check_val_every_n_epoch=2, max_epochs=4)
add("never_validates", Task, monitor="train_loss", limit_val_batches=0)
add("limits_batches", Task, limit_train_batches=5, limit_val_batches=2)
add("limits_fractions", Task, limit_train_batches=0.6, limit_val_batches=0.7)
add("max_steps_inside_an_epoch", Task, max_steps=17, max_epochs=-1)
add("max_steps_inside_an_accumulated_epoch", Task, max_steps=9, accumulate_grad_batches=2)
add("max_time_far_away", Task, max_time="00:01:00:00", ignores=("time_elapsed",))
add("min_epochs", Task, min_epochs=2)
add("no_sanity_check", Task, num_sanity_val_steps=0)
add("sanity_check_of_all", Task, num_sanity_val_steps=-1)
add("reloads_every_epoch", Task, reload_dataloaders_every_n_epochs=1)
add(
    "reloads_every_second_epoch",
    Task,
    reload_dataloaders_every_n_epochs=2,
    max_epochs=4,
    says="not exact",
    is_exact=False,
)
add("double_precision", Task, precision="64-true")
add("bf16_mixed", Task, precision="bf16-mixed")
add("logs_every_step", Task, log_every_n_steps=1)
add("logs_rarely", Task, log_every_n_steps=50)
add("detects_anomalies", Task, detect_anomaly=True)
add("no_inference_mode", Task, inference_mode=False)
add("fits_twice_in_one_process", Task, fits=2)
add("manual_fits_twice", Manual, fits=2)
add("overfits_batches", Task, overfit_batches=3)
add("one_batch_an_epoch", Task, limit_train_batches=1, max_epochs=6)
add("simple_profiler", Task, profiler="simple")


class Compiled(Task):
    """A network that is compiled, in the eager backend, which needs no compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


add("compiled", Compiled)


class ReadsItself(Task):
    """Reads its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _batch_idx, _dataloader_idx = next(dataloader_iter)
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=8)
        return loss


add("dataloader_iter", ReadsItself)


class SkipsSteps(Task):
    """Now and then there is nothing to learn from a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if torch.rand(()) < 0.3:
            return None
        return super().training_step(batch, batch_idx)


add("skips_steps_by_chance", SkipsSteps)


class EndsEpochs(Task):
    """Ends an epoch before its last batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 4 else None


add("ends_epochs_early", EndsEpochs)


class Lazy(Task):
    """A layer that finds its size with the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(6), nn.Dropout(0.1), nn.LazyLinear(1))
        self.net(torch.zeros(2, 4))


add("lazy_layers", Lazy)


class Recurrent(Task):
    """A state of a recurrent network that is carried from batch to batch, as a plain buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)
        self.last = nn.Linear(6, 1)
        self.register_buffer("memory", torch.zeros(6), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.cell(x, self.memory.expand(len(x), 6))).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.memory = self.cell(batch[0], self.memory.expand(len(batch[0]), 6)).mean(0).detach()
        return loss


add("memory_from_batch_to_batch", Recurrent)
