"""SLURM asks a job to be saved and queued again, before its time is over."""

import os
import signal
import subprocess
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def requeue_signal(plugins: Iterable[Any] = ()) -> int | None:
    """The signal at which SLURM wants the job to be saved and queued again.

    None outside of SLURM, and where a SLURMEnvironment among the Trainer's ``plugins`` says that it
    shall not be.
    """
    if not SLURMEnvironment.detect():
        return None
    typed = [plugin for plugin in plugins if isinstance(plugin, SLURMEnvironment)]
    return requeue_signal_of(typed[0] if typed else SLURMEnvironment())


def requeue_signal_of(environment: Any) -> int | None:
    """The signal at which a Trainer in this cluster environment is saved and queued again, as
    Lightning has it; None where it is not.
    """
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return int(environment.requeue_signal or signal.SIGUSR1)


def requeue_job() -> None:
    """Ask SLURM to queue this job again under its own id.

    Lightning's plugin would first save its own checkpoint.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        advice = "Submit it once more: it goes on where it was."
        rank_zero_warn(f"the job could not be queued again ({error}). {advice}")
