"""Weights & Biases: one run per job, started beside the training, so that nothing ever waits for it or fails with it.

Online where an API key is configured, else offline: no prompt, no network. ``WANDB_MODE`` and every other variable of
W&B wins over what is set here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.errors import UserError
from project.wandb_connection import (
    END_PATIENCE,
    START_PATIENCE,
    STEP,
    define_metrics,
    end_wandb_process,
    has_wandb_key,
    start_run,
)

DEFAULT_PROJECT = "mnist-lightning"
# Seconds: for the uploads of a run that was asked to stop, which has ten in all; before a worker process is forked.
STOP_PATIENCE, FORK_PATIENCE = 3.0, 10.0


def make_wandb_logger(folder: Path, run_name: str, run_id: str, config: dict[str, Any]) -> WandbRunLogger | None:
    """The W&B logger of a run, or None where ``WANDB_MODE=disabled``. The id makes a resumed run go on in its W&B run.

    Raises:
        UserError: ``WANDB_MODE=online`` without an API key.
    """
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return None
    key = has_wandb_key()
    if mode in ("online", "run") and not key:
        raise UserError("WANDB_MODE=online needs an API key, and none is configured. Run wandb login, or unset it.")
    return WandbRunLogger(folder, run_name, run_id, config, offline=mode in ("offline", "dryrun") or not key)


class WandbRunLogger(WandbLogger):
    """Lightning's W&B logger, whose run starts in a thread while training goes on.

    Lightning's waits for W&B (a second and a half, online longer) before anything else happens, and sends a row per
    call. Here what is logged before the run is up waits in a list, and what is logged at one step is one row, as in
    metrics.csv. Nothing is written to disk before :meth:`begin`, which ``on_train_start`` calls.

    Args:
        folder: The run's folder.
        run_name: Shown in W&B.
        run_id: W&B's id of the run.
        config: Plain values, shown as the run's configuration.
        offline: Write files only; ``wandb sync`` uploads them.
    """

    def __init__(self, folder: Path, run_name: str, run_id: str, config: dict[str, Any], offline: bool) -> None:
        project = os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT)
        super().__init__(name=run_name, save_dir=str(folder), id=run_id, project=project, offline=offline)
        self.config = dict(config)
        self.metric_names: set[str] = set()  # logged so far
        self._run: Future[Any] = Future()
        self._imported, self._begun, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._row: dict[str, Any] = {}  # of the latest step, may still grow
        self._rows: list[dict[str, Any]] = []  # waiting for the run to be up
        if offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its reports look for their server offline, too
        self._starter = threading.Thread(target=self._start, name="wandb-start", daemon=True)
        self._starter.start()
        # a forked worker process must not inherit a half-done import
        os.register_at_fork(before=self._wait_before_fork)

    @property
    def experiment(self) -> Any:
        """The W&B run. Lightning asks for it before training; what it gets waits for the run at its first use."""
        return self._run.result() if self._run.done() else _Awaited(self.wait)

    @property
    def offline(self) -> bool:
        """Whether only files are written."""
        return bool(self._offline)

    @property
    def is_up(self) -> bool:
        """Whether the W&B run takes what it is given at once."""
        return self._run.done()

    def begin(self, facts: Mapping[str, Any] | None = None) -> None:
        """Let the W&B run start: training is about to. ``facts`` join its configuration."""
        self.config |= facts or {}
        self._begun.set()

    def wait(self, timeout: float | None = None) -> Any:
        """The W&B run, once it is up; a stand-in that does nothing where it could not start.

        Raises:
            TimeoutError: It is not up after ``timeout`` seconds.
        """
        self.begin()
        return self._run.result(timeout)

    def log_hyperparams(self, params: Any) -> None:
        """Nothing: the resolved configuration holds them."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if step is not None and self._row.get(STEP, step) != step:
            self.send()
        self._row |= metrics if step is None else {**metrics, STEP: step}
        self.metric_names |= metrics.keys()

    def send(self) -> None:
        """Give W&B all that was logged, or keep it until the run is up."""
        if self._row:
            self._rows.append(self._row)
            self._row = {}
        if self._run.done():
            for row in self._rows:
                self._run.result().log(row)
            self._rows = []

    def finish(self, exit_code: int, patience: float | None = None) -> None:
        """Close the run with the process's exit code, so that a stopped run is not shown as finished.

        Args:
            exit_code: Of the process.
            patience: Seconds after which uploads are given up; ``wandb sync`` completes them later.
        """
        if not self._begun.is_set():
            return
        with contextlib.suppress(TimeoutError):
            run = self.wait(patience if patience is not None else START_PATIENCE + END_PATIENCE)
            self.send()
            closing = threading.Thread(target=run.finish, kwargs={"exit_code": exit_code}, daemon=True)
            closing.start()
            closing.join(patience)
            if not closing.is_alive():
                return
        self._given_up.set()
        rank_zero_warn("W&B did not take everything in time. What its files hold, wandb sync uploads.")
        end_wandb_process()

    def _start(self) -> None:
        try:
            import wandb  # noqa: F401 - the slow part, while the data is being prepared

            self._imported.set()
            self._begun.wait()
            run = start_run(self._wandb_init, self.config, self.offline, self._given_up.is_set)
            define_metrics(run)
        except Exception as error:
            if not self._given_up.is_set():
                rank_zero_warn(f"W&B could not start and records nothing ({type(error).__name__}: {error}).")
            run = _DummyExperiment()
        self._imported.set()
        self._run.set_result(run)

    def _wait_before_fork(self) -> None:
        if threading.current_thread() is not self._starter:
            self._imported.wait(FORK_PATIENCE)
            with contextlib.suppress(TimeoutError):
                self._run.result(FORK_PATIENCE if self._begun.is_set() else 0)


class _Awaited:
    """Stands for the W&B run until it is up, and waits for it when it is used."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wait(), name)
