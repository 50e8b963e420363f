"""How a run ends when it is asked to, on all ranks at the same step.

What happens, in order:

1. A signal reaches any rank at any moment. In training its handler (signals.py) only notes it.
2. At the end of the optimizer step, :class:`unbroken.checkpoint.ending.Ending` asks
   :class:`Agreement` for the largest request of any rank. One rank knows it at once; several know
   it one step later, or, where they ask each other before each batch, with the next batch.
3. Before the next step, :class:`unbroken.checkpoint.saving.Saving` saves ``last.ckpt`` on all
   ranks. Inside a validation they agree after each of its batches: it is given up, the state of its
   start is saved, and a resumed run begins it again.
4. ``Ending.stop``: every rank raises :class:`unbroken.stopping.signals.Stopped`, which ends the
   process with 143 or 130. For SIGTERM that is :class:`Terminated`. At SLURM's signal the job is
   queued again first, and the process ends as by SIGTERM.

A signal after the last agreement of a run ends a script once everything is saved
(``Ending.stop_if_asked_late``), and a command in its test or at its end (``unbroken.cli.start``).
"""

import signal
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from unbroken.stopping import signals
from unbroken.stopping.signals import Stopped

# What a rank asks for is 0 (nothing), SAVE_DUE, or to stop: STOP plus the signal's number. The
# ranks take the largest: a stop counts more than a save that is due, and to be queued again, by
# SLURM's signal, more than a stop.
SAVE_DUE = 1
STOP = 1000
# A multiple of STOP: see signal_of.
REQUEUE = 2 * STOP


def request_of(signum: int) -> int:
    """What a rank asks for that has got this signal. 0: it has got none."""
    if not signum:
        return 0
    return signum + (REQUEUE if signals.is_requeue(signum) else STOP)


def request_of_this_rank() -> int:
    """What the signal asks for that this process has got."""
    return request_of(signals.state.requested)


def signal_of(request: int) -> int:
    """The signal by which a request asks to stop."""
    return request % STOP


class Terminated(Stopped, SIGTERMException):
    """SIGTERM has stopped the run. Code that waits for Lightning's own exception gets it."""

    def __init__(self) -> None:
        super().__init__(signal.SIGTERM)


class NextBatch(NamedTuple):
    """Which ranks have a further batch."""

    # Whether every rank has one.
    everywhere: bool
    # The highest rank that has none, where others have one; else None.
    rank_ended_early: int | None


class Agreement:
    """The largest request of any rank, known to all ranks at the same step.

    Each call starts an all-reduce in CPU memory (gloo) and returns the result of the call before:
    nothing waits. Lightning broadcasts rank zero's flag alone, on the device, and waits at every
    step.

    Where ranks may have unequally many batches, they ask each other before each batch
    (:meth:`agree_on_next_batch`). The requests go along with it, so a step costs one exchange
    there, too.
    """

    def __init__(self, world_size: int) -> None:
        self.group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._pending: tuple[Any, torch.Tensor] | None = None
        # What :meth:`agree_on_next_batch` has brought since the last call of :meth:`exchange`.
        self._came_with_batch: int | None = None
        # Whether a save that the next call of :meth:`exchange` would return is done already.
        self._is_saved = False

    def begin(self) -> None:
        """A training begins. What is left of the one before counts no more."""
        if self._pending is not None:
            self._pending[0].wait()
        self._pending = None
        self._came_with_batch = None
        self._is_saved = False

    def forget_saves(self) -> None:
        """All ranks have saved: a save that one asked for before, and of which they would know at
        the next :meth:`exchange`, is done.
        """
        self._is_saved = True

    def exchange(self, request: int) -> int:
        """Send this rank's request. Returns the largest request of any rank: at the call before,
        or at the last :meth:`agree_on_next_batch`; of one rank, this very request.
        """
        if self.group is None:
            return request
        agreed = self._agreed(request)
        is_done = self._is_saved and agreed == SAVE_DUE
        self._is_saved = False
        return 0 if is_done else agreed

    def _agreed(self, request: int) -> int:
        if self._came_with_batch is not None:
            agreed = self._came_with_batch
            self._came_with_batch = None
            return agreed
        before = self._pending
        value = torch.tensor([request])
        work = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._pending = (work, value)
        if before is None:
            return 0
        earlier_work, earlier_value = before
        earlier_work.wait()
        return int(earlier_value)

    def agree_on_next_batch(self, rank: int, has_one: bool, request: int) -> NextBatch:
        """Tell the other ranks whether this one has a further batch, and wait for their answers.

        Every rank of several must call it. ``request`` is as for :meth:`exchange`, whose next call
        returns the largest.
        """
        without = -1 if has_one else rank
        told = torch.tensor([request, without, int(has_one)])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        largest, last_without, is_somewhere = told.tolist()
        self._came_with_batch = max(self._came_with_batch or 0, largest)
        everywhere = last_without == -1
        is_uneven = bool(is_somewhere) and not everywhere
        return NextBatch(everywhere, last_without if is_uneven else None)
