"""Where training is in its loaders, and how they cut their batches."""

from typing import Any

from lightning.pytorch import Trainer
from unbroken.holding.walk import loaders_in
from unbroken.loading import LoaderPosition, RunLoaders
from unbroken.loading.held_data import outline_of_samples
from unbroken.parts.held import declares_state
from unbroken.parts.part import Note


class LoaderStates(Note):
    """For each loader of the training: the state of the loader or its sampler, and the batch at
    which it was taken. How far training is stands in Lightning's own counters.

    :class:`unbroken.checkpoint.restoring.Restoring` hands them to
    :class:`unbroken.loading.RunLoaders` as the checkpoint is read, because a loader may be asked
    for its first batch before training starts.
    """

    name = "loaders"

    def __init__(self, loading: RunLoaders) -> None:
        self.loading = loading
        # Whether the epoch's training is done, so that the next pass is of the next epoch.
        self.epoch_is_over = False

    def take(self, trainer: Trainer) -> list[tuple[int, Any]]:
        done = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        return [
            each.state_to_start_after(done, self.epoch_is_over) for each in self.loading.positions
        ]


class BatchSizes(Note):
    """For each loader of the training: the size of its batches and ``drop_last``, as the loader was
    made, in the pass that is read, and in the next one. ``batch_sampler.batch_size`` may be changed
    in training.

    :class:`unbroken.checkpoint.restoring.Restoring` tells the loaders where the hooks of the
    epoch's start have been called again, before batches are counted.
    """

    name = "batch_sizes"

    def __init__(self, positions: LoaderStates) -> None:
        self.positions = positions

    def take(self, trainer: Trainer) -> list[dict[str, Any]]:
        epoch_is_over = self.positions.epoch_is_over
        return [each.kept_cut(epoch_is_over) for each in self.positions.loading.positions]


class DataSets(Note):
    """What the training's data sets hold, as far as it is seen without asking for a sample: as
    training began with them, and now.

    The user's code makes them. A split that it draws anew at each start trains on what was held out
    before: :meth:`others` tells. Labels that hooks write between two epochs are those of the start
    in a resumed run: :meth:`lines_of_changed` tells. While batches are fetched a cache may fill,
    which changes no sample.
    """

    name = "data_sets"
    changes_in_validation = False

    def __init__(self, loading: RunLoaders) -> None:
        self.loading = loading
        self._begun: list[Any] = []
        # As the latest epoch's batches were done: each loader, and its outline.
        self._at_end: list[tuple[LoaderPosition, Any]] = []
        self._told: set[int] = set()

    def begin(self) -> None:
        """Note what is there as training starts, or begins an epoch that has loaders of its own."""
        self._begun = self._look()

    def take(self, trainer: Trainer) -> dict[str, Any]:
        return {"begun": self._begun, "now": self._look()}

    def others(self, saved: dict[str, Any]) -> list[str]:
        """The names of data sets with other samples than at the save, and than at the start before
        it: those that training changes, such as a cache, begin as they did then. The hooks of an
        epoch's start were called again, and may have put others there.
        """
        found: list[str] = []
        of_start = zip(saved["begun"], saved["now"], self._begun, strict=False)
        for (begun, before, start), now in zip(of_start, self._look(), strict=False):
            is_as_long = begun[:-1] == before[:-1] == start[:-1]
            is_set_otherwise = now != start and now != before
            if is_as_long and (start not in (begun, before) or is_set_otherwise):
                found.append(now[0])
        return found

    def epoch_ends(self) -> None:
        """Note what is there when all batches of an epoch are done."""
        self._at_end = list(zip(self.loading.positions, self._look(), strict=True))

    def lines_of_changed(self) -> list[str]:
        """A line for each data set that holds other samples as an epoch starts than as the epoch
        before ended. Loaders that were made anew have others by intent, and a checkpoint holds what
        a data set declares.
        """
        found: list[str] = []
        if not self._at_end:
            return found
        now = dict(zip(map(id, self.loading.positions), self._look(), strict=True))
        for number, (position, before) in enumerate(self._at_end):
            is_kept = declares_its_samples(position.loader)
            is_changed = now.get(id(position), before) != before
            if is_changed and not is_kept and number not in self._told:
                self._told.add(number)
                found.append(
                    f"a resume may not be exact: training changes what {before[0]} holds between"
                    " two epochs, and a checkpoint does not hold it. Keep that in an attribute of"
                    " the data module, which a checkpoint holds, and let the data set read it"
                    " there."
                )
        self._at_end = []
        return found

    def _look(self) -> list[Any]:
        return [outline_of_samples(position.loader) for position in self.loading.positions]


def declares_its_samples(loader: Any) -> bool:
    """Whether the data set of a loader, or one within it, declares a state."""
    dataset = getattr(loader, "dataset", None)
    while dataset is not None and not declares_state(dataset):
        dataset = getattr(dataset, "dataset", None)
    return dataset is not None


class ValidationSamples(Note):
    """Which samples a validation reads: the Trainer's limit, and what the data sets hold, as
    training began and now.

    A metric that was measured with other samples cannot be compared with one that is measured from
    here: :meth:`differs` tells.
    """

    name = "validation_samples"
    changes_in_validation = False

    def __init__(self) -> None:
        self._begun: dict[str, Any] = {}

    def begin(self, trainer: Trainer) -> None:
        """Note what is there as training starts."""
        self._begun = self._look(trainer)

    def take(self, trainer: Trainer) -> dict[str, Any]:
        return {"begun": self._begun, "now": self._look(trainer)}

    def differs(self, saved: dict[str, Any]) -> bool:
        """Whether validations read other samples than at the save, and than at the start before
        it: where training changes them, a resumed run begins with those that it began with then.
        """
        for kind, mine in self._begun.items():
            theirs = [saved[moment][kind] for moment in ("begun", "now")]
            known = [each for each in theirs if each is not None]
            if mine is not None and known and mine not in known:
                return True
        return False

    def _look(self, trainer: Trainer) -> dict[str, Any]:
        """The limit, and an outline of each data set; None for what is not known."""
        if not trainer.enable_validation:
            return {"limit": None, "data_sets": None}
        data_sets = None
        # Where they are made anew, the data sets of the next epoch may be others by intent.
        if not trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            loaders = loaders_in(trainer.val_dataloaders)
            # There are none before the first epoch that validates.
            data_sets = [outline_of_samples(loader) for _, loader in loaders] or None
        # 1 is one batch, and 1.0 all of them.
        return {"limit": repr(trainer.limit_val_batches), "data_sets": data_sets}
