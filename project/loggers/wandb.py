"""Weights & Biases: one run per job, started beside the training, so that nothing ever waits for it or fails with it.

Online where an API key is configured, else offline: no prompt, no network. ``WANDB_MODE`` and every other variable of
W&B wins over what is set here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.engine.log_steps import skip_idle_hooks
from project.errors import UserError

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


# Starting and ending W&B's own process and a run in it: settings, mode, axes.


STEP = "trainer/global_step"
# Seconds: for a server to answer at the start, and for the last uploads of a finished run.
START_PATIENCE, END_PATIENCE = 30.0, 120.0
SETTINGS: dict[str, Any] = {
    "silent": True,  # its lines about where files lie; our summary says it in one
    "x_save_requirements": False,  # reads the metadata of every installed package: half a second; the lock file has it
    "init_timeout": START_PATIENCE,
    "finish_timeout": END_PATIENCE,
}


def has_wandb_key() -> bool:
    """Whether a W&B API key is configured (environment or netrc); no network is touched."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    own_server = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    try:
        hosts = netrc.netrc(os.environ.get("NETRC", str(Path.home() / ".netrc"))).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any(host == own_server or "wandb" in host for host in hosts)


def start_run(
    options: dict[str, Any], config: dict[str, Any], offline: bool, given_up: Callable[[], bool] = lambda: False
) -> Any:
    """``wandb.init``; offline where the server cannot be reached and nobody has given up waiting."""
    import wandb

    settings = {key: value for key, value in SETTINGS.items() if f"WANDB_{key.upper()}" not in os.environ}
    common = {key: options[key] for key in ("name", "project", "dir", "id")} | {"config": config}
    with without_launch_inputs():
        if not offline:
            try:
                run = wandb.init(**common, mode="online", resume="allow", settings=wandb.Settings(**settings))
                print(f"W&B: {run.url}", flush=True)
                return run
            except Exception as error:
                if given_up():
                    raise
                rank_zero_warn(f"W&B cannot be reached, this run is recorded offline ({' '.join(str(error).split())}).")
                wandb.teardown()  # its process still counts the run that did not start
        return wandb.init(**common, mode="offline", settings=wandb.Settings(**settings))


@contextlib.contextmanager
def without_launch_inputs() -> Iterator[None]:
    """Spare a run that W&B Launch did not start the look for Launch's inputs: its imports take longer than all else."""
    from wandb.sdk.wandb_run import Run

    name = "_detect_and_apply_job_inputs"
    original = getattr(Run, name, None)
    if original is None or os.environ.get("WANDB_LAUNCH"):
        yield
        return
    setattr(Run, name, lambda self: None)
    try:
        yield
    finally:
        setattr(Run, name, original)


def define_metrics(run: Any) -> None:
    """All panels are drawn over optimizer steps; a run is summed up by its best val/accuracy, else by last values."""
    for hidden in (STEP, "epoch"):
        run.define_metric(hidden, hidden=True)
    run.define_metric("*", step_metric=STEP)
    run.define_metric("val/accuracy", step_metric=STEP, summary="max")


def end_wandb_process() -> None:
    """End W&B's own process, and take back its exit hook, which would wait for it when this process ends."""
    import psutil
    import wandb

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "wandb-core" in child.name():
                child.kill()

    def take_back() -> None:
        with contextlib.suppress(Exception):
            wandb.teardown()

    hook = threading.Thread(target=take_back, daemon=True)
    hook.start()
    hook.join(1.0)


# Lets the W&B run start when training does, with what is known by then.


class WandbStart(Callback):
    """Begins a :class:`project.loggers.wandb.WandbRunLogger`, and adds device, precision and data to its configuration.

    Not before training starts, so that a run which cannot start leaves no W&B files behind.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        skip_idle_hooks(self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbRunLogger):
                logger.begin(
                    {
                        "device": str(trainer.strategy.root_device.type),
                        "precision": trainer.precision,
                        "world_size": trainer.world_size,
                        "data_source": getattr(trainer.datamodule, "data_source", None),  # type: ignore[attr-defined]
                        "parameters": sum(p.numel() for p in pl_module.parameters()),
                    }
                )
