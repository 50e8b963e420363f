"""The objects that keep the promises of one training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken.checkpoint.cut_epoch import CutEpoch
from unbroken.checkpoint.ending import Ending
from unbroken.checkpoint.following import Best, Following
from unbroken.checkpoint.interval import Interval
from unbroken.checkpoint.kept import KeptParts
from unbroken.checkpoint.own_folder import OwnFolder
from unbroken.checkpoint.restoring import Restoring
from unbroken.checkpoint.saving import Saving
from unbroken.checkpoint.shared_metrics import UnsharedValues
from unbroken.checkpoint.validation import Validation
from unbroken.checkpoint.windows import Windows
from unbroken.chosen import Chosen
from unbroken.loading import RunLoaders
from unbroken.parts.part import Part
from unbroken.stopping.agreement import Agreement


@dataclass(frozen=True)
class Settings:
    """What the user of :class:`ExactCheckpoint` has given it, for every training."""

    interval: Interval
    further_parts: Sequence[Part]
    changed: bool
    seed: int | None
    chosen: Chosen
    undeclared: bool
    # Under which name a checkpoint holds the state of the best.
    best_key: str


class Engine:
    """One training's objects. The next training has others, but for those that it is given.

    Args:
        own_folder: The folder of the run.
        agreement: What the ranks agree on: to stop, to save, or nothing.
        ending: How the run ends when it is asked to stop.
        best: The best so far.
        settings: What the user has given.
    """

    def __init__(
        self,
        own_folder: OwnFolder,
        agreement: Agreement,
        ending: Ending,
        best: Best,
        settings: Settings,
    ) -> None:
        self.own_folder = own_folder
        self.agreement = agreement
        self.ending = ending
        self.best = best
        # What is said as training starts: what is not exact, what is assumed, who shares the data.
        self.lines: list[str] = []
        self.chosen = settings.chosen
        self.unshared_values = UnsharedValues()
        self.loading = RunLoaders(settings.seed, self.lines)
        self.following = Following(best)
        self.kept = KeptParts(
            self.loading,
            self.following,
            settings.further_parts,
            settings.undeclared,
        )
        self.windows = Windows(self.kept, agreement)
        self.validation = Validation(self.kept)
        self.cut_epoch = CutEpoch(self.kept)
        self.saving = Saving(
            own_folder,
            settings.interval,
            self.kept,
            self.following,
            agreement,
            ending,
            self.cut_epoch,
            self.loading,
            settings.chosen,
        )
        self.restoring = Restoring(
            own_folder,
            self.kept,
            best,
            self.loading,
            settings.seed,
            settings.changed,
            settings.best_key,
            self.lines,
        )
