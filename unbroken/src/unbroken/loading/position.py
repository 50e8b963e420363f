"""Where training is in its loaders. A checkpoint holds two things of each: the state of what has
one (:meth:`LoaderPosition.state_to_start_after`), and how its batches are cut.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities.seed import isolate_rng
from unbroken.loading.samplers import Cut, cut_anew, cut_of
from unbroken.loading.seeding import Seeds


class DataStart(NamedTuple):
    """Where in an epoch training goes on."""

    epoch: int = 0
    # Batches that each rank has trained on in this epoch.
    batches: int = 0
    # Samples per batch of all ranks together, at the time of the checkpoint.
    samples_per_batch: int = 0
    # For each of this rank's loaders: after how many batches of the epoch its state was taken, and
    # the state. An ExactLoader's is taken at the start of a pass.
    loader_states: Sequence[tuple[int, Any]] = ()
    # Whether the epoch's training is done, and only its validation is left.
    epoch_is_trained: bool = False
    # Of a checkpoint that somebody else saved: the states of the loaders that have one, as
    # Lightning keeps them, after these batches.
    lightnings_states: Sequence[Any] = ()


class LoaderPosition:
    """Where training is in one of its loaders.

    A pass is one iteration over the loader. Usually an epoch is one pass. A loader beside a longer
    one is passed through several times in an epoch.

    Args:
        loader: As the user gave it. What he changes of it counts when a pass begins.
        seed: For order and random numbers.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self.loader = loader
        # How it cut its batches when it was made, in the pass that is read, and in the rest of the
        # epoch that a checkpoint was saved in. None: the rest is cut as the loader says.
        self.cut_as_made = cut_of(loader)
        self.cut_of_pass: Cut | None = None
        self.cut_of_rest: Cut | None = None
        # Asked as a pass begins. None: the epoch is that of :meth:`set_epoch`.
        self.epoch_now: Callable[[], int] | None = None
        # How many batches of this epoch the training has taken. None: nobody knows.
        self.batches_now: Callable[[], int] | None = None
        # A run may give it others before it is read. A loader that has no exact form uses that of
        # the draws alone: its order is its own.
        self.seeds = Seeds(seed, seed)
        # Where the next pass starts.
        self.start = DataStart()
        # The batches of this epoch before the next pass: those of earlier passes.
        self.batches_before = 0
        # Whether a loader that has no exact form has come to its end.
        self.finished = False
        # Whether a further pass of the same epoch goes on counting, in another order.
        self.cycles = False
        # Whether Lightning gets the loader's state as it makes a checkpoint.
        self.is_asked = True
        # The state of ``stateful`` after so many batches of this epoch.
        self.states: dict[int, Any] = {}

    @property
    def stateful(self) -> Any:
        """What has a state that checkpoints keep (a sampler, loader or dataset); None where nothing
        has.
        """
        raise NotImplementedError

    @property
    def takes_state(self) -> bool:
        """Whether there is something that a saved state can be loaded into."""
        return self.stateful is not None

    def what_is_made_otherwise(self, state: Any, is_made_for_each_epoch: bool) -> str | None:
        """What the user's code has made otherwise than before the save: a line's beginning. None:
        nothing that anybody sees.

        Args:
            state: Of :meth:`state_to_start_after`.
            is_made_for_each_epoch: Whether the loader of the save's epoch was not the first one.
        """
        if not self.takes_state:
            return "the checkpoint holds a state of a loader that has none now"
        return None

    def draw_again(self) -> str | None:
        """Draw the order of the pass that a run resumes in, where it is drawn at once.

        Returns:
            Why that is another one: a line's beginning. None: it is the same, or nobody knows.
        """
        return None

    def return_to_save(self) -> None:
        """Let the sampler of an order that is drawn at once hold what it held at the save."""

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch. Another epoch than before starts at its beginning."""
        if epoch != self.start.epoch:
            self.start = DataStart(epoch)
            self.batches_before = 0
            self.cut_of_rest = None

    def take_epoch(self) -> None:
        """A pass begins: take over the epoch that the Trainer is in."""
        if self.epoch_now is not None:
            self.set_epoch(self.epoch_now())

    def start_at(self, start: DataStart, batches_before: int = 0, state: Any = None) -> None:
        """Start inside an epoch. ``state`` was taken after ``batches_before`` of its batches."""
        self.set_epoch(start.epoch)
        self.start = start
        self.batches_before = batches_before
        self.finished = start.epoch_is_trained
        if state is not None:
            self.load(state)

    def state(self) -> Any:
        """The state of ``stateful``. Asking changes no generator: some objects draw a number as
        they are asked.
        """
        if self.stateful is None:
            return None
        with isolate_rng(include_cuda=False):
            # A copy, because some objects return what they go on changing.
            return copy.deepcopy(self.stateful.state_dict())

    def load(self, state: Any) -> None:
        """Load a state. A copy, because some objects change what they were given."""
        self.stateful.load_state_dict(copy.deepcopy(state))

    def state_to_start_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        """What :meth:`start_at` needs besides a :class:`DataStart`, to start after so many batches
        of this epoch. Nothing is changed.

        Returns:
            After how many batches of the epoch the state was taken, and the state. With
            ``epoch_ends`` training goes on with the next epoch.
        """
        if epoch_ends:
            return 0, self.state()
        known = max((number for number in self.states if number <= batches), default=0)
        return known, self.states.get(known)

    def end_epoch(self, batches: int) -> None:
        """The epoch's training is done after so many batches. A loader that has more of them goes
        on after these in its next pass, if it has a state.
        """

    def kept_cut(self, epoch_ends: bool) -> dict[str, list[Any] | None]:
        """How the batches are cut, for a checkpoint. With ``epoch_ends`` training goes on with the
        next epoch.
        """
        # A resumed run that saves before it reads has the rest of a pass before it.
        cut = self.cut_of_rest or self.cut_of_pass
        of_pass = None if epoch_ends or cut is None else [*cut]
        now = [*cut_of(self.loader)]
        return {"as_made": [*self.cut_as_made], "of_pass": of_pass, "now": now}

    def cut_again(self, kept: dict[str, list[Any] | None]) -> None:
        """Cut batches as :meth:`kept_cut` has it, unless the loader was made with another size: the
        user has typed that one.
        """
        if kept["as_made"] != [*self.cut_as_made]:
            return
        if kept["now"] is not None:
            cut_anew(self.loader, Cut(*kept["now"]))
        if kept["of_pass"] is not None:
            self.cut_of_rest = Cut(*kept["of_pass"])
