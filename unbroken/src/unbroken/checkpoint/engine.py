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
from unbroken.loading import ExactLoading
from unbroken.parts.part import Part


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
    """One training's objects. The next training has others.

    Args:
        own_folder: The folder of the run.
        ending: How the run ends when it is asked to.
        best: The best so far.
        settings: What the user has given.
    """

    def __init__(
        self, own_folder: OwnFolder, ending: Ending, best: Best, settings: Settings
    ) -> None:
        self.own_folder = own_folder
        self.ending = ending
        self.best = best
        # What is said as training starts: what is not exact, what is assumed, who shares the data.
        self.lines: list[str] = []
        self.chosen = settings.chosen
        self.unshared_values = UnsharedValues()
        self.loading = ExactLoading(settings.seed, self.lines)
        self.following = Following(best)
        self.kept = KeptParts(
            self.loading,
            self.following,
            settings.further_parts,
            settings.undeclared,
        )
        self.windows = Windows(self.kept, ending)
        self.validation = Validation(self.kept)
        self.cut_epoch = CutEpoch(self.kept)
        self.saving = Saving(
            own_folder,
            settings.interval,
            self.kept,
            self.following,
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
