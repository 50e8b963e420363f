"""Runs that end, also inside an epoch, and are given more to do."""

from __future__ import annotations

from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from tests.situations.hooks import (
    ACTS,
    ExtraState,
    ForwardMean,
    OwnState,
    act_at,
)
from tests.situations.loaders import StreamWithState, reads
from tests.situations.logged import LogsEveryWay, Wrapped
from tests.situations.optimizers import Accumulates
from tests.situations.schedules import follows
from tests.situations.situation import Manual, Task, add
from tests.situations.user_callbacks import counts_at

steps = {"max_steps": 10}

add("longer_by_epochs", Task, shorter={"max_epochs": 1})
add("longer_by_steps", Task, shorter=steps)
add("longer_by_steps_at_an_epochs_end", Task, shorter={"max_steps": 14})
add("longer_by_steps_in_the_first_epoch", Task, shorter={"max_steps": 2})
add("longer_by_steps_and_validates_inside_epochs", Task, shorter=steps, val_check_interval=3)
add("longer_by_accumulated_steps", Task, shorter={"max_steps": 5}, accumulate_grad_batches=2)
add("longer_manual", Manual, shorter=steps)
add("longer_manual_accumulation", Accumulates, shorter={"max_steps": 3})
add("longer_with_extra_state", ExtraState, shorter=steps)
add("longer_with_a_running_mean", ForwardMean, shorter=steps)
add("longer_with_own_state", OwnState, shorter=steps)
add("longer_logs_every_way", LogsEveryWay, shorter=steps)
add("longer_metrics_around_metrics", Wrapped, shorter=steps)
add("longer_stream_with_state", reads(lambda: DataLoader(StreamWithState(), 8)), shorter=steps)
add("longer_schedule", follows(lambda o: StepLR(o, 1, 0.5)), shorter=steps)
add(
    "longer_plateau",
    follows(lambda o: ReduceLROnPlateau(o, patience=0), monitor="val_loss"),
    shorter=steps,
)
for act in ACTS:
    module_kind, callback_kind = act_at("on_train_epoch_end", act)
    add(f"longer_module_{act.__name__}_at_epoch_end", module_kind, shorter=steps)
for hook in ("on_train_epoch_end", "on_train_epoch_start"):
    kind = counts_at(hook)
    add(f"longer_callback_counts_{hook}", Task, shorter=steps, callbacks=lambda k=kind: [k()])
