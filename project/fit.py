"""The main job: train, keep the best checkpoint, test it once at the end, print a summary.

python -m project.fit
python -m project.fit --precision 16-mixed
python -m project.fit --config configs/fast.yaml --data.root data
python -m project.fit --run_name mine --ckpt_path auto
torchrun --nproc_per_node 4 -m project.fit --strategy ddp
torchrun --nproc_per_node 4 -m project.fit -- --monitor val/loss

The two dashes keep torchrun from taking --monitor for an option of its own.
"""

import json
import os
import shlex
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from project.command_line.start import prepare_process
from project.command_line.start import run as run_command

prepare_process(__name__)  # threads and signals, before torch is imported

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger

from project.callbacks.last_step import LogLastStep
from project.callbacks.memory import MemoryMonitor, is_measurable  # feature: memory
from project.callbacks.memory_snapshot import MemorySnapshot  # feature: memory
from project.callbacks.optimizer import OptimizerMonitor  # feature: optimizer
from project.callbacks.slow_precision import SlowPrecision
from project.callbacks.test_predictions import TestPredictions  # feature: test_predictions
from project.callbacks.throughput import ThroughputMonitor  # feature: throughput
from project.callbacks.yours import always_on
from project.command_line.cli import Configuration
from project.command_line.plain_values import dump_yaml
from project.command_line.read_checkpoint import read_configuration, start_from
from project.command_line.refusals import refusals_as_errors
from project.command_line.trainer_flags import as_list, build_trainer, trainer_flags
from project.engine import ExactCheckpoint, contract, signals
from project.engine.checkpoint_files import read
from project.engine.lightning_internals import release_child_processes
from project.engine.mirror.mirror import NOT_COMPLETE
from project.engine.parts.rows import MetricRows
from project.engine.ranks import is_rank_zero, say
from project.engine.run_folder import RunFolder
from project.engine.slurm import requeue_signal
from project.errors import UserError
from project.facts import summarize
from project.final_test import final_test, lacks_for_test
from project.loggers.chosen import commands_to_look, make_chosen_loggers
from project.loggers.followers import FollowsRows
from project.loggers.metrics_csv import MetricsCSV
from project.loggers.wandb import make_wandb_logger, sync_command  # feature: wandb
from project.progress import RunTimer, closing_lines, progress_callback, stopped_lines
from project.report import Report  # feature: report
from project.run_record import RunRecord
from project.run_result import (
    RunResult,
    add_all_facts,
    leave_everything,
    parts_of,
    read_series,
)
from project.tables import write_rows
from project.wrong_numbers import WrongNumbers

T = TypeVar("T")
# feature: predict
# What turns a file into an input of the network
TAKES_FILES = (contract.PreparesFiles, contract.PreparesImages, contract.ShapesImages)
# end feature: predict


def main(argv: list[str]) -> int:
    """Train as ``argv`` says; returns the exit code."""
    # From now on a signal ends the process also while it waits for other ranks inside a library.
    signals.watch()
    config, run = read_configuration(argv, "project.fit")
    say(*run.notes, *config.notes)
    if run.changes:
        say(f"resuming {run.name} with {', '.join(run.changes)}")
    is_made_longer = any(line.startswith("trainer.max_") for line in run.changes)
    if run.finished and not is_made_longer:
        shown = os.path.relpath(run.folder)
        say(f"run {run.name} is already finished: see {shown}/summary.json.")
        mirror_a_finished_run(run)
        return exit_code_of(run, config)
    refuse_mirror_without_checkpoints(config)
    if config.trainer["fast_dev_run"]:  # it leaves no run behind
        refuse_rehearsal_of_a_checkpoint(run, config)
        with tempfile.TemporaryDirectory() as elsewhere:
            train_in(run.elsewhere(elsewhere), config)
        return 0
    result = train_in(run, config)
    say(closing_lines(result.summary, run.folder, *next_commands(config)))
    say(*sync_command(run.folder))  # feature: wandb
    say(*commands_to_look(config.trackers, run.folder))
    return exit_code_of(run, config)


def exit_code_of(run: RunFolder, config: Configuration) -> int:
    """Of a run that is done: 0, or 1 where its mirror must be complete and is not."""
    is_mirrored = run.mirror is None or run.mirror.lack is None
    return 0 if is_mirrored or not config.options.mirror_required else 1


def train_in(run: RunFolder, config: Configuration) -> RunResult:
    """Make the run's folder, and train there. If nothing is saved, the folder goes and its name is
    free again.
    """
    try:
        if is_rank_zero():
            run.create()
        if run.checkpoint is None:
            say(*start_from(config.module, config.options.init_weights))
        if is_rank_zero():
            for line in config.lost_in_record():
                say(f"config.yaml and checkpoints do not repeat this run: {line}")
        trainer = build(config, run)
        return train(config, run, trainer)
    except BaseException as error:
        is_stop = isinstance(error, signals.Stopped) and signals.state.begun
        if not is_stop:
            if run.mirror is not None:
                say(*run.mirror.finish(signals.seconds_left()))
            run.discard()
        raise
    finally:
        run.release()


def build(config: Configuration, run: RunFolder, extra: Sequence[Callback] = ()) -> Trainer:
    """The Trainer of a run with its callbacks and loggers; callbacks in ``extra`` come last."""
    flags = trainer_flags(config)
    options = config.options
    csv = MetricsCSV(run.folder / "metrics.csv")
    saves = config.trainer["enable_checkpointing"] is not False
    keep = ExactCheckpoint(
        run.folder if saves else None,
        options.monitor,
        options.mode,
        every=options.checkpoint_every,
        parts=[MetricRows(csv)],
        run_id=run.run_id,
        changed=bool(run.changes),
        requeue_signal=requeue_signal(as_list(config.trainer["plugins"])),
        mirror=run.mirror,
    )
    keep.best.ask(config.module)
    chosen = make_chosen_loggers(config, run)
    wandb = make_wandb_logger(config, run, keep.best, chosen)  # feature: wandb
    trackers: list[Logger | None] = [
        *chosen,
        wandb,  # feature: wandb
    ]
    followers: list[Any] = [logger for logger in trackers if isinstance(logger, FollowsRows)]
    csv.followers = followers
    signals.watch(run.discard)

    callbacks: list[Callback | None] = [
        wandb,  # feature: wandb
        RunTimer(),
        RunRecord(run.folder, run.run_id, config.resolved),
        OptimizerMonitor() if "optimizer" in config.monitors else None,  # feature: optimizer
        ThroughputMonitor() if "throughput" in config.monitors else None,  # feature: throughput
        _memory_monitor(config),  # feature: memory
        _memory_snapshot(options),  # feature: memory
        TestPredictions(),  # feature: test_predictions
        Report(run.folder) if options.report else None,  # feature: report
        SlowPrecision(),
        WrongNumbers(options.monitor),
        progress_callback(flags),
        *always_on(),
        *flags["callbacks"],
        keep,
        *extra,
        LogLastStep(),
    ]
    loggers = [*trackers, csv]
    flags["callbacks"] = [callback for callback in callbacks if callback is not None]
    flags["logger"] = [logger for logger in loggers if logger is not None]
    flags["default_root_dir"] = run.folder
    return build_trainer(flags)


def train(config: Configuration, run: RunFolder, trainer: Trainer) -> RunResult:
    """Train, test the best once, write the summary. After :class:`signals.Stopped` the last lines
    say which step last.ckpt holds.
    """
    timer = the(RunTimer, trainer)
    checkpoint = the(ExactCheckpoint, trainer)
    is_tested = False
    try:
        with refusals_as_errors(run.checkpoint, lambda: timer.begun):
            trainer.fit(
                config.module,
                datamodule=config.datamodule,
                ckpt_path=run.checkpoint,
                weights_only=True,
            )
        refuse_training_of_no_step(run, trainer, checkpoint)
        result = result_of(config, run, trainer)  # before the test changes the precision
        best_path = checkpoint.best_path if checkpoint.saves else None
        with refusals_as_errors(None, lambda: timer.begun):
            result.summary.metrics |= final_test(trainer, config, best_path)
        is_tested = True
        signals.state.deferring = False  # every step is saved: a signal ends the run here
        finish(trainer, result)
        if trainer.is_global_zero:
            # Last: a run with a summary is complete.
            write_rows(run.folder / "summary.json", result.summary.to_plain())
            mirror_the_end(run, result)
        return result
    except signals.Stopped as stop:
        release_child_processes()  # the other ranks end now
        if not is_tested and timer.begun and trainer.is_global_zero:
            # torchrun signals the remaining ranks as soon as one has ended: they must not end then.
            if trainer.world_size == 1:
                signals.state.deferring = False  # a second signal ends the run at once
            finish(trainer, result_of(config, run, trainer, signal.Signals(stop.signum).name))
        if run.mirror is not None and trainer.is_global_zero:
            run.mirror.take()
            say(*run.mirror.finish(signals.seconds_left()))
        step = trainer.global_step
        say(*stopped_lines(run.folder, step, checkpoint.saved_step, mirror_option(run)))
        raise
    finally:
        release_child_processes()


def result_of(
    config: Configuration, run: RunFolder, trainer: Trainer, stopped_by: str | None = None
) -> RunResult:
    """What a run has reached that has trained, or was stopped by a signal of that name."""
    data = config.datamodule
    summary = summarize(trainer, run.name, finished=stopped_by is None)
    best = the(ExactCheckpoint, trainer).best
    summary.metrics |= best.metrics
    if best.score is not None:
        summary.monitor = best.monitor
        summary.mode = best.mode
        summary.best_epoch = best.epoch
        summary.best_score = best.score
    return RunResult(
        summary,
        config=dump_yaml(config.resolved),
        folder=run.folder,
        class_names=list(data.class_names) if isinstance(data, contract.NamesClasses) else [],
        stopped_by=stopped_by,
        max_epochs=trainer.max_epochs,
    )


def finish(trainer: Trainer, result: RunResult) -> None:
    """Let every callback and logger add what it knows; then, on rank zero, leave what it wants to
    leave.
    """
    add_all_facts(trainer, result)
    if trainer.is_global_zero:
        for part in parts_of(trainer):
            if isinstance(part, MetricsCSV):
                part.save()
                result.series = read_series(part.path, result.summary.epochs)
        leave_everything(trainer, result)


def mirror_the_end(run: RunFolder, result: RunResult) -> None:
    """Bring summary and report to the mirror as well. What it lacks is noted in the summary."""
    if run.mirror is None:
        return
    run.mirror.take()
    lines = run.mirror.finish()
    if run.mirror.lack is None:
        say(*lines)
        return
    result.summary.notes.append(run.mirror.lack)
    write_rows(run.folder / "summary.json", result.summary.to_plain())


def mirror_a_finished_run(run: RunFolder) -> None:
    """Bring over what the mirror lacks of a run that has ended on this machine."""
    if run.mirror is None or not is_rank_zero():
        return
    try:
        run.create()
        lines = run.mirror.finish()
        if run.mirror.lack is None and forget_lack_of_mirror(run.folder / "summary.json"):
            run.mirror.take()
            lines = run.mirror.finish()
        say(*lines)
    finally:
        run.release()


def forget_lack_of_mirror(summary: Path) -> bool:
    """Take out of a summary what its mirror lacked; returns whether it lacked something."""
    if not summary.is_file():
        return False
    facts = json.loads(summary.read_text(encoding="utf-8"))
    notes = facts.get("notes", [])
    kept = [note for note in notes if not note.startswith(NOT_COMPLETE)]
    if kept == notes:
        return False
    write_rows(summary, {**facts, "notes": kept})
    return True


def mirror_option(run: RunFolder) -> str:
    """What the command that goes on with a run needs for its mirror."""
    return "" if run.mirror is None else f" --mirror {shlex.quote(run.mirror.shown)}"


def refuse_mirror_without_checkpoints(config: Configuration) -> None:
    """A UserError for a mirror of a run that saves nothing."""
    if config.options.mirror and config.trainer["enable_checkpointing"] is False:
        raise UserError("--mirror copies checkpoints, and --enable_checkpointing false saves none.")


def refuse_rehearsal_of_a_checkpoint(run: RunFolder, config: Configuration) -> None:
    """A UserError for a rehearsal of a few steps that begins with a checkpoint, which has trained
    as far.
    """
    if run.checkpoint is None:
        return
    steps = int(config.trainer["fast_dev_run"])
    if read(run.checkpoint).get("global_step", 0) >= steps:
        trained = "the first step" if steps == 1 else f"the first {steps} steps"
        raise UserError(
            f"--fast_dev_run trains {trained} alone, and that checkpoint has trained as far."
            " Add --fast_dev_run false to go on with it."
        )


def refuse_training_of_no_step(
    run: RunFolder, trainer: Trainer, checkpoint: ExactCheckpoint
) -> None:
    """A UserError where training has made no step, so that there is no best checkpoint to test."""
    if not checkpoint.saves or checkpoint.best_path.exists():
        return
    if run.checkpoint is not None:
        is_ended_by_steps = 0 <= trainer.max_steps <= trainer.global_step
        limit = "--max_steps" if is_ended_by_steps else "--max_epochs"
        raise UserError(
            f"--ckpt_path: that checkpoint has trained as long as it should. Raise {limit}."
        )
    if trainer.global_step == 0:
        limits = "--limit_train_batches, --max_time, --max_epochs and --max_steps"
        raise UserError(f"no step was trained: {limits} must leave at least one.")


def the(kind: type[T], trainer: Trainer) -> T:
    """The callback or logger of a kind that every run has once."""
    return next(part for part in parts_of(trainer) if isinstance(part, kind))


def next_commands(config: Configuration) -> list[str]:
    """The commands that a checkpoint of this run can be used with."""
    commands = []
    if lacks_for_test(config.module, config.datamodule) is None:
        commands.append("test")
    if isinstance(config.datamodule, TAKES_FILES):  # feature: predict
        commands.append("predict IMAGE.png")
    return commands


def _memory_monitor(config: Configuration) -> Callback | None:  # feature: memory
    return MemoryMonitor() if "memory" in config.monitors and is_measurable() else None


def _memory_snapshot(options: Any) -> Callback | None:  # feature: memory
    file = options.memory_snapshot
    return None if file is None else MemorySnapshot(file)


if __name__ == "__main__":
    run_command(main)
