"""Loaders that have no exact form: streams, and loaders that are not PyTorch's own.

Their order is theirs. What can be done for a resume is to keep their state after every batch, if
they have one.
"""

import copy
from collections.abc import Callable, Iterator
from itertools import tee
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from unbroken import contract
from unbroken.lightning_internals import iterator_of
from unbroken.loading.exact_loader import (
    ExactLoader,
    are_the_same,
    itself,
    lost_unless_set_again,
    made_of,
    position_of,
)
from unbroken.loading.own_generators import generators_in, seed_them
from unbroken.loading.position import DataStart, LoaderPosition
from unbroken.loading.samplers import cut_of, has_state
from unbroken.loading.seeding import seed_generators
from unbroken.loading.streams import SeededStream, can_be_seeded, seeded
from unbroken.loading.workers import iterate
from unbroken.stopping.ranks import say

# What a loader gives after its last batch.
END = object()
# Lightning has fetched at most one batch more than it trained on. Some more states are kept than
# that.
KEPT_STATES = 4
# Instead of a batch's number: what is drawn as an iteration begins.
BEGINNING = -1


class WatchedLoader(LoaderPosition):
    """A loader that has no exact form. If it has a state, the state is kept after each batch.

    Random numbers that are drawn in this process come from (seed, epoch, batch), on all ranks
    alike.

    Args:
        loader: What gives the batches.
        stateful: The loader, or its dataset, if its state is kept; else None.
        seed: For random numbers.
        goes_on: Asked before each batch, with the number of batches of this epoch that were read,
            and whether there is a further one. Returns whether it is handed out. None: it is.
    """

    def __init__(
        self,
        loader: Any,
        stateful: Any,
        seed: int,
        goes_on: Callable[[int, bool], bool] | None = None,
    ) -> None:
        super().__init__(loader, seed)
        self._stateful = stateful
        self.goes_on = goes_on
        # The length of the shortest rank's loader, where the ranks' lengths differ.
        self.shortest: int | None = None
        self._fetching_is_made_of: list[Any] = []
        self.fetching: Any = None
        self._make_fetching()
        # The state of ``stateful`` before the next pass, where it is known without asking. To ask
        # between ``load_state_dict`` and ``iter`` would make StatefulDataLoader and litdata forget
        # what was loaded.
        self.next_state: Any = None
        # A state that must be loaded before the next pass, for the last one ended before the loader
        # did (``--limit_train_batches``), and the loader may have been read ahead.
        self.rest: Any = None
        # Whether Lightning may begin to read twice before it trains. It does so with loaders that
        # are made anew for an epoch, and has then lost the first batch of a stream.
        self.may_be_begun_twice = False
        # The pass once more from its beginning, as long as it may be begun a second time.
        self._again: Iterator[Any] | None = None

    @property
    def stateful(self) -> Any:
        return self._stateful

    def __len__(self) -> int:
        return len(self.loader) if self.shortest is None else self.shortest

    def __iter__(self) -> Iterator[Any]:
        if self._again is not None:
            again = self._again
            self._again = None
            return again
        if not self.may_be_begun_twice:
            return self._pass()
        self.may_be_begun_twice = False
        first, self._again = tee(self._pass())
        return first

    def _make_fetching(self) -> None:
        """Make what is read, unless it is made of what the loader has now."""
        loader = self.loader
        if not can_be_seeded(loader):
            self.fetching = loader
            return
        made_of_now = [*made_of(loader), *cut_of(loader)]
        if not are_the_same(self._fetching_is_made_of, made_of_now):
            self._fetching_is_made_of = made_of_now
            self.fetching = seeded(loader, self.seeds.draws)

    def _pass(self) -> Iterator[Any]:
        self.take_epoch()
        if self.start.epoch_is_trained:
            return
        first = self.batches_before
        done = self._begin_pass()
        batches, batch = self._first_batch(done)
        length = sized_len(self.loader)
        while self._is_handed_out(batch, done):
            done += 1
            if done > first + 1:
                # Lightning asks for one batch beforehand. This is training.
                self._again = None
            self._remember_state(done)
            # A stateful loader resets itself only when it is asked past its end, and Lightning
            # never asks past the end. So the batch that may be the last is handed out after the
            # next one was asked for. Only that one: some loaders hand out the same tensor for every
            # batch, and fill it again.
            may_be_last = self.stateful is not None and (not length or done % length == 0)
            if may_be_last:
                following = self._next(batches, done)
                yield batch
            else:
                yield batch
                following = self._next(batches, done)
            batch = following
        if batch is END:
            self.finished = True
        else:
            # Another rank has no further batch. A loader with a state goes on here in its next
            # pass, as after --limit_train_batches.
            self.rest = self.states.get(done)
        self.batches_before = done if self.cycles else 0

    def _is_handed_out(self, batch: Any, done: int) -> bool:
        """Whether a batch is handed out, the one after ``done`` of this epoch. END never is."""
        has_one = batch is not END
        return has_one if self.goes_on is None else self.goes_on(done, has_one)

    def _begin_pass(self) -> int:
        """Put everything where the pass starts; returns the number of its first batch in the
        epoch.
        """
        if self.rest is not None:
            # As a resumed run does.
            self.load(self.rest)
        first = self.batches_before
        earlier_passes = self.states if first else {}
        self.states = {**earlier_passes, first: self.next_state}
        self.start = DataStart(self.start.epoch)
        self.batches_before = 0
        self.rest = None
        self.next_state = None
        self.finished = False
        return first

    def _first_batch(self, number: int) -> tuple[Iterator[Any], Any]:
        """A new iteration and its first batch."""
        batches = self._iterate(number)
        batch = self._next(batches, number)
        if batch is END:
            # The state was that of an ended pass: this iteration had nothing left, and the next one
            # is the new pass.
            batches = self._iterate(number)
            batch = self._next(batches, number)
        return batches, batch

    def _iterate(self, first: int) -> Iterator[Any]:
        self._make_fetching()
        stream = getattr(self.fetching, "dataset", None)
        if isinstance(stream, SeededStream):
            stream.seed = self.seeds.draws
            stream.begin_pass(self.start.epoch, first)

        def begin() -> Iterator[Any]:
            if self.stateful is None:
                # Where a state is kept, the generators are a part of it.
                seed = hash((self.seeds.draws, self.start.epoch, first))
                seed_them(generators_in(self.loader), seed)
            return iterate(self.fetching)

        return self._drawn_for(BEGINNING, begin)

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        """The next batch, or END."""
        batch = self._drawn_for(number, lambda: next(batches, END))
        if batch is END:
            self.finished = True
            self.next_state = self.state()
        return batch

    def _remember_state(self, done: int) -> None:
        self.states[done] = self.state()
        self.states.pop(done - KEPT_STATES, None)

    def _drawn_for(self, batch: int, make: Callable[[], Any]) -> Any:
        with isolate_rng(include_cuda=False):
            seed_generators(hash((self.seeds.draws, self.start.epoch, batch)))
            return make()

    def load(self, state: Any) -> None:
        if self.stateful is None:
            # Somebody else has saved a state that was not proved.
            self.loader.load_state_dict(copy.deepcopy(state))
            return
        super().load(state)
        self.next_state = state

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        names = ("dataset", "sampler", "batch_sampler")
        parts = [getattr(self.loader, name, None) for name in names]
        for part in (self.loader, *parts):
            if isinstance(part, contract.OrdersByEpoch):
                part.set_epoch(epoch)

    def state_to_start_after(self, batches: int, epoch_ends: bool) -> tuple[int, Any]:
        if not epoch_ends:
            return super().state_to_start_after(batches, epoch_ends)
        # Where the epoch ended before the loader did, the next pass begins after the batches that
        # were trained on.
        return 0, self.next_state if self.finished else self.states.get(batches)

    def end_epoch(self, batches: int) -> None:
        if not self.finished:
            self.rest = self.states.get(batches)


# Lightning asks the class for these, and not the loader.
METHODS_OF_STATE = ("state_dict", "load_state_dict")
# What Lightning writes into each loader after ``seed_everything(workers=True)``
WRITTEN_BY_LIGHTNING = "worker_init_fn"


class LiveLoader:
    """What the user's code finds in the place of a loader that has no exact form.

    It gives the batches as :class:`WatchedLoader` does. All else is read from, and written to, the
    loader itself, and ``isinstance`` takes it for one of the loader's class.
    """

    __slots__ = ("__weakref__", "exact_position", "told_of")

    exact_position: WatchedLoader
    _iterator = iterator_of("exact_position.fetching")

    def __init__(self, position: WatchedLoader) -> None:
        object.__setattr__(self, "exact_position", position)
        # The attributes that were changed, and of which this was said.
        object.__setattr__(self, "told_of", set())

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the loader, by which ``isinstance`` finds what the user asks for."""
        return type(self.exact_position.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.exact_position)

    def __len__(self) -> int:
        return len(self.exact_position)

    def __getattr__(self, name: str) -> Any:
        if name in LiveLoader.__slots__ or name in METHODS_OF_STATE:
            raise AttributeError(name)
        return getattr(self.exact_position.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_iterator":
            # Lightning ends workers so.
            object.__setattr__(self, name, value)
            return
        loader = self.exact_position.loader
        setattr(loader, name, value)
        if name != WRITTEN_BY_LIGHTNING and name not in self.told_of:
            self.told_of.add(name)
            say(lost_unless_set_again(name, loader))

    def __delattr__(self, name: str) -> None:
        delattr(self.exact_position.loader, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is one of the user's own loader."""
        return itself, (self.exact_position.loader,)


class StatefulLiveLoader(LiveLoader):
    """The same of a loader with a state. Lightning puts its state into the checkpoints that others
    save, such as ``trainer.save_checkpoint`` or ModelCheckpoint.

    Lightning looks for both names, since Python 3.12 in the class alone.
    """

    __slots__ = ()

    def state_dict(self) -> Any:
        """The loader's state after the batches that training has taken."""
        position = self.exact_position
        if not position.is_asked:
            return {}
        if position.stateful is None or position.batches_now is None:
            with isolate_rng(include_cuda=False):
                return position.loader.state_dict()
        return position.state_to_start_after(position.batches_now(), epoch_ends=False)[1]

    def load_state_dict(self, state: Any) -> None:
        """Put the loader into a state before it is read."""
        self.exact_position.load(state)


def live_loader(position: WatchedLoader) -> LiveLoader:
    """What the user's code finds in the place of a loader."""
    kind = StatefulLiveLoader if has_state(position.loader) else LiveLoader
    return kind(position)


def users_own(loader: Any) -> Any:
    """The user's loader, of what the run has put in its place; any other as it is."""
    return position_of(loader).loader if isinstance(loader, ExactLoader | LiveLoader) else loader
