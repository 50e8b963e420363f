"""The main job: train, keep the best checkpoint, test it once at the end, print a summary."""

import os
import shlex
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lightning.pytorch import Trainer
from unbroken import ExactCheckpoint, contract
from unbroken.cli.cli import Configuration
from unbroken.cli.output import Printed
from unbroken.cli.plain_values import dump_yaml
from unbroken.cli.program import Program
from unbroken.cli.read_checkpoint import read_configuration, start_from
from unbroken.cli.refusals import refusals_as_errors
from unbroken.cli.trainer_flags import reading_only
from unbroken.errors import UserError
from unbroken.lightning_internals import release_child_processes
from unbroken.loggers.chosen import commands_to_look
from unbroken.loggers.metrics_csv import MetricsCSV
from unbroken.loggers.wandb import sync_command
from unbroken.mirror.mirror import NOT_COMPLETE
from unbroken.parts.generators import RandomGenerators
from unbroken.results.facts import summarize
from unbroken.results.run_result import (
    RunResult,
    add_all_facts,
    leave_everything,
    parts_of,
    read_epochs,
    read_series,
)
from unbroken.run.final_test import NotTested, final_test, lacks_for_test, reading_best
from unbroken.run.progress import RunTimer, closing_lines, stopped_lines
from unbroken.run.run_record import RunRecord
from unbroken.run_folder import ROOT, RunFolder
from unbroken.stopping import signals
from unbroken.stopping.ranks import is_rank_zero, say
from unbroken.storage.checkpoint_files import read
from unbroken.storage.reading import read_json
from unbroken.tables import write_rows
from unbroken.trust import keys

T = TypeVar("T")
# Makes the Trainer of a run, with its callbacks and loggers
Build = Callable[[Configuration, RunFolder], Trainer]
# What turns a file into an input of the network
TAKES_FILES = (contract.PreparesFiles, contract.PreparesImages, contract.ShapesImages)


def main(program: Program, build: Build, argv: list[str]) -> int:
    """Train as ``argv`` says.

    Args:
        program: Whose main job it is.
        build: Makes the run's Trainer.
        argv: The command line.

    Returns:
        The exit code.
    """
    # From now on a signal ends the process also while it waits for other ranks inside a library.
    signals.watch()
    # It is needed at the first save only, and what was trained until then would be lost.
    keys.check_shared_key()
    config, run = read_configuration(program, argv)
    Printed.is_log = True
    say(*run.notes, *config.notes)
    has_other_limit = any(line.startswith("trainer.max_") for line in run.changes)
    if has_other_limit and run.reached is not None:
        raise UserError(
            f"--{run.reached} must be more than run {run.name} has trained already, got"
            f" {config.trainer[run.reached]}."
        )
    if run.finished and not has_other_limit:
        shown = os.path.relpath(run.folder)
        say(f"run {run.name} is already finished: see {shown}/summary.json.")
        if run.changes:
            say(
                f"nothing is left to train with {', '.join(run.changes)}, and nothing was changed."
                " A higher --max_epochs, --max_steps or --max_time makes this run longer, and"
                " another --run_name starts a new one."
            )
        mirror_a_finished_run(run)
        return exit_code_of(run, config)
    if run.changes:
        say(f"resuming {run.name} with {', '.join(run.changes)}")
    refuse_mirror_without_checkpoints(config)
    if config.trainer["fast_dev_run"]:  # it leaves no run behind
        refuse_rehearsal_of_a_checkpoint(run, config)
        with tempfile.TemporaryDirectory() as elsewhere:
            train_in(run.elsewhere(elsewhere), config, build)
        return 0
    result = train_in(run, config, build)
    ways_to_look = [*sync_command(run.folder), *commands_to_look(config, run.folder)]
    say(closing_lines(result.summary, run.folder, *next_commands(config), further=ways_to_look))
    return exit_code_of(run, config)


def exit_code_of(run: RunFolder, config: Configuration) -> int:
    """Of a run that is done: 0, or 1 where its mirror must be complete and is not."""
    is_mirrored = run.mirror is None or run.mirror.lack is None
    return 0 if is_mirrored or not config.options.mirror_required else 1


def train_in(run: RunFolder, config: Configuration, build: Build) -> RunResult:
    """Make the run's folder, and train there. If nothing is saved, the folder goes and its name is
    free again.
    """
    try:
        if is_rank_zero():
            # A thread that ends a start which hangs leaves no folder behind.
            signals.watch(run.discard)
            run.create()
        if run.checkpoint is None:
            root = Path(config.trainer["default_root_dir"] or ROOT)
            say(*start_from(config.module, config.options.init_weights, root))
        if is_rank_zero():
            for line in config.lost_in_record():
                say(f"config.yaml and checkpoints do not repeat this run: {line}")
        trainer = build(config, run)
        return train(config, run, trainer)
    except BaseException as error:
        is_stop = isinstance(error, signals.Stopped) and signals.state.start_is_over
        if not is_stop:
            if run.mirror is not None:
                say(*run.mirror.finish(signals.seconds_left()))
            run.discard()
        raise
    finally:
        run.release()


def train(config: Configuration, run: RunFolder, trainer: Trainer) -> RunResult:
    """Train, test the best once, write the summary. After :class:`signals.Stopped` the last lines
    say which step last.ckpt holds.
    """
    timer = the(RunTimer, trainer)
    # Without it no checkpoint names its run, and no command would open one.
    the(RunRecord, trainer)
    checkpoint = the(ExactCheckpoint, trainer)
    is_tested = False
    judged = None if run.checkpoint is None else run.fingerprint
    generators = RandomGenerators()
    before_setup = generators.take(trainer)
    try:
        with (
            refusals_as_errors(run.checkpoint, lambda: timer.begun),
            reading_only(trainer, judged),
        ):
            trainer.fit(
                config.module,
                datamodule=config.datamodule,
                ckpt_path=run.checkpoint,
                weights_only=True,
            )
        refuse_training_of_no_step(run, trainer, checkpoint)
        result = result_of(config, run, trainer)  # before the test changes the precision
        best_path = checkpoint.best_path if checkpoint.saves else None
        # The test calls setup once more. A split that it draws must be that of the training, or
        # samples are tested that were trained on.
        generators.give_back(trainer, before_setup)
        with (
            refusals_as_errors(None, lambda: timer.begun),
            reading_best(trainer, best_path, takes_any(run, config)),
        ):
            try:
                result.summary.metrics |= final_test(trainer, config, best_path)
            except NotTested as error:
                result.summary.notes.append(f"not tested: {error}")
        is_tested = True
        if trainer.world_size == 1:
            # Every step is saved. With several ranks torchrun signals the others as one has ended.
            signals.raise_from_now_on()
        finish(trainer, result)
        if trainer.is_global_zero:
            # Last: a run with a summary is complete.
            write_rows(run.folder / "summary.json", result.summary.to_plain())
            mirror_the_end(run, result)
        return result
    except Exception as error:
        if trainer.global_step == 0:
            note_the_other_half(error, config)
        raise
    except signals.Stopped as stop:
        # The other ranks end now, too, and Lightning's observer would kill this one for it.
        release_child_processes()
        report = None
        if not is_tested and timer.begun and trainer.is_global_zero:
            report = result_of(config, run, trainer, signal.Signals(stop.signum).name)
        end_stopped(config, run, trainer, report)
        raise
    finally:
        release_child_processes()


def end_stopped(
    config: Configuration, run: RunFolder, trainer: Trainer, report: RunResult | None
) -> None:
    """Write the report of a run that was stopped, bring its last state to the mirror, and say which
    step ``last.ckpt`` holds. With one rank a further signal gives up what is left, but for these
    lines (unless it comes as they are said); with several it does nothing.
    """
    mirror = run.mirror if trainer.is_global_zero else None
    seconds = 0.0
    try:
        if report is not None:
            if trainer.world_size == 1:
                # With several ranks a further signal gives up nothing: torchrun signals the
                # remaining ranks as soon as one has ended.
                signals.raise_from_now_on()
            finish(trainer, report)
        if mirror is not None:
            mirror.take()
        seconds = signals.seconds_left()
    finally:
        try:
            if mirror is not None:
                say(*mirror.finish(seconds))
        finally:
            checkpoint = the(ExactCheckpoint, trainer)
            resume = config.program.command("fit")
            step = trainer.global_step
            say(*stopped_lines(resume, run.folder, step, checkpoint.saved_step, mirror_option(run)))


def takes_any(run: RunFolder, config: Configuration) -> bool:
    """Whether the user trusts what lies in the run's folder, whoever has written it."""
    return config.options.trust_checkpoint or (run.mirror is not None and run.mirror.holds_run)


def note_the_other_half(error: Exception, config: Configuration) -> None:
    """Add to an error before the first step that module and data are not of one author: somebody
    who names a class of his own for one of them may have forgotten the other.
    """
    program = config.program
    has_default_module = program.model is not None and type(config.module) is program.model
    has_default_data = program.data is not None and type(config.datamodule) is program.data
    if has_default_module == has_default_data:
        return
    name, typed = ("--data", config.module) if has_default_data else ("--model", config.datamodule)
    default = config.datamodule if has_default_data else config.module
    error.add_note(
        f"{type(typed).__name__} runs with {type(default).__name__}, because {name} names nothing"
        " else."
    )


def result_of(
    config: Configuration, run: RunFolder, trainer: Trainer, stopped_by: str | None = None
) -> RunResult:
    """What a run has reached that has trained, or was stopped by a signal of that name."""
    data = config.datamodule
    summary = summarize(trainer, run.name, config.program.code, finished=stopped_by is None)
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
    """Let every callback and logger add what it knows, on rank zero also of what was logged in
    earlier starts; then, on rank zero, leave what it wants to leave.
    """
    try:
        if trainer.is_global_zero:
            for part in parts_of(trainer):
                if isinstance(part, MetricsCSV):
                    part.write()
                    result.series = read_series(part.path, result.summary.epochs)
                    result.epochs = read_epochs(part.path, result.summary.epochs)
    finally:
        # Whatever the disk does: the other ranks of a run that has finished ask for them together.
        add_all_facts(trainer, result)
    if trainer.is_global_zero:
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
    try:
        facts = read_json(summary)
    except FileNotFoundError:
        return False
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
        limit = "max_steps" if is_ended_by_steps else "max_epochs"
        raise UserError(
            f"--{limit} must be more than --ckpt_path {run.checkpoint} has trained already, got"
            f" {getattr(trainer, limit)}."
        )
    if trainer.global_step == 0:
        limits = "--limit_train_batches, --max_time, --max_epochs and --max_steps"
        raise UserError(f"no step was trained: {limits} must leave at least one.")


def the(kind: type[T], trainer: Trainer) -> T:
    """The callback or logger of a kind that every run has once.

    Raises:
        UserError: The list of the main job lacks it.
    """
    for part in parts_of(trainer):
        if isinstance(part, kind):
            return part
    raise UserError(f"the callbacks of fit.py lack {kind.__name__}, which every run needs.")


def next_commands(config: Configuration) -> list[str]:
    """The commands that a checkpoint of this run can be used with."""
    commands = []
    if lacks_for_test(config.module, config.datamodule) is None:
        commands.append(config.program.command("test"))
    if isinstance(config.datamodule, TAKES_FILES):
        commands.append(config.program.command("predict", "IMAGE.png"))
    return commands
