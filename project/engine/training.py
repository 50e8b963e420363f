"""The end of a run: its summary, the test of its best checkpoint, what it publishes."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.engine import signals
from project.engine.cli import Configuration
from project.engine.run_folder import Run
from project.engine.stop import release_child_processes
from project.engine.summary import (
    RunRecord,
    RunTimer,
    Summary,
    command_line,
    device_name,
    git_state,
    read_series,
    samples_of,
    versions,
)
from project.errors import UserError
from project.loggers.wandb import WandbRunLogger

# Seconds for the report of a run that was asked to stop, which has ten for everything
REPORT_PATIENCE = 4.0


@contextmanager
def refusals_as_errors(timer: RunTimer) -> Iterator[None]:
    """What Lightning itself refuses before the first step is a mistake in the flags: a :class:`UserError`."""
    try:
        yield
    except (MisconfigurationException, ValueError) as error:
        raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if timer.start_seconds is not None or not raised_in.startswith("lightning."):
            raise
        raise UserError(f"the Trainer refuses a flag: {' '.join(str(error).split())}") from None


def summarize(config: Configuration, run: Run, session: Any, finished: bool = True) -> Summary:
    """What is known of a run when its training has ended."""
    trainer, checkpoint, timer = session.trainer, session.checkpoint, session.timer
    commit, dirty = git_state()
    metrics = {**(session.throughput.summary() if session.throughput else {})}
    metrics |= session.memory.summary() if session.memory else {}
    return Summary(
        run_name=run.name,
        finished=finished,
        device=device_name(trainer),
        precision=trainer.precision,
        world_size=trainer.world_size,
        data_source=getattr(config.datamodule, "data_source", None),
        train_samples=samples_of(trainer.train_dataloader),
        parameters=sum(p.numel() for p in config.module.parameters()),
        epochs=trainer.current_epoch,
        steps=trainer.global_step,
        fit_seconds=timer.seconds_so_far(),
        start_seconds=timer.start_seconds,
        monitor=checkpoint.monitor,
        best_epoch=checkpoint.best_epoch,
        best_score=checkpoint.best_score,
        git_commit=commit,
        git_dirty=dirty,
        versions=versions(),
        command=command_line(),
        metrics=metrics,
    )


def test_best(trainer: Trainer, config: Configuration, best_path: Path) -> dict[str, float]:
    """Metrics of best.ckpt on the test set: the one time a run looks at it."""
    if not best_path.exists():
        raise UserError(
            "--ckpt_path: that checkpoint has trained as long as it should, nothing is left to do. Raise --max_epochs."
        )
    # In float32: the figure is then what the checkpoint predicts on any device, also on a CPU.
    if isinstance(trainer.precision_plugin, (MixedPrecision, HalfPrecision, DoublePrecision)):
        trainer.strategy.precision_plugin = Precision()
        config.module.float()
    with float32_products():
        (metrics,) = trainer.test(
            config.module, datamodule=config.datamodule, ckpt_path=str(best_path), weights_only=True, verbose=False
        )
    return {name: float(value) for name, value in metrics.items()}


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


def publish(config: Configuration, run: Run, session: Any, summary: Summary, stopped_by: str | None = None) -> None:
    """Write the report and complete the W&B run, on rank 0. A failure here is a warning: the run itself is safe."""
    if not session.trainer.is_global_zero:
        return
    try:
        from project.report import write_report

        with time_limit(REPORT_PATIENCE if stopped_by else None):
            record = gather(config, session, summary, stopped_by)
            write_report(run.folder / "report.html", record)
    except Exception as error:
        rank_zero_warn(f"report.html could not be written ({type(error).__name__}: {error}). The run is not affected.")
        return
    if session.wandb is not None:
        session.wandb.record = record


def gather(config: Configuration, session: Any, summary: Summary, stopped_by: str | None = None) -> RunRecord:
    """What the report and W&B show of a run, from its callbacks and ``metrics.csv``."""
    import yaml

    record = RunRecord(
        summary,
        config=yaml.safe_dump(config.resolved, sort_keys=False),
        class_names=[str(name) for name in getattr(config.datamodule, "class_names", [])],
        stopped_by=stopped_by,
        max_epochs=session.trainer.max_epochs,
    )
    if session.csv is not None:
        session.csv.save()
        record.series = read_series(session.csv.path)
    if session.predictions is not None:
        record.confusion, record.mistakes = session.predictions.confusion, session.predictions.mistakes
    if session.throughput is not None and (advice := session.throughput.advice()):
        record.remarks.append(advice)
    if session.memory is not None:
        record.breakdown, record.savings = session.memory.breakdown, session.memory.savings
        record.remarks += session.memory.leaks
    return record


def publish_stopped(config: Configuration, run: Run, session: Any, stop: signals.Stopped) -> None:
    """The report of what a stopped run has reached, within the time it has; a second signal skips it."""
    release_child_processes()  # ranks that have nothing to report end now, as they should
    if session.trainer.is_global_zero and session.timer.start_seconds is not None:
        if session.trainer.world_size == 1:  # torchrun signals the ranks that are left as soon as one has ended
            signals.resume_immediate()
        summary = summarize(config, run, session, finished=False)
        publish(config, run, session, summary, stopped_by=signal.Signals(stop.signum).name)


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in the block where it takes longer; in the main thread only, the others get no signals."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def finish_wandb(logger: WandbRunLogger | None, exit_code: int) -> None:
    """Close the W&B run with the process's exit code, so that a stopped run is not shown as finished."""
    if logger is not None:
        logger.finish(exit_code)
