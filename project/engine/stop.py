"""Ends a run when it is asked to, on all ranks at the same step."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from project.engine import signals

SAVE_DUE = 1  # what the ranks may agree on besides a signal's number: a request below them all


class GracefulStop(Callback):
    """SIGTERM, Ctrl-C and SLURM's signal, received by any rank at any moment, end all ranks at the same batch.

    Replaces Lightning's handling, which broadcasts inside the signal handler and can hang, hears rank 0 only, saves
    nothing and exits with 0 (Lightning issues 20806, 21406, 20542).

    Args:
        requeue_path: The checkpoint that Lightning's SLURM plugin writes before it asks for the job to be queued again.
    """

    def __init__(self, requeue_path: Path | None = None) -> None:
        self.requeue_path = requeue_path
        self._agreement: Agreement | None = None
        self._request = 0  # agreed upon: the signal to stop by, or SAVE_DUE

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._agreement is None:
            self._agreement = Agreement(trainer.world_size)
        signals.defer(shared=trainer.world_size > 1)
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            signal.signal(environment.requeue_signal, lambda number, _: signals.note(number))
            trainer._checkpoint_connector.hpc_save_path = lambda folderpath: str(self.requeue_path)  # type: ignore[method-assign]

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._stop_asked_in_evaluation(trainer):
            raise signals.Stopped(self._request)

    def _stop_asked_in_evaluation(self, trainer: Trainer) -> bool:
        """Whether the ranks agreed to stop; they count the same batches only with our evaluation sampler."""
        assert self._agreement is not None
        loaders = trainer.val_dataloaders if not trainer.testing else trainer.test_dataloaders
        if trainer.world_size == 1 or hasattr(getattr(loaders, "sampler", None), "num_batches"):
            self._request = max(self._request, self._agreement.latest(signals.requested()))
        return self._request > SAVE_DUE

    def _settle(self) -> int:
        assert self._agreement is not None
        return self._agreement.settle(signals.requested())

    def _asks_to_requeue(self, trainer: Trainer, signum: int) -> bool:
        environment = trainer._accelerator_connector.cluster_environment
        return isinstance(environment, SLURMEnvironment) and signum == environment.requeue_signal


def release_child_processes() -> None:
    """Stop Lightning's observer from killing this process because its child ranks have, rightly, ended non-zero."""
    for thread in threading.enumerate():
        if thread.name == "child-process-observer":
            thread._child_processes = []  # type: ignore[attr-defined]


# How ranks agree between two steps that something is due: one small all-reduce a step that nobody waits for.


class Agreement:
    """The largest request of any rank, known to all ranks at the same step.

    Each call starts an all-reduce over CPU memory (gloo, so never a wait for a GPU) and returns the outcome of the one
    started a call earlier, which has long arrived. Lightning instead broadcasts rank 0's flag on the device at
    every step and waits for it, and so neither hears the other ranks nor leaves the device alone.
    """

    def __init__(self, world_size: int) -> None:
        self.group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None

    def latest(self, request: int) -> int:
        """Hand in this rank's request; returns what all ranks agreed on a call ago (alone: the request itself)."""
        if self.group is None:
            return request
        agreed = self._outcome()
        value = torch.tensor([request])
        self._pending = (dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group, async_op=True), value)
        return agreed

    def settle(self, request: int) -> int:
        """Agree now, waiting for the other ranks. Every rank must call it."""
        if self.group is None:
            return request
        value = torch.tensor([max(request, self._outcome())])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order. Every rank must call it."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _outcome(self) -> int:
        if self._pending is None:
            return 0
        work, value = self._pending
        self._pending = None
        work.wait()
        return int(value)
