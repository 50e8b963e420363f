"""What a run shows while it trains: a line per epoch, and on a terminal a bar."""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ProgressBar, Timer
from tqdm import tqdm  # type: ignore[import-untyped]

from project.engine.ranks import say
from project.engine.summary import stopped_lines

MONITORED = ("throughput/", "memory/", "optimizer/")  # not shown in a line of an epoch
MOST_SHOWN = 6
REFRESH_STEPS = 50


class EpochLines(Callback):
    """Prints a line per epoch on rank 0, and why training ended early; on a terminal with a bar of the run below.

    Printed when the next epoch begins or training ends: Lightning asks callbacks before the module has logged its
    metrics of the epoch. The bar shows epoch, the latest training loss, and the time left of the whole run.
    """

    def __init__(self, bar: bool = False) -> None:
        self.wants_bar = bar
        self._bar: Any = None
        self._began: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = None
        if self.wants_bar and trainer.is_global_zero:
            steps = trainer.estimated_stepping_batches  # infinite where only a time ends the run
            total = int(steps) if steps < math.inf else None
            self._bar = tqdm(total=total, initial=trainer.global_step, unit="step", leave=False, dynamic_ncols=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print_epoch(trainer)
        self._began = time.perf_counter()
        if self._bar is not None:
            self._bar.set_description(f"epoch {trainer.current_epoch + 1}", refresh=False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # asking at every step would cost a third of a small model's run, and wait for the device
        if self._bar is not None and trainer.global_step >= self._bar.n + REFRESH_STEPS:
            logged = trainer.logged_metrics
            name = next((name for name in logged if "loss" in name and not name.startswith("val")), None)
            self._bar.set_postfix_str(f"{name} {float(logged[name]):.4f}" if name else "", refresh=False)
            self._bar.update(trainer.global_step - self._bar.n)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.close_bar()
        self._print_epoch(trainer)
        if not (trainer.is_global_zero and trainer.should_stop):
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
                reason = callback.stopping_reason_message.removesuffix("Signaling Trainer to stop.")
                say(f"stopped early: {' '.join(reason.split())}")
            if isinstance(callback, Timer) and (callback.time_remaining() or 0) < 0:
                lines = stopped_lines(Path(trainer.default_root_dir), trainer.global_step, " --max_time DD:HH:MM:SS")
                say("stopped early: --max_time is over.", *lines)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close_bar()

    def close_bar(self) -> None:
        """Take the bar off the terminal, so that what is printed next begins a line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _print_epoch(self, trainer: Trainer) -> None:
        if not (trainer.is_global_zero and trainer.current_epoch and trainer.callback_metrics):
            return
        of = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        parts = [f"epoch {trainer.current_epoch}{of}"]
        metrics = trainer.callback_metrics
        shown = [name for name in metrics if not name.startswith(MONITORED) and not name.endswith(("_step", "_epoch"))]
        # training before validation, losses before the rest
        shown.sort(key=lambda name: (name.startswith("val"), "loss" not in name, name))
        parts += [f"{name} {float(metrics[name]):.4f}" for name in shown[:MOST_SHOWN]]
        if self._began is not None:
            parts.append(f"{time.perf_counter() - self._began:.1f} s")
        if not self.wants_bar:
            say("  ".join(parts))
            return
        wide, lines = shutil.get_terminal_size().columns, [parts[0]]
        for part in parts[1:]:
            fits = len(lines[-1]) + 2 + len(part) <= wide
            lines = [*lines[:-1], f"{lines[-1]}  {part}"] if fits else [*lines, f"    {part}"]
        tqdm.write("\n".join(lines))


def progress_callback(flags: dict[str, Any]) -> Callback | None:
    """Lines of epochs, on a terminal with a bar. None with ``--enable_progress_bar false`` or a bar of the user's own.

    Sets ``enable_progress_bar`` in the flags.
    """
    own = any(isinstance(callback, ProgressBar) for callback in flags["callbacks"])
    enabled = flags["enable_progress_bar"] is not False and not own
    flags["enable_progress_bar"] = own
    return EpochLines(bar=sys.stdout.isatty()) if enabled else None
