"""Times a training's steps from within, at full speed."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from project import signals

# Two: gradients and optimizer state exist from the first step on, so the second one takes the most memory.
STEPS_OF_A_TRY = 2
WARM_UP_STEPS, WARM_UP_SECONDS = 3, 1.0  # whichever comes first
WINDOWS, WINDOW_SECONDS = 3, 0.4


class Clock(Callback):
    """Times windows of steps, waiting for the device at their edges only, and ends the training when it has enough.

    Args:
        seconds: Least length of a window; the number of steps in it grows until it is this long.
        windows: How many to time after the warm-up; 0 ends after ``STEPS_OF_A_TRY`` steps and times the last of them.
    """

    def __init__(self, windows: int = WINDOWS, seconds: float = WINDOW_SECONDS) -> None:
        self.windows, self.seconds = windows, seconds
        self.step_ms: list[float] = []
        self._steps = 0  # optimizer steps so far
        self._edge, self._edge_steps = 0.0, 0
        self._began = 0.0
        self._length: int | None = None  # steps of a window, None while warming up

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's own handlers would swallow SIGTERM: a try would end as if it had fitted. Ours end the command.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if asked := signals.requested():  # raised where nobody could hear it, such as while a tensor was freed
            raise signals.Stopped(asked)
        if trainer.global_step == self._steps:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        if self.windows == 0:
            self._time_last_step(trainer)
        elif self._length is None:
            warm = self._steps >= WARM_UP_STEPS or time.perf_counter() - self._began > WARM_UP_SECONDS
            if warm:
                self._length = 1
                self._start_window(trainer)
        elif self._steps - self._edge_steps == self._length:
            self._end_window(trainer)

    def _time_last_step(self, trainer: Trainer) -> None:
        synchronize(trainer.strategy.root_device)
        if self._steps == STEPS_OF_A_TRY:
            self.step_ms.append(1000 * (time.perf_counter() - self._edge))
            trainer.should_stop = True
        self._edge = time.perf_counter()

    def _start_window(self, trainer: Trainer) -> None:
        synchronize(trainer.strategy.root_device)
        self._edge, self._edge_steps = time.perf_counter(), self._steps

    def _end_window(self, trainer: Trainer) -> None:
        synchronize(trainer.strategy.root_device)
        assert self._length is not None
        seconds = time.perf_counter() - self._edge
        if seconds < self.seconds:  # too short to trust: a longer one
            self._length = max(self._length + 1, int(1.2 * self._length * self.seconds / max(seconds, 1e-6)))
        else:
            self.step_ms.append(1000 * seconds / self._length)
            trainer.should_stop = len(self.step_ms) >= self.windows
        self._start_window(trainer)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it: only then may a clock be read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
