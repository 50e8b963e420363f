"""Prove the resume on your own code: the same run undisturbed and killed, compared bit by bit.

python -m NAME.verify
python -m NAME.verify --config mine.yaml --steps 40 --kills 4
python -m NAME.verify --devices 2 --strategy ddp
python -m NAME.verify --accelerator gpu --deterministic true

It trains a few steps twice undisturbed, and once killed (SIGKILL) and resumed. It takes the flags
of NAME.fit. All runs lie in a temporary folder. Exit code 0: all results are the same; 1: one is
not. A table says what differs, from which step, why, and what to write. It also names attributes
that are not restored and have changed no result: in a longer run they may.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken.cli.parser import CommandParser, add_output
from unbroken.cli.start import quick_imports
from unbroken.errors import UserError, require
from unbroken.storage.files import write_atomically
from unbroken.tables import check_output

if TYPE_CHECKING:
    from unbroken.verifying.trial import Start

# Options of fit that say where a run lies, which is here a temporary folder.
OF_THE_FOLDER = ("run_name", "ckpt_path", "default_root_dir", "trainer.default_root_dir")
# What every run here gets, after everything that is typed.
ALWAYS = ["--logger", "false", "--report", "false", "--mirror", "null", "--fast_dev_run", "false"]
RUN_NAME = "run"
SEED = "42"
EPOCHS = 3
FEW_BATCHES = 3
FEWEST_STEPS = 6


def main(package: str, argv: list[str]) -> int:
    """Prove as ``argv`` says; returns the exit code."""
    # A run waits for none of its threads while others use the cores. OpenMP reads it with torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = read_options(package, argv)
    with quick_imports():
        from unbroken.stopping.ranks import launched_world
        from unbroken.verifying.trial import START_VARIABLE, Trial
        from unbroken.verifying.verdict import judge
    described = os.environ.get(START_VARIABLE)
    if described is not None:
        return FitTraining(package, argv, options).train_as(Path(described))
    if launched_world()[1] > 1:
        raise UserError("verify starts its ranks itself: remove torchrun or srun, add --devices N.")
    with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as folder:
        training = FitTraining(package, argv, options)
        trial = Trial(training, Path(folder), options.kills, options.seed, training.fresh)
        trial.run()
        verdict = judge(trial)
    write_atomically(f"{verdict.text}\n", options.output)
    print(verdict.line if verdict.is_silent else verdict.text)
    print(f"report in {options.output}")
    return 0 if verdict.is_exact else 1


def read_options(package: str, argv: list[str]) -> Namespace:
    """The options of ``argv``, with those of ``fit`` in ``fit_flags``; a UserError for bad
    values.
    """
    parser = CommandParser(package, "verify", __doc__)
    add_output(parser, "--output", (".txt",), "the report (default: verify.txt)")
    add = parser.add_argument
    add("--steps", type=int, default=24, help="optimizer steps, over three epochs (default: 24)")
    add("--kills", type=int, default=3, help="how often the run is killed (default: 3)")
    add("--seed", type=int, default=0, help="chooses where it is killed (default: 0)")
    options, fit_flags = parser.parse_known_args(argv)
    require(options.steps >= FEWEST_STEPS, "--steps", f"be at least {FEWEST_STEPS}", options.steps)
    require(options.kills >= 1, "--kills", "be at least 1", options.kills)
    for word in fit_flags:
        name = word.partition("=")[0].removeprefix("--")
        if name in OF_THE_FOLDER:
            raise UserError(f"--{name}: verify trains in a temporary folder. Remove the option.")
    if not options.output:
        options.output = check_output("verify.txt", (".txt",))
    options.fit_flags = fit_flags
    return options


class FitTraining:
    """A short training by the program's ``fit``, in the process in which it is called.

    Args:
        package: The program's package.
        argv: The command line of ``verify``.
        options: What it means.
    """

    def __init__(self, package: str, argv: list[str], options: Namespace) -> None:
        self.package = package
        self.argv = argv
        self.options = options

    @property
    def fresh(self) -> list[str]:
        """The command that does the same in a fresh interpreter, by the file of a start."""
        return [sys.executable, "-m", f"{self.package}.verify", *self.argv]

    def __call__(self, start: Start) -> int:
        """Train as a start says, with all ranks; returns the exit code."""
        from unbroken.verifying.trial import START_VARIABLE, describe

        described = describe(start)
        os.environ[START_VARIABLE] = str(described)
        return self.train_as(described)

    def train_as(self, described: Path) -> int:
        """Train as the start says that a file describes."""
        from unbroken.cli.start import exit_code
        from unbroken.verifying.trial import described_start

        start = described_start(described)
        return exit_code(lambda argv: self._train(start, argv), self._flags(start))

    def _train(self, start: Start, argv: list[str]) -> int:
        from unbroken.commands.program_of import program_of
        from unbroken.run import main_job
        from unbroken.run.job import Job

        job: Any = program_of(self.package)
        assert isinstance(job, Job)

        def build(config: Any, run_folder: Any) -> Any:
            shorten(config.trainer, self.options.steps)
            last = run_folder.folder / "last.ckpt"
            return job.build(config, run_folder, extra=start.callbacks(last))

        return main_job.main(job, build, argv)

    def _flags(self, start: Start) -> list[str]:
        from unbroken.cli.typed import CommandLine
        from unbroken.verifying.trial import SAVE_EVERY

        flags = [*self.options.fit_flags, *ALWAYS, "--checkpoint_every", SAVE_EVERY]
        # Without a seed two runs differ by design.
        if CommandLine(self.options.fit_flags).value("seed_everything") in ("false", "False"):
            flags += ["--seed_everything", SEED]
        where = ["--default_root_dir", str(start.run_folder), "--run_name", RUN_NAME]
        return [*flags, *where, "--ckpt_path", "auto"]


def shorten(flags: dict[str, Any], steps: int) -> None:
    """Make a training short: so many optimizer steps, over three epochs with a validation each.

    Args:
        flags: The Trainer's arguments. They are changed.
        steps: Optimizer steps.
    """
    batches = max(steps * flags["accumulate_grad_batches"] // EPOCHS, 1)
    flags["max_steps"] = steps
    flags["max_epochs"] = -1
    flags["max_time"] = None
    flags["fast_dev_run"] = False
    flags["limit_train_batches"] = fewer(flags["limit_train_batches"], batches)
    flags["limit_val_batches"] = fewer(flags["limit_val_batches"], FEW_BATCHES)
    flags["limit_test_batches"] = fewer(flags["limit_test_batches"], FEW_BATCHES)
    flags["log_every_n_steps"] = 1
    interval = flags["val_check_interval"]
    if isinstance(interval, int) and not isinstance(interval, bool) and interval > batches:
        flags["val_check_interval"] = batches
    if flags["check_val_every_n_epoch"] is not None:
        flags["check_val_every_n_epoch"] = 1


def fewer(limit: Any, batches: int) -> Any:
    """The limit of batches that leaves fewer."""
    if isinstance(limit, int) and not isinstance(limit, bool):
        return min(limit, batches)
    # A share of the data, such as 0.5, may be more batches, and may be none.
    return 0 if limit == 0 else batches
