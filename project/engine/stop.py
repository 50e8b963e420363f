"""Ends a run when it is asked to, on all ranks at the same step.

What happens, in order:

1. A signal reaches any rank at any moment. Its handler (:mod:`project.engine.signals`) only notes it.
2. At the end of the step, :class:`Agreement` tells every rank the largest request of any rank.
3. Before the next step, at a step boundary, :class:`project.engine.checkpointing.RunCheckpoint` saves ``last.ckpt``.
4. Every rank raises :class:`project.engine.signals.Stopped`; ``fit`` writes the report of what was reached.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from project.engine import signals
from project.engine.exact_loading import ExactLoader, ExactLoading
from project.engine.lightning_internals import (
    evaluated,
    leave_signals_alone,
    of_rank_zero_alone,
    share_sums,
)
from project.engine.ranks import say

SAVE_DUE = 1  # a request that is lower than every signal's number


class Agreement:
    """The largest request of any rank, known to all ranks at the same step.

    Each call starts an all-reduce in CPU memory (gloo) and returns the result of the call before: nothing waits.
    Lightning broadcasts rank 0's flag alone, on the device, and waits at every step.
    """

    def __init__(self, world_size: int) -> None:
        self.group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def latest(self, request: int) -> int:
        """Give this rank's request; returns what all ranks agreed on one call ago (one rank: the request itself)."""
        if self.group is None:
            return request
        before, value = self._pending, torch.tensor([request])
        self._pending = (
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group, async_op=True),
            value,
        )
        if before is None:
            return 0
        before[0].wait()
        return int(before[1])


class GracefulStop(Callback):
    """Ends all ranks at the same batch after a signal to any of them, also SLURM's ``requeue_signal``.

    Lightning's handler broadcasts inside the signal handler and can hang, knows rank 0's signal only, saves nothing and
    exits with 0 (issues 20806, 21406, 20542). Also installs exact loaders, and adds up over ranks what evaluations log.
    """

    def __init__(
        self, requeue_signal: int | None = None, clean_up: Callable[[], None] | None = None
    ) -> None:
        self.loading = ExactLoading()
        self.requeue_signal = requeue_signal
        self.agreement: Agreement
        self._request = 0  # agreed upon: the signal to stop by, or SAVE_DUE
        self._told: set[str] = set()  # metrics of rank 0 alone
        signals.watch(clean_up)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(self, "agreement"):  # else the test after a training
            self.agreement = Agreement(trainer.world_size)
            self.loading.install(trainer)
        leave_signals_alone(trainer)
        if isinstance(
            trainer.precision_plugin, DoublePrecision
        ):  # Lightning does so after a checkpoint was loaded
            pl_module.double()
        if self.requeue_signal is not None:
            signal.signal(
                self.requeue_signal, lambda number, _: setattr(signals.state, "requested", number)
            )

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signals.defer()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1 and (names := set(of_rank_zero_alone(trainer)) - self._told):
            self._told |= names
            what = f"{', '.join(sorted(names))}, logged outside of the step, is of rank 0's samples alone"
            say(f"{what}: log it in the step, with self.log or as a torchmetrics metric.")

    on_test_end = on_validation_end

    def save_in_validation(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before a training's validation is left."""

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        batch_idx, loader_idx = args[2], args[3] if args[3:] else 0
        loaders, is_last = (
            evaluated(trainer, batch_idx, loader_idx) if trainer.world_size > 1 else ([], False)
        )
        ranks_agree = all(
            isinstance(loader, ExactLoader) for loader in loaders
        )  # on the number of batches
        if ranks_agree and is_last and not trainer.sanity_checking:
            share_sums(trainer)  # Lightning computes the values before the epoch's end
        if ranks_agree:
            self._request = max(self._request, self.agreement.latest(signals.state.requested))
        if self._request > SAVE_DUE:
            if trainer.state.fn == "fit" and not trainer.sanity_checking:
                self.save_in_validation(trainer, pl_module)
            raise signals.Stopped(self._request)

    on_test_batch_end = on_validation_batch_end


def failure_within(
    seconds: float | None, work: Callable[[], Any]
) -> BaseException | None:  # feature: report, wandb
    """Do ``work`` in a thread, which is left behind after ``seconds``; returns what went wrong, None if nothing."""
    outcome: list[BaseException | None] = [TimeoutError(f"not done after {seconds} s")]

    def target() -> None:
        try:
            work()
            outcome[0] = None
        except BaseException as error:  # wandb.teardown raises SystemExit where its process failed
            outcome[0] = error

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]


def requeue_job() -> None:
    """Ask SLURM to queue this job again under its own id. Lightning's plugin would first save its own checkpoint."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        rank_zero_warn(
            f"the job could not be queued again ({error}). Submit it once more: it goes on where it was."
        )
