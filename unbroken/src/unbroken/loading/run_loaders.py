"""Puts exact loaders in the place of a run's own, and puts them where training starts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from unbroken.lightning_internals import unwrap_classes_of_loaders
from unbroken.loading.batches import ExactBatches
from unbroken.loading.exact_loader import exact_form, position_of
from unbroken.loading.faults import Faults
from unbroken.loading.position import DataStart, LoaderPosition
from unbroken.loading.samplers import generators_of_order, has_state, source_of
from unbroken.loading.seeding import Seeds, seed_from
from unbroken.loading.shares import Form, Shares
from unbroken.loading.watched_loader import WatchedLoader, live_loader
from unbroken.seams import Seams
from unbroken.stopping.ranks import broadcast_from_rank_zero


class RunLoaders:
    """Puts exact loaders in the place of a run's own, where Lightning lets the strategy process
    them.

    Args:
        seed: For order and random numbers of the data. None: it is what torch's generator would
            give next (see :meth:`settle_seed`).
        lines: Where to add what is to be said, such as what could not be made exact. None: a list
            of its own.

    Attributes:
        seeds: Those of the training's loaders, in the order in which Lightning makes them.
        data_start: Where in its data training starts.
        shares: Who shares the data among the ranks.
        can_start_inside_epochs: Whether training can start inside an epoch.
        positions: Where training is in each of its loaders of this epoch.
        loaded_at: The epoch for which these loaders were made. None: there are none yet.
        read_early: Whether Lightning reads before the module's hooks: it does so where a loader has
            no length. What that draws is undone: a resumed run gives its generators back later.
    """

    def __init__(self, seed: int | None = None, lines: list[str] | None = None) -> None:
        self.seed = seed
        self.lines: list[str] = [] if lines is None else lines
        self.seeds: list[Seeds] = []
        self.data_start = DataStart()
        self.shares = Shares(self.lines)
        self.can_start_inside_epochs = True
        self.positions: list[LoaderPosition] = []
        self.loaded_at: int | None = None
        self.read_early = False
        self._faults = Faults(self.lines)
        # A plain loader draws once from torch's generator as it is made. Whether that draw is still
        # to be done; with a given seed it is not.
        self._is_to_draw = seed is None
        # Whether training's loaders are made anew for later epochs, and whether these were.
        self._reloads = False
        self._is_reloaded = False
        # Whether a resumed run calls the hooks of the training's start again. They may look at
        # batches: at those of the first epoch, as in the run's first start.
        self._starts_again = False

    def resume_at(self, start: DataStart) -> None:
        """A checkpoint was read: training will start there, after the hooks of its start."""
        self.data_start = start
        self._starts_again = True

    def hooks_of_start_are_done(self) -> None:
        """From now on whoever reads a loader gets batches of the Trainer's epoch."""
        self._starts_again = False

    def install(self, seams: Seams, trainer: Trainer) -> None:
        """From now on the trainer's loaders pass through here."""
        unwrap_classes_of_loaders()
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
            self.seed = broadcast_from_rank_zero(seed_from(generator))
        return self.seed

    def exact(self, loader: Any, trainer: Trainer) -> Any:
        """A loader in its exact form, or watched where there is none."""
        run_seed = self.settle_seed()
        # A plain Trainer puts the generators back after its sanity check.
        if self._is_to_draw and not trainer.sanity_checking:
            self._is_to_draw = False
            seed_from(torch.default_generator)
        seeds = Seeds(run_seed, run_seed)
        if trainer.training:
            self._expect_loaders_of(trainer.current_epoch, trainer)
            seeds = self._seeds_of_next(loader, run_seed)
        form = self.shares.form_of(loader, trainer.training, trainer.world_size)
        found: Any
        if form is Form.WATCHED:
            found = live_loader(self._watched(loader, seeds.order, trainer))
        else:
            found = exact_form(
                loader,
                trainer.training,
                seeds.order,
                trainer.global_rank,
                trainer.world_size,
                own_share=form is not Form.EXACT,
            )
            if not self._faults.look_at(loader, found, trainer):
                self.can_start_inside_epochs = False
            self.shares.settle(loader, found, form, trainer)
        position = position_of(found)
        position.seeds = seeds
        position.epoch_now = lambda: 0 if self._starts_again else trainer.current_epoch
        if trainer.training:
            position.batches_now = lambda: batches_taken(trainer)
            self._add(found, position)
        return found

    def _watched(self, loader: Any, seed: int, trainer: Trainer) -> WatchedLoader:
        stateful = None
        if trainer.training:
            proof = self._faults.try_training(loader, len(self.positions), seed, trainer)
            stateful = proof.stateful
            if proof.fault is not None:
                self.can_start_inside_epochs = False
        elif trainer.state.fn == "fit":
            self._faults.try_validation(loader, seed, trainer)
        found = self.shares.watched(loader, stateful, seed, trainer)
        # A further loader of the same training was asked for at the start of an epoch.
        found.may_be_begun_twice = trainer.training and self._is_reloaded
        return found

    def _expect_loaders_of(self, epoch: int, trainer: Trainer) -> None:
        """Forget the training loaders of an earlier epoch
        (``--reload_dataloaders_every_n_epochs``).
        """
        if self.loaded_at == epoch:
            return
        self._is_reloaded = self.loaded_at is not None
        self.loaded_at = epoch
        self.positions = []
        reloads = trainer.reload_dataloaders_every_n_epochs > 0  # type: ignore[attr-defined]
        self._reloads = reloads
        starts_with_epoch = not self.data_start.batches and not self.data_start.epoch_is_trained
        # Loaders of a later epoch begin at its first batch. Those of an earlier one leave the place
        # where training starts alone: a schedule that asks how many steps there are loads before
        # the counters of a checkpoint are restored.
        if epoch > self.data_start.epoch or (reloads and starts_with_epoch):
            self.data_start = DataStart(max(epoch, self.data_start.epoch))

    def _seeds_of_next(self, loader: Any, run_seed: int) -> Seeds:
        """The seeds of the training's next loader: of its own generators, where it has them, else
        of the run's seed, by which loaders side by side differ.

        They are rank zero's on all ranks. Loaders that are made anew for an epoch keep the seeds of
        the first ones.
        """
        number = len(self.positions)
        if number == len(self.seeds):
            seed = hash((run_seed, number)) % 2**32 if number else run_seed
            mine = seeds_of(loader, seed)
            self.seeds.append(Seeds(*broadcast_from_rank_zero(mine)))
        return self.seeds[number]

    def _add(self, loader: Any, position: LoaderPosition) -> None:
        """Take up a loader of this epoch's training, and what is read of it."""
        self.positions.append(position)
        self.read_early = self.read_early or sized_len(loader) is None
        if self.read_early:
            # Lightning reads them before the hooks of the start.
            self._starts_again = False
            self.begin()
        for each in self.positions:
            each.cycles = len(self.positions) > 1

    def resume_only_between_epochs(self, reason: str | None) -> None:
        """Let training start inside no epoch, if there is a reason; a line tells it."""
        if reason is not None:
            self.can_start_inside_epochs = False
            self.lines.append(reason)

    # Where training starts

    def begin(self) -> None:
        """Put the loaders where training starts."""
        saved = self.data_start.loader_states or self._places_of_states(self.data_start)
        places = chain(saved, repeat((0, None)))
        for position, (batches_before, state) in zip(self.positions, places, strict=False):
            if state is not None and self.data_start.loader_states:
                told = position.what_is_made_otherwise(state, self._reloads)
                if told is not None:
                    self.lines.append(f"{told}: the resume is not exact.")
                if not position.takes_state:
                    state = None
            position.start_at(self.data_start, batches_before, state)
        # Some were made before the checkpoint was read.
        for position, seeds in zip(self.positions, self.seeds, strict=False):
            position.seeds = seeds

    def draw_again(self) -> None:
        """Draw the orders of the passes that a run resumes in, unless they were drawn as a loader
        was read early.
        """
        if self.read_early:
            return
        for position in self.positions:
            told = position.draw_again()
            if told is not None:
                self.lines.append(f"{told}: the resume is not exact.")

    def return_to_save(self) -> None:
        """Let samplers hold what they held at the save, whatever ``set_epoch`` has drawn since."""
        for position in self.positions:
            position.return_to_save()

    def _places_of_states(self, start: DataStart) -> list[tuple[int, Any]]:
        """Where the loaders begin from a checkpoint that somebody else saved."""
        states = iter(start.lightnings_states)
        places: list[tuple[int, Any]] = []
        for position in self.positions:
            state = next(states, None) if has_state(position.loader) else None
            places.append((0, None) if state is None else (start.batches, state))
        return places

    def epoch_ends(self, trainer: Trainer) -> None:
        """Tell the loaders after how many batches the training of this epoch is done."""
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        for position in self.positions:
            position.end_epoch(done)

    @contextmanager
    def unasked(self) -> Iterator[None]:
        """Inside, Lightning finds no states of loaders."""
        for position in self.positions:
            position.is_asked = False
        try:
            yield
        finally:
            for position in self.positions:
                position.is_asked = True

    def cut_again(self, kept: Sequence[dict[str, Any]]) -> None:
        """Let the training's loaders cut their batches as a checkpoint has it.

        Args:
            kept: Of each loader, what :meth:`LoaderPosition.kept_cut` returned.
        """
        for position, cut in zip(self.positions, kept, strict=False):
            position.cut_again(cut)

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

    def _only_exact_loader(self) -> ExactBatches | None:
        if len(self.positions) != 1 or not isinstance(self.positions[0], ExactBatches):
            return None
        return self.positions[0]

    def let_go(self) -> None:
        """The stage is over. Whoever copies what is left copies no Trainer with it."""
        self.shares.agree_on_next_batch = None
        for position in self.positions:
            position.epoch_now = None
            position.batches_now = None


def batches_taken(trainer: Trainer) -> int:
    """How many batches of this epoch training has begun with."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


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
