"""What the ranks of a run agree on: to stop, to save, or nothing."""

import signal
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from unbroken.stopping import signals
from unbroken.stopping.ranks import gather_from_ranks
from unbroken.stopping.signals import Stopped

# A request, which is what a rank asks for, is a number: 0 (nothing), SAVE_DUE, or to stop: STOP or
# REQUEUE plus the signal's number. The ranks take the largest: a stop counts more than a save that
# is due, and to be queued again, by SLURM's signal, more than a stop.
SAVE_DUE = 1
STOP = 1000
# A multiple of STOP: see signal_of.
REQUEUE = 2 * STOP


def request_of(signum: int) -> int:
    """The request of a rank that has received this signal; ``signum`` 0: it has received none."""
    if not signum:
        return 0
    return signum + (REQUEUE if signals.is_requeue(signum) else STOP)


def request_of_this_rank() -> int:
    """The request of this process, by the signal that it has received."""
    return request_of(signals.state.requested)


def signal_of(request: int) -> int:
    """The signal by which a request asks to stop."""
    return request % STOP


class Terminated(Stopped, SIGTERMException):
    """SIGTERM has stopped the run. ``except SIGTERMException``, of Lightning, catches it."""

    def __init__(self) -> None:
        super().__init__(signal.SIGTERM)


class NextBatch(NamedTuple):
    """Which ranks have a further batch."""

    # Whether every rank has one.
    everywhere: bool
    # The highest rank that has none, where others have one; else None.
    rank_ended_early: int | None


class Agreement:
    """The largest request of any rank, which all ranks know after the same step.

    One rank knows it at once. With several, each call of :meth:`agree` starts an all-reduce in CPU
    memory (gloo) and takes the result of the call before: it waits only for a rank that is a whole
    step behind. Lightning broadcasts rank zero's flag alone, on the device, and waits at every
    step.

    Where ranks may have unequally many batches, they ask each other before each batch
    (:meth:`agree_on_next_batch`). The requests go along with it, so a step costs one exchange
    there, too.

    Attributes:
        group: The ranks' group in CPU memory; None for one rank.
    """

    def __init__(self) -> None:
        self.group: Any = None
        # The largest request since the last save.
        self._request = 0
        # The exchange that was started and whose result is not read yet.
        self._pending: tuple[Any, torch.Tensor] | None = None
        # What :meth:`agree_on_next_batch` has brought since the last call of :meth:`agree`.
        self._came_with_batch: int | None = None
        # Whether the save that the next call of :meth:`agree` would bring is done already.
        self._ignores_next_save = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy is one whose ranks have not met."""
        return vars(Agreement())

    def begin(self, world_size: int) -> None:
        """Let the ranks of a Trainer meet. What is left of a training before counts no more."""
        if self.group is None and world_size > 1:
            self.group = dist.new_group(backend="gloo")
        if self._pending is not None:
            self._pending[0].wait()
        self._request = 0
        self._pending = None
        self._came_with_batch = None
        self._ignores_next_save = False

    @property
    def is_save_or_stop(self) -> bool:
        """Whether the ranks have agreed to save or to stop."""
        return self._request > 0

    @property
    def is_stop(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._request > SAVE_DUE

    @property
    def stop_signal(self) -> int:
        """The signal by which the ranks have agreed to stop."""
        return signal_of(self._request)

    def agree(self, request: int) -> None:
        """Send this rank's request, and take note of the largest. Several ranks take note of those
        that were sent at the call before, or with :meth:`agree_on_next_batch`.
        """
        self._note(self._exchange(request))

    def agree_at_the_end(self, request: int) -> None:
        """Take note of what all ranks ask for now. They wait for one another."""
        self._note(max(gather_from_ranks(request, self.group)))

    def add_save(self) -> None:
        """Take note of a save that every rank has found to be due by itself."""
        self._note(SAVE_DUE)

    def forget(self) -> None:
        """What was agreed on is done, or cannot be done now. Every rank must call it.

        A save that another rank had asked for before, and that the next :meth:`agree` would bring,
        is done with it.
        """
        self._request = 0
        self._ignores_next_save = True

    def agree_on_next_batch(self, rank: int, has_one: bool, request: int) -> NextBatch:
        """Tell the other ranks whether this one has a further batch, and wait for their answers.

        Every rank of several must call it. The requests come to :meth:`agree` with its next call.
        """
        without = -1 if has_one else rank
        told = torch.tensor([request, without, int(has_one)])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        largest, last_without, is_somewhere = told.tolist()
        self._came_with_batch = max(self._came_with_batch or 0, largest)
        everywhere = last_without == -1
        is_uneven = bool(is_somewhere) and not everywhere
        return NextBatch(everywhere, last_without if is_uneven else None)

    def _note(self, request: int) -> None:
        self._request = max(self._request, request)

    def _exchange(self, request: int) -> int:
        """Send a request; returns the largest that is known now."""
        if self.group is None:
            return request
        largest = self._largest_known(request)
        is_done = self._ignores_next_save and largest == SAVE_DUE
        self._ignores_next_save = False
        return 0 if is_done else largest

    def _largest_known(self, request: int) -> int:
        if self._came_with_batch is not None:
            largest = self._came_with_batch
            self._came_with_batch = None
            return largest
        before = self._pending
        value = torch.tensor([request])
        work = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._pending = (work, value)
        if before is None:
            return 0
        earlier_work, earlier_value = before
        earlier_work.wait()
        return int(earlier_value)
