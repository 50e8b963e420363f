"""Where training is in its data: the part of a loader that checkpoints keep."""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities.seed import isolate_rng
from unbroken.loading.seeding import Seeds


class Start(NamedTuple):
    """Where in an epoch training goes on."""

    epoch: int = 0
    # Batches that each rank has trained on in this epoch.
    batches: int = 0
    # Samples per batch of all ranks together, at the time of the checkpoint.
    samples_per_batch: int = 0
    # For each of this rank's loaders: the number of the batch at which its pass began, and the
    # state of its owner there.
    loaders: Sequence[tuple[int, Any]] = ()
    # Whether the epoch's training is done, and only its validation is left.
    over: bool = False


class Passes:
    """Where training is in one of its loaders.

    A pass is one iteration over the loader. Usually an epoch is one pass. A loader beside a longer
    one is passed through several times in an epoch.

    Args:
        owner: What has a state that checkpoints keep (a sampler, loader or dataset); None where
            nothing has.
        seed: For order and random numbers.
    """

    def __init__(self, owner: Any, seed: int) -> None:
        self.owner = owner
        # A run may give it others before it is read. A loader that has no exact form uses that of
        # the draws alone: its order is its own.
        self.seeds = Seeds(seed, seed)
        # Where the next pass starts.
        self.start = Start()
        # The number in the epoch of the batch at which the next pass begins: the batches of earlier
        # passes.
        self.first = 0
        # Whether a loader that has no exact form has come to its end.
        self.finished = False
        # Whether a further pass of the same epoch goes on counting, in another order.
        self.cycles = False
        # The owner's state after so many batches of this epoch.
        self.states: dict[int, Any] = {}

    def set_epoch(self, epoch: int) -> None:
        """Lightning's hook: the next pass is of this epoch. Another epoch than before starts at its
        beginning.
        """
        if epoch != self.start.epoch:
            self.start = Start(epoch)
            self.first = 0

    def start_at(self, start: Start, first: int = 0, state: Any = None) -> None:
        """Start inside an epoch, in the pass that began after ``first`` batches, with the owner's
        ``state`` there.
        """
        self.set_epoch(start.epoch)
        self.start = start
        self.first = first
        self.finished = start.over
        if state is not None:
            self.load(state)

    def state(self) -> Any:
        """The owner's state. Asking changes no generator: some owners draw a number as they are
        asked.
        """
        if self.owner is None:
            return None
        with isolate_rng(include_cuda=False):
            # A copy, for some owners return what they go on changing.
            return copy.deepcopy(self.owner.state_dict())

    def load(self, state: Any) -> None:
        """Put the owner into a state. A copy, for some owners change what they were given."""
        self.owner.load_state_dict(copy.deepcopy(state))

    def state_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        """What :meth:`start_at` needs besides a :class:`Start` to go on after so many batches of
        this epoch.

        Returns:
            The number of the batch at which the owner's state was taken, and the state. With
            ``epoch_ends`` training goes on with the next epoch.
        """
        if epoch_ends:
            return 0, self.state()
        known = max((number for number in self.states if number <= batches), default=0)
        return known, self.states.get(known)
