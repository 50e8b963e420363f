"""A program's main job, and what its lists of callbacks and loggers are made from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from unbroken.checkpoint.exact_checkpoint import ExactCheckpoint
from unbroken.cli.cli import Configuration
from unbroken.cli.program import Program
from unbroken.cli.start import exit_code_or_error
from unbroken.cli.start import run as run_command
from unbroken.cli.trainer_flags import as_list, build_trainer, trainer_flags
from unbroken.errors import require
from unbroken.loggers.chosen import make_chosen_loggers
from unbroken.loggers.followers import FollowsRows
from unbroken.loggers.metrics_csv import MetricsCSV
from unbroken.loggers.wandb import make_wandb_logger
from unbroken.machine import threads
from unbroken.monitors.monitor import Monitor
from unbroken.parts.rows import MetricRows
from unbroken.run import main_job
from unbroken.run.progress import progress_callback
from unbroken.run.run_record import RunRecord
from unbroken.run_folder import RunFolder
from unbroken.stopping.ranks import ignore_rank_without_launcher, say, settle_launcher
from unbroken.stopping.slurm import requeue_signal

# Lightning's profilers that are named by a word
LIGHTNINGS_PROFILERS: dict[Any, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
}


class Run:
    """A run that is about to begin: what the lists of callbacks and loggers are made from.

    Attributes:
        config: What the command line means: module, data module, options.
        options: The options that are not the Trainer's, such as ``report``.
        folder: Where everything of the run is written.
        metrics_csv: The logger that writes metrics.csv. Every run has it.
    """

    def __init__(self, config: Configuration, run_folder: RunFolder) -> None:
        self.config = config
        self.options = config.options
        self.folder: Path = run_folder.folder
        goes_on = run_folder.checkpoint is not None
        self.metrics_csv = MetricsCSV(self.folder / "metrics.csv", goes_on)
        self.flags = trainer_flags(config)
        self._run_folder = run_folder

    @cached_property
    def exact_checkpoint(self) -> ExactCheckpoint:
        """The callback that keeps best.ckpt and last.ckpt, resumes exactly and stops cleanly."""
        run_folder = self._run_folder
        saves = self.config.trainer["enable_checkpointing"] is not False
        keep = ExactCheckpoint(
            self.folder if saves else None,
            self.options.monitor,
            self.options.mode,
            every=self.options.checkpoint_every,
            parts=[MetricRows(self.metrics_csv)],
            run_id=run_folder.run_id,
            changed=bool(run_folder.changes),
            seed=self.config.seed,
            chosen=self.config.chosen,
            requeue_signal=requeue_signal(as_list(self.config.trainer["plugins"])),
            mirror=run_folder.mirror,
        )
        keep.best.take_names_of(self.config.module)
        return keep

    @cached_property
    def record(self) -> RunRecord:
        """The callback that writes config.yaml, and names the run in each of its checkpoints."""
        run_id = self._run_folder.run_id
        program = self.config.program
        changes = self._run_folder.changes
        return RunRecord(self.folder, run_id, self.config.resolved, program.code, changes)

    @cached_property
    def trackers(self) -> list[Logger]:
        """The loggers that ``--logger`` names; without it W&B."""
        chosen = make_chosen_loggers(self.config, self._run_folder)
        best = self.exact_checkpoint.best
        wandb = make_wandb_logger(self.config, self._run_folder, best, chosen)
        return chosen if wandb is None else [*chosen, wandb]

    @cached_property
    def progress(self) -> Callback | None:
        """A line for each epoch, with a bar on a terminal; None where it is switched off."""
        return progress_callback(self.config.program.command("fit"), self.flags)

    @property
    def typed_callbacks(self) -> list[Callback]:
        """Those of ``--trainer.callbacks``."""
        return list(self.flags["callbacks"])

    def monitors(self, *monitors: Monitor) -> list[Monitor]:
        """Those of the monitors that ``--monitors`` names and this machine can feed.

        Raises:
            UserError: It names one that is not among them.
        """
        by_word = {monitor.word: monitor for monitor in monitors}
        asked = self.options.monitors
        if asked == "all":
            names = list(by_word)
        elif asked == "none":
            names = []
        else:
            names = [part.strip() for part in asked.split(",")]
        must = f"be any of {', '.join(by_word)}, or all, or none"
        for name in names:
            require(name in by_word, "--monitors", must, name)
        named = [monitor for word, monitor in by_word.items() if word in names]
        return [monitor for monitor in named if monitor.is_measurable]


@dataclass(frozen=True)
class Job(Program):
    """A program's main job: what is trained where nothing else is named, and what takes part.

    Attributes:
        callbacks: Makes the callbacks of a run, in their order. None stands for none.
        loggers: Makes the loggers of a run.
    """

    callbacks: Callable[[Run], Sequence[Callback | None]]
    loggers: Callable[[Run], Sequence[Logger]]

    def run(self) -> None:
        """Train as the command line says, and end the process with the exit code."""
        run_command(self.main)

    def main(self, argv: list[str]) -> int:
        """Train as ``argv`` says; returns the exit code. For a notebook or a test.

        A mistake in ``argv`` is printed in one line, and the code is 2. After a stop it is 130 or
        143. What one's own code raises is raised.
        """

        def train(typed: list[str]) -> int | None:
            # A command has done so before it imported Lightning.
            settle_launcher()
            ignore_rank_without_launcher()
            return main_job.main(self, self.build, typed)

        return exit_code_or_error(train, argv)

    def build(
        self, config: Configuration, run_folder: RunFolder, extra: Iterable[Callback] = ()
    ) -> Trainer:
        """The Trainer of a run. Callbacks in ``extra`` come last."""
        # A command has done so before it imported torch. In a notebook torch was imported before.
        threads.configure_later()
        run = Run(config, run_folder)
        loggers = list(self.loggers(run))
        run.metrics_csv.followers = [each for each in loggers if isinstance(each, FollowsRows)]
        # A logger may take part in a run's hooks as well.
        hooked = [each for each in loggers if isinstance(each, Callback)]
        listed = [each for each in self.callbacks(run) if each is not None]
        flags: dict[str, Any] = run.flags
        flags["callbacks"] = [*hooked, *listed, *extra]
        flags["logger"] = loggers
        flags["default_root_dir"] = run.folder
        if flags["profiler"] in LIGHTNINGS_PROFILERS:
            # Given by its word, it would print hundreds of long lines and leave no file.
            kind = LIGHTNINGS_PROFILERS[flags["profiler"]]
            flags["profiler"] = kind(dirpath=run.folder, filename="profile")
            say(f"the profile will be in {os.path.relpath(run.folder)}/fit-profile.txt")
        return build_trainer(flags, config.chosen)
