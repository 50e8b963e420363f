"""Who shares the data among the ranks: the library, the user's own samplers, or nobody; and how
loaders of several ranks end together.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from unbroken.errors import UserError
from unbroken.loading.exact_loader import ExactLoader, position_of
from unbroken.loading.held_data import held_data, is_alike
from unbroken.loading.log_steps import SHARDING
from unbroken.loading.samplers import (
    deals_in_order,
    gives_a_share,
    is_plain,
    is_stream,
    name_of,
    samplers_within,
    source_of,
)
from unbroken.loading.watched_loader import WatchedLoader
from unbroken.stopping.agreement import NextBatch
from unbroken.stopping.ranks import gather_from_ranks, say


class Form(Enum):
    """In which form a loader is read."""

    # Its order is cut anew: an ExactLoader.
    EXACT = auto()
    # An ExactLoader, too, but the user has shared the data among the ranks himself.
    OWN_SHARE = auto()
    # The same, told by what the ranks hold: other data than one another.
    OWN_DATA = auto()
    # Its order is its own: a WatchedLoader.
    WATCHED = auto()


class Shares:
    """Shares the data among the ranks where nobody else does, and says who does.

    Args:
        lines: Where to add what is to be said.

    Attributes:
        are_ours: Whether the data are shared here. False: the user has done so
            (use_distributed_sampler=False).
        agree_on_next_batch: Tells the other ranks whether this one has a further batch. None: they
            are not asked.
    """

    def __init__(self, lines: list[str]) -> None:
        self.are_ours = True
        self.agree_on_next_batch: Callable[[bool], NextBatch] | None = None
        self._lines = lines
        self._said_uneven = False

    def form_of(self, loader: Any, training: bool, world_size: int) -> Form:
        """In which form a loader is read. Every rank must call it.

        Raises:
            UserError: The data cannot be shared, because they have no length.
        """
        if not is_plain(loader) or is_stream(loader.dataset):
            return Form.WATCHED
        source = source_of(loader)
        own_share = self._is_own_share(source, training)
        if sized_len(source) is None:
            if world_size > 1 and not own_share:
                name = type(source).__name__
                raise UserError(
                    f"--devices {world_size}: {name} has no length, so it cannot be shared by the "
                    "ranks. Give it __len__, or use one device."
                )
            return Form.WATCHED
        if own_share:
            return Form.OWN_SHARE
        if world_size > 1 and not ranks_hold_the_same(loader):
            return Form.OWN_DATA
        return Form.EXACT

    def _is_own_share(self, source: Any, training: bool) -> bool:
        """Whether the loader gives this rank's share already."""
        if not self.are_ours:
            return True
        if not any(gives_a_share(sampler) for sampler in samplers_within(source)):
            return False
        # An evaluation is shared anew where that only mends what the sampler repeats or drops.
        return training or not deals_in_order(source)

    # Exact loaders

    def settle(self, loader: Any, found: ExactLoader, form: Form, trainer: Trainer) -> None:
        """Say who shares the data of a loader, and compare the shares that are not ours.

        Args:
            loader: As the user gave it.
            found: Its exact form.
            form: Of :meth:`form_of`.
            trainer: Has several ranks, or there is nothing to share.
        """
        if trainer.world_size == 1:
            return
        self._say_who_shares(loader, form, trainer)
        if form is not Form.EXACT:
            self._compare(found, trainer)

    def _say_who_shares(self, loader: Any, form: Form, trainer: Trainer) -> None:
        name = type(source_of(loader)).__name__
        if form is Form.EXACT:
            if trainer.training:
                self._lines.append(
                    f"each of the {trainer.world_size} ranks trains on its share of"
                    f" {name_of(loader)}."
                )
        elif form is Form.OWN_DATA:
            use = "trains on" if trainer.training else "evaluates"
            self._lines.append(
                f"the ranks hold different data in {name_of(loader)}: each {use} all of its own,"
                " and nothing is shared here. If all should hold the same, draw them with one"
                " seed."
            )
        elif not self.are_ours:
            self._say_that_nothing_is_shared()
        elif trainer.training:
            self._lines.append(
                f"{name} shares the training data among the ranks itself: its shares stay as they "
                "are."
            )
        else:
            self._lines.append(
                f"{name} shares the evaluation's data among the ranks itself: its shares stay as "
                "they are, with what it repeats or leaves out."
            )

    def _say_that_nothing_is_shared(self) -> None:
        self._lines.append(
            "--use_distributed_sampler false: every rank reads its loaders as they are; no data "
            "are shared here."
        )

    def _compare(self, loader: ExactLoader, trainer: Trainer) -> None:
        """A rank with more batches than another one would wait for it, without a word."""
        position = position_of(loader)
        # A loader's own __len__ may be longer than what it has.
        batches = gather_from_ranks(min(len(loader), len(position)))
        limit: Any = trainer.limit_train_batches
        if trainer.training and isinstance(limit, int):
            batches = [min(each, limit) for each in batches]
        position.ranks_agree = len(set(batches)) == 1
        if position.ranks_agree:
            return
        counts = ", ".join(map(str, batches))
        if trainer.training:
            raise UserError(
                f"--devices {trainer.world_size}: the ranks' own shares of the training data have "
                f"{counts} batches, and must have equally many. Share the data equally, or limit "
                f"the epoch with --limit_train_batches {min(batches)}."
            )
        self._lines.append(
            f"the ranks' own shares of an evaluation have {counts} batches: log with "
            "sync_dist=True, else its values are those of rank 0."
        )

    # Watched loaders

    def watched(self, loader: Any, stateful: Any, seed: int, trainer: Trainer) -> WatchedLoader:
        """A loader that is read as it is. With several ranks, which may have unequally many
        batches, it ends where the first of them does.

        Args:
            loader: As the user gave it.
            stateful: What has a state; None: nothing.
            seed: For random numbers.
            trainer: Says what the loader is for, and how many ranks there are.
        """
        if trainer.world_size == 1:
            return WatchedLoader(loader, stateful, seed)
        self._say_that_it_is_read_as_it_is(loader, stateful, trainer.training)
        # A step of training waits for all ranks, and where they share the weights, one of an
        # evaluation does.
        ends_together = trainer.training or isinstance(trainer.strategy, SHARDING)
        goes_on = self._goes_on_together if ends_together else self._goes_on_alone
        found = WatchedLoader(loader, stateful, seed, goes_on)
        lengths = gather_from_ranks(sized_len(loader))
        if None not in lengths:
            self._compare_lengths(found, lengths, ends_together)
        return found

    def _say_that_it_is_read_as_it_is(self, loader: Any, stateful: Any, training: bool) -> None:
        if not self.are_ours:
            self._say_that_nothing_is_shared()
        elif not training:
            self._lines.append(
                f"every rank reads {name_of(loader)} as it is: let it yield each rank its own "
                "part, and log with sync_dist=True."
            )
        elif stateful is None:
            self._lines.append(
                f"every rank reads {name_of(loader)} as it is: let it yield each rank its own part."
            )

    def _compare_lengths(
        self, loader: WatchedLoader, lengths: list[int], ends_together: bool
    ) -> None:
        """Let loaders with lengths of their own end together, where they must."""
        shortest = min(lengths)
        if shortest == max(lengths):
            return
        if shortest == 0:
            raise _no_data_on(lengths.index(0))
        if ends_together:
            loader.shortest = shortest
            counts = ", ".join(map(str, lengths))
            self._lines.append(
                f"the ranks' data have {counts} batches: an epoch ends after {shortest} for all"
                " ranks."
            )

    def _goes_on_together(self, done: int, has_one: bool) -> bool:
        """Whether every rank has a batch after ``done`` of this epoch.

        A rank with one more than the others would wait for them in its step, for ever.
        """
        if self.agree_on_next_batch is None:
            return has_one
        ranks = self.agree_on_next_batch(has_one)
        if ranks.rank_ended_early is None:
            return ranks.everywhere
        if not done:
            raise _no_data_on(ranks.rank_ended_early)
        if not self._said_uneven:
            self._said_uneven = True
            say(
                f"the data of rank {ranks.rank_ended_early} ended after {done} batches, before"
                " those of another rank: the epoch ends there for all ranks."
            )
        return False

    def _goes_on_alone(self, done: int, has_one: bool) -> bool:
        """Whether this rank has a batch after ``done`` of an evaluation: it reads all that it has.

        But a rank that has nothing logs nothing, and the others would wait for its values.
        """
        if self.agree_on_next_batch is not None and not done:
            rank = self.agree_on_next_batch(has_one).rank_ended_early
            if rank is not None:
                raise _no_data_on(rank)
        return has_one


def _no_data_on(rank: int) -> UserError:
    return UserError(
        f"rank {rank} has no batch of data that others have. Give each rank one or more, or use"
        " fewer devices."
    )


def ranks_hold_the_same(loader: DataLoader[Any]) -> bool:
    """Whether the data of a loader are the same on every rank, as far as can be seen at once."""
    first, *others = gather_from_ranks(held_data(loader))
    return all(is_alike(first, other) for other in others)
