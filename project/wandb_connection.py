"""Starting and ending W&B's own process and a run in it: settings, mode, axes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

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
