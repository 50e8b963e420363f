"""Chooses the form in which a run's loaders are read, and puts them where training starts."""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import chain, repeat
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from unbroken import contract
from unbroken.errors import UserError
from unbroken.loading.batches import ExactBatches
from unbroken.loading.exact_loader import ExactLoader, exact_form, passes_of
from unbroken.loading.held_data import held_data, is_alike
from unbroken.loading.log_steps import SHARDING
from unbroken.loading.passes import Passes, Start
from unbroken.loading.proof import OTHER_SAMPLES, Proof, fault_of_next_epoch, proved
from unbroken.loading.repeating import gives_others_when_asked_again
from unbroken.loading.samplers import (
    SEEDABLE,
    deals_in_order,
    generators_of_order,
    gives_a_share,
    has_state,
    is_plain,
    is_stream,
    samplers_within,
    source_of,
)
from unbroken.loading.seeding import Seeds, seed_from
from unbroken.loading.watched_loader import WatchedLoader, live_loader
from unbroken.seams import Seams
from unbroken.stopping.ranks import of_all_ranks, of_rank_zero, say
from unbroken.stopping.stop import NextBatch


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


class ExactLoading:
    """Puts exact loaders in the place of a run's own, where Lightning lets the strategy process
    them.

    Args:
        seed: For order and random numbers of the data. None: it is what torch's generator would
            give next (see :meth:`settle_seed`).
        lines: Where to add what is to be said. None: a list of its own.
    """

    def __init__(self, seed: int | None = None, lines: list[str] | None = None) -> None:
        self.seed = seed
        # Whether torch's generator has yet to move on, as a plain loader lets it. With a given seed
        # it stays.
        self._is_to_draw = seed is None
        # Those of the training's loaders, by their number in an epoch.
        self.seeds: list[Seeds] = []
        self.start = Start()
        # Whether the data are shared among the ranks here. False: the user has done so
        # (use_distributed_sampler=False).
        self.shares = True
        # Whether training can start inside an epoch.
        self.starts_inside_epochs = True
        # What could not be made exact, and who shares the data; several loaders may say the same.
        self.lines: list[str] = [] if lines is None else lines
        self.training: list[Passes] = []
        # Whether Lightning reads before the module's hooks: it does so where a loader has no
        # length.
        self.read_early = False
        # Tells the other ranks whether this one has a further batch. None: they are not asked.
        self.next_batch: Callable[[bool], NextBatch] | None = None
        self._said_uneven = False
        # The epoch for which ``training`` was made.
        self._loaded_at: int | None = None
        # Whether it was made before, for another epoch.
        self._is_reloaded = False
        # What trials have shown, by the loader's number in an epoch and the name of what was tried.
        self._proofs: dict[tuple[int, str], Proof] = {}
        # The names of data sets that were fetched from twice.
        self._fetched_twice: set[str] = set()
        # The names of what validations read and was tried.
        self._tried_validations: set[str] = set()

    def install(self, seams: Seams, trainer: Trainer) -> None:
        """From now on the trainer's loaders pass through here."""
        seams.process_loaders(lambda loader: self.exact(loader, trainer))

    def settle_seed(self) -> int:
        """Take the seed that torch's generator would give next, unless there is one: a given one,
        or that of a checkpoint.

        It is rank zero's on all ranks, whose shares are then those of one order. The generator
        stays where it is, for the user's code may make its data from what comes next.
        """
        if self.seed is None:
            generator = torch.Generator()
            generator.set_state(torch.default_generator.get_state())
            self.seed = of_rank_zero(seed_from(generator))
        return self.seed

    def exact(self, loader: Any, trainer: Trainer) -> Any:
        """A loader in its exact form, or as it is where there is none."""
        run_seed = self.settle_seed()
        # A plain Trainer puts the generators back behind its sanity check.
        if self._is_to_draw and not trainer.sanity_checking:
            self._is_to_draw = False
            seed_from(torch.default_generator)
        training = trainer.training
        if training:
            self._expect_loaders_of(trainer.current_epoch, trainer)
        seeds = Seeds(run_seed, run_seed)
        if training:
            seeds = self._seeds_of_next(loader, run_seed)
        seed = seeds.order
        form = self._form_of(loader, training, trainer.world_size)
        if form is Form.EXACT and trainer.world_size > 1 and not ranks_hold_the_same(loader):
            form = Form.OWN_DATA
        found: Any
        passes: Passes
        if form is Form.WATCHED:
            passes = self._watched(loader, seed, trainer)
            found = live_loader(passes)
        else:
            found = exact_form(
                loader,
                training,
                seed,
                trainer.global_rank,
                trainer.world_size,
                own_share=form is not Form.EXACT,
            )
            passes = passes_of(found)
            self._note_order(source_of(loader), trainer)
            self._note_arrival(loader)
            self._note_a_set_with_a_state(found, trainer)
            if trainer.world_size > 1:
                self._note_shares(loader, form, trainer)
            if form is not Form.EXACT and trainer.world_size > 1:
                self._compare_shares(found, trainer)
        passes.seeds = seeds
        passes.epoch_now = lambda: trainer.current_epoch
        if training:
            passes.batches_now = lambda: batches_taken(trainer)
        if training:
            self._add(found, passes)
        return found

    def begin(self) -> None:
        """Put the loaders where training starts."""
        saved = self.start.loaders or self._places_of_states(self.start)
        places = chain(saved, repeat((0, None)))
        for passes, (first, state) in zip(self.training, places, strict=False):
            if state is not None and passes.owner is None and self.start.loaders:
                self.lines.append(
                    "the checkpoint holds a state of a loader that has none now: the resume is not"
                    " exact."
                )
                state = None
            passes.start_at(self.start, first, state)
        # Some were made before the checkpoint was read.
        for passes, seeds in zip(self.training, self.seeds, strict=False):
            passes.seeds = seeds

    def _places_of_states(self, start: Start) -> list[tuple[int, Any]]:
        """Where the loaders begin from a checkpoint that somebody else saved."""
        states = iter(start.states)
        places: list[tuple[int, Any]] = []
        for passes in self.training:
            state = next(states, None) if has_state(passes.loader) else None
            places.append((0, None) if state is None else (start.batches, state))
        return places

    def cut_again(self, kept: Sequence[dict[str, Any]]) -> None:
        """Let the training's loaders cut their batches as a checkpoint has it.

        Args:
            kept: Of each loader, what :meth:`Passes.kept_cut` returned.
        """
        for passes, cut in zip(self.training, kept, strict=False):
            passes.cut_again(cut)

    @property
    def samples_per_batch(self) -> int:
        """Samples per batch of the next pass of all ranks together, 0 where it is not known."""
        only = self._only_exact_loader()
        return 0 if only is None else only.global_batch_size

    @property
    def samples_per_batch_of_pass(self) -> int:
        """The same of the pass that is read."""
        only = self._only_exact_loader()
        return 0 if only is None else only.global_batch_size_of_pass

    def let_go(self) -> None:
        """The stage is over. Whoever copies what is left copies no Trainer with it."""
        self.next_batch = None
        for passes in self.training:
            passes.epoch_now = None
            passes.batches_now = None

    def _only_exact_loader(self) -> ExactBatches | None:
        if len(self.training) != 1 or not isinstance(self.training[0], ExactBatches):
            return None
        return self.training[0]

    def _expect_loaders_of(self, epoch: int, trainer: Trainer) -> None:
        """Forget the training loaders of an earlier epoch
        (``--reload_dataloaders_every_n_epochs``).
        """
        if self._loaded_at == epoch:
            return
        self._is_reloaded = self._loaded_at is not None
        self._loaded_at = epoch
        self.training = []
        reloads = trainer.reload_dataloaders_every_n_epochs > 0  # type: ignore[attr-defined]
        starts_with_epoch = not self.start.batches and not self.start.over
        # New loaders get no state of the ones before. Loaders of an earlier epoch than the one in
        # which training starts leave its place alone: a schedule that asks how many steps there are
        # loads before the counters of a checkpoint are restored.
        if epoch > self.start.epoch or (reloads and starts_with_epoch):
            self.start = Start(max(epoch, self.start.epoch))

    def _seeds_of_next(self, loader: Any, run_seed: int) -> Seeds:
        """The seeds of the training's next loader: of its own generators, where it has them, else
        of the run's seed, by which loaders side by side differ.

        They are rank zero's on all ranks, and those of an earlier epoch where the loaders are made
        anew.
        """
        number = len(self.training)
        if number == len(self.seeds):
            seed = hash((run_seed, number)) % 2**32 if number else run_seed
            mine = seeds_of(loader, seed)
            self.seeds.append(Seeds(*of_rank_zero(mine)))
        return self.seeds[number]

    def _form_of(self, loader: Any, training: bool, world_size: int) -> Form:
        if not is_plain(loader) or is_stream(loader.dataset):
            return Form.WATCHED
        source = source_of(loader)
        own_share = self._is_own_share(source, training)
        if sized_len(source) is not None:
            return Form.OWN_SHARE if own_share else Form.EXACT
        if world_size > 1 and not own_share:
            name = type(source).__name__
            raise UserError(
                f"--devices {world_size}: {name} has no length, so it cannot be shared by the "
                "ranks. Give it __len__, or use one device."
            )
        return Form.WATCHED

    def _is_own_share(self, source: Any, training: bool) -> bool:
        """Whether the loader gives this rank's share already."""
        if not self.shares:
            return True
        if not any(gives_a_share(sampler) for sampler in samplers_within(source)):
            return False
        # An evaluation is shared anew where that only mends what the sampler repeats or drops.
        return training or not deals_in_order(source)

    def _note_order(self, source: Any, trainer: Trainer) -> None:
        if trainer.training and not _has_known_order(source):
            self.lines.append(
                f"{type(source).__name__} has neither set_epoch nor state_dict: if it keeps its"
                " own random state, or is changed elsewhere than in on_train_epoch_start, a"
                " resumed run sees another order."
            )

    def _note_arrival(self, loader: Any) -> None:
        """Say so where batches come as workers have them ready, in an order that nobody knows."""
        if loader.num_workers > 1 and not loader.in_order:
            self.lines.append(
                f"a resume is not exact: {_name_of(loader)} is read with in_order=False, and gives"
                " the batch that is ready first."
            )

    def _note_a_set_with_a_state(self, loader: ExactLoader, trainer: Trainer) -> None:
        """Say so where samples depend on what was fetched before: no state of it is kept."""
        name = type(loader.dataset).__name__
        is_new = trainer.state.fn == "fit" and name not in self._fetched_twice
        if not is_new or trainer.global_rank != 0:
            return
        self._fetched_twice.add(name)
        if gives_others_when_asked_again(loader):
            self.lines.append(
                f"a resume is not exact: {name} gives other samples when the same are fetched"
                " again, because it keeps a state (such as a queue, a count or a generator). Let a"
                " sample be a function of its key and the epoch alone."
            )

    def _note_shares(self, loader: Any, form: Form, trainer: Trainer) -> None:
        """Say who shares the data among several ranks: we, or the user."""
        name = type(source_of(loader)).__name__
        if form is Form.EXACT:
            if trainer.training:
                self.lines.append(
                    f"each of the {trainer.world_size} ranks trains on its share of"
                    f" {_name_of(loader)}."
                )
        elif form is Form.OWN_DATA:
            use = "trains on" if trainer.training else "evaluates"
            self.lines.append(
                f"the ranks hold different data in {_name_of(loader)}: each {use} all of its own,"
                " and nothing is shared here. If all should hold the same, draw them with one"
                " seed."
            )
        elif not self.shares:
            self._note_that_nothing_is_shared()
        elif trainer.training:
            self.lines.append(
                f"{name} shares the training data among the ranks itself: its shares stay as they "
                "are."
            )
        else:
            self.lines.append(
                f"{name} shares the evaluation's data among the ranks itself: its shares stay as "
                "they are, with what it repeats or leaves out."
            )

    def _note_that_nothing_is_shared(self) -> None:
        self.lines.append(
            "--use_distributed_sampler false: every rank reads its loaders as they are; no data "
            "are shared here."
        )

    def _compare_shares(self, loader: ExactLoader, trainer: Trainer) -> None:
        """A rank with more batches than another one would wait for it, without a word."""
        passes = passes_of(loader)
        # A loader's own __len__ may be longer than what it has.
        batches = of_all_ranks(min(len(loader), len(passes)))
        limit: Any = trainer.limit_train_batches
        if trainer.training and isinstance(limit, int):
            batches = [min(each, limit) for each in batches]
        passes.ranks_agree = len(set(batches)) == 1
        if passes.ranks_agree:
            return
        counts = ", ".join(map(str, batches))
        if trainer.training:
            raise UserError(
                f"--devices {trainer.world_size}: the ranks' own shares of the training data have "
                f"{counts} batches, and must have equally many. Share the data equally, or limit "
                f"the epoch with --limit_train_batches {min(batches)}."
            )
        self.lines.append(
            f"the ranks' own shares of an evaluation have {counts} batches: log with "
            "sync_dist=True, else its values are those of rank 0."
        )

    def _watched(self, loader: Any, seed: int, trainer: Trainer) -> WatchedLoader:
        owner = None
        if trainer.training:
            owner = self._proved_owner(loader, seed, trainer)
            self._note_workers_that_live_on(loader)
        elif trainer.state.fn == "fit":
            self._note_validation_that_goes_on(loader, seed, trainer)
        if trainer.world_size == 1:
            found = WatchedLoader(loader, owner, seed)
        else:
            self._note_shares_of_watched(loader, owner, trainer.training)
            found = self._ending_together(loader, owner, seed, trainer)
        # A further loader of the same training was asked for at the start of an epoch.
        found.may_be_begun_twice = trainer.training and self._is_reloaded
        return found

    def _ending_together(
        self, loader: Any, owner: Any, seed: int, trainer: Trainer
    ) -> WatchedLoader:
        """A loader of several ranks, which may have unequally many batches."""
        # A step of training waits for all ranks, and where they share the weights, one of an
        # evaluation does.
        ends_together = trainer.training or isinstance(trainer.strategy, SHARDING)
        goes_on = self._goes_on_together if ends_together else self._goes_on_alone
        found = WatchedLoader(loader, owner, seed, goes_on)
        lengths = of_all_ranks(sized_len(loader))
        if None not in lengths:
            self._compare_lengths(found, lengths, ends_together)
        return found

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
            self.lines.append(
                f"the ranks' data have {counts} batches: an epoch ends after {shortest} for all"
                " ranks."
            )

    def _goes_on_together(self, done: int, has_one: bool) -> bool:
        """Whether every rank has a batch after ``done`` of this epoch.

        A rank with one more than the others would wait for them in its step, for ever.
        """
        if self.next_batch is None:
            return has_one
        ranks = self.next_batch(has_one)
        if ranks.ended_early is None:
            return ranks.everywhere
        if not done:
            raise _no_data_on(ranks.ended_early)
        if not self._said_uneven:
            self._said_uneven = True
            say(
                f"the data of rank {ranks.ended_early} ended after {done} batches, before those of"
                " another rank: the epoch ends there for all ranks."
            )
        return False

    def _goes_on_alone(self, done: int, has_one: bool) -> bool:
        """Whether this rank has a batch after ``done`` of an evaluation: it reads all that it has.

        But a rank that has nothing logs nothing, and the others would wait for its values.
        """
        if self.next_batch is not None and not done:
            rank = self.next_batch(has_one).ended_early
            if rank is not None:
                raise _no_data_on(rank)
        return has_one

    def _proved_owner(self, loader: Any, seed: int, trainer: Trainer) -> Any:
        """What has a state that is worth keeping, or None. What is not exact is noted."""
        owner, fault = _claimed_owner(loader)
        name = _name_of(loader) if owner is None else type(owner).__name__
        place = (len(self.training), name)
        if place in self._proofs:
            # A loader of an earlier epoch was tried. Each trial takes a moment.
            proof = self._proofs[place]
            return owner if proof.owner is not None else None
        batches = _batches_of_epoch(trainer.limit_train_batches, loader)
        proof = proved(loader, owner, fault, seed, batches)
        self._proofs[place] = proof
        # Ranks save together: one that cannot start inside an epoch decides for all.
        faults = [each for each in of_all_ranks(proof.fault) if each is not None]
        if faults:
            self.starts_inside_epochs = False
            self.lines.append(
                f"the training data come from {name}, {faults[0]}: a resumed run goes on from the "
                "last epoch's end."
            )
        if proof.next_fault == OTHER_SAMPLES:
            self.lines.append(
                f"a resume is not exact: {name} {OTHER_SAMPLES} (it may draw from a random "
                "generator of its own, or count its epochs itself)."
            )
        elif proof.next_fault is not None:
            self.lines.append(f"a resume may not be exact: {name} {proof.next_fault}.")
        return proof.owner

    def _note_workers_that_live_on(self, loader: Any) -> None:
        is_own_loader = isinstance(loader, DataLoader) and not is_plain(loader)
        if is_own_loader and loader.persistent_workers:
            self.lines.append(
                f"the workers of {_name_of(loader)} outlive an epoch: if they draw random numbers, "
                "a resumed run sees others."
            )

    def _note_validation_that_goes_on(self, loader: Any, seed: int, trainer: Trainer) -> None:
        """Say it where a validation's samples depend on the validations before: no state of them
        is kept.
        """
        name = _name_of(loader)
        if name in self._tried_validations:
            return
        self._tried_validations.add(name)
        batches = _batches_of_epoch(trainer.limit_val_batches, loader)
        fault = fault_of_next_epoch(loader, None, seed, batches)
        if fault == OTHER_SAMPLES:
            self.lines.append(
                f"the validations of a resumed run are not exact: {name} {OTHER_SAMPLES} (it may go"
                " on from one validation to the next, or draw from a random generator of its own)."
            )

    def _note_shares_of_watched(self, loader: Any, owner: Any, training: bool) -> None:
        if not self.shares:
            self._note_that_nothing_is_shared()
        elif not training:
            self.lines.append(
                f"every rank reads {_name_of(loader)} as it is: let it yield each rank its own "
                "part, and log with sync_dist=True."
            )
        elif owner is None:
            self.lines.append(
                f"every rank reads {_name_of(loader)} as it is: let it yield each rank its own "
                "part."
            )

    def _add(self, loader: Any, passes: Passes) -> None:
        """Take up a loader of this epoch's training, and what is read of it."""
        self.training.append(passes)
        self.read_early = self.read_early or sized_len(loader) is None
        if self.read_early:
            self.begin()
        for each in self.training:
            each.cycles = len(self.training) > 1


def _no_data_on(rank: int) -> UserError:
    return UserError(
        f"rank {rank} has no batch of data that others have. Give each rank one or more, or use"
        " fewer devices."
    )


def batches_taken(trainer: Trainer) -> int:
    """How many batches of this epoch training has begun with."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def ranks_hold_the_same(loader: DataLoader[Any]) -> bool:
    """Whether the data of a loader are the same on every rank, as far as can be seen at once."""
    first, *others = of_all_ranks(held_data(loader))
    return all(is_alike(first, other) for other in others)


def seeds_of(loader: Any, seed: int) -> Seeds:
    """The seeds of a loader, drawn from its own generators where it has them, as PyTorch does.

    Args:
        loader: As the user gave it.
        seed: For what has no generator of its own.
    """
    if not isinstance(loader, DataLoader):
        return Seeds(seed, seed)
    draws = seed if loader.generator is None else seed_from(loader.generator)
    generators = generators_of_order(source_of(loader))
    if not generators:
        return Seeds(seed, draws)
    # A loader that shuffles gives its generator to its sampler.
    is_same = generators[0] is loader.generator
    return Seeds(draws if is_same else seed_from(generators[0]), draws)


def _has_known_order(source: Any) -> bool:
    """Whether the order of a sampler is a function of seed and epoch, or its state is kept."""
    is_by_epoch = isinstance(source, contract.OrdersByEpoch)
    return isinstance(source, SEEDABLE) or is_by_epoch or has_state(source)


def _name_of(loader: Any) -> str:
    """The name of the class that decides what is read: an own loader's, else the dataset's."""
    is_own_loader = isinstance(loader, DataLoader) and not is_plain(loader)
    if is_own_loader or not hasattr(loader, "dataset"):
        return type(loader).__name__
    return type(loader.dataset).__name__


def _batches_of_epoch(limit: Any, loader: Any) -> int | None:
    """How many batches of a loader an epoch reads; None: all, or it is not known.

    ``limit`` is the Trainer's ``limit_train_batches`` or ``limit_val_batches``.
    """
    if isinstance(limit, int):
        return limit
    length = sized_len(loader)
    if limit is None or limit == 1.0 or length is None:
        return None
    return int(length * limit)


def _claimed_owner(loader: Any) -> tuple[Any, str | None]:
    """What says that it has a state, or None and why nothing does."""
    if has_state(loader):
        return loader, None
    dataset = getattr(loader, "dataset", None)
    if not has_state(dataset):
        return None, "which has no state_dict"
    if getattr(loader, "num_workers", 0):
        # With workers the datasets that count are theirs.
        return None, "whose state is in its worker processes and cannot be had"
    return dataset, None
