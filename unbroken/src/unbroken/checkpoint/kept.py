"""What a checkpoint holds beyond Lightning's own: the list of parts, what they note at a training's
start, and how they are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from unbroken.checkpoint.following import Following
from unbroken.checkpoint.snapshot import Snapshot
from unbroken.loading import RunLoaders
from unbroken.loading.own_generators import put_back
from unbroken.parts.before_hooks_of_epoch import BeforeHooksOfEpoch, MakersOfLoaders
from unbroken.parts.chain import BitsInMemory, Chain, OpenWindow
from unbroken.parts.generators import (
    OwnGenerators,
    RandomGenerators,
    random_state,
    restore_random_state,
)
from unbroken.parts.hyperparameters import StartingHyperparameters
from unbroken.parts.loaders import BatchSizes, DataSets, LoaderStates, ValidationSamples
from unbroken.parts.loops import (
    BETWEEN_EPOCHS,
    EarlyStop,
    SavePoint,
    ValidatedBatches,
    WasValidated,
)
from unbroken.parts.metrics import (
    CallbackMetrics,
    LoggedMetrics,
    LoggedSums,
    MetricStates,
    ModuleSums,
    ProgressBarMetrics,
)
from unbroken.parts.module import (
    EvalModes,
    FilledBuffers,
    FrozenParameters,
    Gradients,
    PlainBuffers,
    Switches,
    Toggled,
    UntrackedStatistics,
    saves_its_own_way,
)
from unbroken.parts.part import Part
from unbroken.parts.trainer_settings import TrainerSettings
from unbroken.parts.users_objects import UsersObjects
from unbroken.stopping.ranks import gather_from_ranks, say
from unbroken.storage.contents import record_in


class KeptParts:
    """What a checkpoint holds beyond Lightning's own.

    Args:
        loading: The loaders of this training, and where it starts in them.
        followed: The metric that is followed. A checkpoint holds of it whether validations log it.
        further: The user's own parts.
        undeclared: Whether state is kept that nobody has declared.
    """

    def __init__(
        self,
        loading: RunLoaders,
        followed: Following,
        further: Sequence[Part],
        undeclared: bool,
    ) -> None:
        self.followed = followed
        self.chain = Chain()
        self.open_window = OpenWindow()
        self.bits_in_memory = BitsInMemory()
        self.hyperparameters = StartingHyperparameters()
        self.buffers = PlainBuffers()
        self.settings = TrainerSettings()
        self.objects = UsersObjects(undeclared)
        self.generators: list[Part] = [OwnGenerators(self.objects), RandomGenerators()]
        makers = MakersOfLoaders(self.objects)
        self.before_hooks_of_epoch = BeforeHooksOfEpoch(makers, self.generators)
        self.was_validated = WasValidated()
        self._loading = loading
        self._positions = LoaderStates(loading)
        self.data_sets = DataSets(loading)
        self.validation_samples = ValidationSamples()
        # They are taken in this order, the generators last, when ``without_a_trace`` has ended.
        # They are given back in the same order, but those with files last (restoring.py).
        self.all: list[Part] = [
            # A module's own sums come first: to ask for them may add uncounted batches to its
            # metrics.
            ModuleSums(),
            MetricStates(),
            LoggedSums(),
            CallbackMetrics(),
            LoggedMetrics(),
            ProgressBarMetrics(),
            ValidatedBatches(),
            self.was_validated,
            followed,
            self._positions,
            BatchSizes(self._positions),
            self.data_sets,
            self.validation_samples,
            FilledBuffers(self.buffers),
            self.buffers,
            FrozenParameters(),
            Toggled(),
            EvalModes(),
            UntrackedStatistics(),
            self.hyperparameters,
            self.settings,
            EarlyStop(),
            self.objects,
            # They belong to what the objects hold by then.
            Gradients(self.objects),
            self.open_window,
            self.chain,
            self.bits_in_memory,
            self.before_hooks_of_epoch,
            *further,
            # The generators come last of those in memory: to give back another part may draw a
            # random number.
            *self.generators,
        ]

    def fit_starts(self, trainer: Trainer, module: LightningModule) -> None:
        """Note what this start has made, before a checkpoint's optimizers and parts come (but for
        what loaders need of the user's objects, which is given back early). The weights of a
        resumed run are loaded already (but FSDP and DeepSpeed load them after this).
        """
        self.hyperparameters.begin(trainer)
        self.settings.fit_starts(trainer)
        self.buffers.begin(module)
        self.objects.fit_starts(trainer)
        for part in self.all:
            if isinstance(part, Switches):
                part.begin(trainer)

    def take(self, trainer: Trainer, place: SavePoint) -> Snapshot:
        """Every part, as it is now."""
        self._note_whether_epoch_is_over(trainer, place)
        snapshot = Snapshot(place)
        self._add(snapshot, trainer, self.all)
        return snapshot

    def _add(self, snapshot: Snapshot, trainer: Trainer, parts: Sequence[Part]) -> None:
        """Take parts, those of the generators last: :meth:`without_a_trace` has put the generators
        back by then, whatever was drawn as the other parts were taken.
        """
        with self.without_a_trace(trainer):
            snapshot.add(trainer, [part for part in parts if part not in self.generators])
        snapshot.add(trainer, [part for part in parts if part in self.generators])

    @contextmanager
    def without_a_trace(self, trainer: Trainer) -> Iterator[None]:
        """Inside, the user's code may be asked for states without a trace in the training: it draws
        the same random numbers, and reads the same batches, as if it had not been asked.

        Random numbers that are drawn are put back. Lightning asks no loader for its state: some
        begin an iteration as they are asked, and this library keeps the states of loaders itself.
        """
        device = trainer.strategy.root_device
        before = random_state(device)
        try:
            with put_back(self.objects.held.generators.values()), self._loading.unasked():
                yield
        finally:
            restore_random_state(before, device)

    def take_before_validation(self, trainer: Trainer) -> Snapshot:
        """What the validation that begins may change. If the run is stopped inside it,
        :meth:`add_unchanged` takes the other parts.
        """
        self._note_whether_epoch_is_over(trainer, "validation")
        snapshot = Snapshot("validation")
        self._add(snapshot, trainer, [part for part in self.all if part.changes_in_validation])
        with self.without_a_trace(trainer):
            snapshot.add_entries(trainer)
        return snapshot

    def return_objects_to(self, trainer: Trainer, snapshot: Snapshot) -> None:
        """Let what the user's objects hold, and all generators, be as at a snapshot that was taken
        in this training: where a validation was cut, the stop is as if it had not begun.
        """
        self.objects.return_to(trainer, snapshot.mine[self.objects.name])
        for part in self.generators:
            part.give_back(trainer, snapshot.mine[part.name])

    def add_unchanged(self, trainer: Trainer, snapshot: Snapshot) -> None:
        """Take the parts that no validation changes, for a stop inside one."""
        self._add(snapshot, trainer, [part for part in self.all if not part.changes_in_validation])

    def flush(self) -> None:
        """Bring to the disk what parts refer to, before a checkpoint is written."""
        for part in self.all:
            part.flush()

    def state_of(self, snapshot: Snapshot, group: Any) -> dict[str, Any]:
        """What a checkpoint holds of a snapshot: the parts of every rank, and those that are of
        all. Every rank must call it.
        """
        loading = self._loading
        size = loading.samples_per_batch_of_pass
        if snapshot.place == BETWEEN_EPOCHS:
            size = loading.samples_per_batch
        return {
            "place": snapshot.place,
            "ranks": gather_from_ranks(snapshot.mine, group),
            "samples_per_batch": size,
            "seed": loading.seed,
            "seeds": [list(each) for each in loading.seeds],
            **snapshot.shared,
        }

    def add_weights_left_out(
        self, trainer: Trainer, snapshot: Snapshot, checkpoint: dict[str, Any]
    ) -> None:
        """Add to a checkpoint what the user's own hooks have left out of its weights. It is the
        same on all ranks, as other weights are.
        """
        module = trainer.lightning_module
        loads_in_parts = trainer.strategy.restore_checkpoint_after_setup
        if loads_in_parts or not saves_its_own_way(module):
            return
        buffers, lines = self.buffers.left_out_by_users(module, checkpoint["state_dict"])
        say(*lines)
        # Those of the moment of the snapshot count.
        before = snapshot.entries.get("state_dict", {})
        for rank in record_in(checkpoint)["state"]["ranks"]:
            mine = rank[self.buffers.name]
            for name, value in buffers.items():
                mine.setdefault(name, before.get(name, value))

    def _note_whether_epoch_is_over(self, trainer: Trainer, place: SavePoint) -> None:
        """Tell the loaders whether this epoch's training is done: their next batch is then of the
        next epoch.
        """
        after_the_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        in_last_validation = place == "validation" and after_the_last
        self._positions.epoch_is_over = place == BETWEEN_EPOCHS or in_last_validation
