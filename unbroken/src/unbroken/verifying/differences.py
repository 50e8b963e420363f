"""What is not the same in two recordings, and since when."""

from __future__ import annotations

from dataclasses import dataclass

from unbroken.verifying.digests import Entry
from unbroken.verifying.recorder import HELD, LOGGED, NOT_COMPARED, SAMPLES
from unbroken.verifying.recordings import Moment, Recording


@dataclass
class Difference:
    """A value that is another one in the second recording.

    Attributes:
        name: Its kind and name, such as ``weights:net.0.bias``.
        moment: When it is first so.
        step: Optimizer steps that were done then.
        one: In the first recording; None: it has no such value.
        other: In the second.
        lasts: Whether it differs also at the last moment that both have.
    """

    name: str
    moment: Moment
    step: int
    one: Entry | None
    other: Entry | None
    lasts: bool = False

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def label(self) -> str:
        return self.name.partition(":")[2]


@dataclass
class Comparison:
    """All differences of two recordings, in the order in which they first appear."""

    differences: list[Difference]
    # Moments that only one of them has.
    only_in_one: list[Moment]
    only_in_other: list[Moment]
    # How many values were compared, over all moments.
    compared: int

    def of(self, *kinds: str) -> list[Difference]:
        """Those of some kinds."""
        return [each for each in self.differences if each.kind in kinds]


def compare(one: Recording, other: Recording, left_out: frozenset[str] = frozenset()) -> Comparison:
    """Compare every value of every moment.

    Args:
        one: The recording of an undisturbed run.
        other: That of another run of the same training.
        left_out: Names that are not compared.
    """
    found: dict[str, Difference] = {}
    compared = 0
    for moment, row in one.rows.items():
        twin = other.rows.get(moment)
        if twin is None:
            continue
        for name in {**row.values, **twin.values}:
            if name in left_out or name.startswith(NOT_COMPARED):
                continue
            compared += 1
            ours = row.values.get(name)
            theirs = twin.values.get(name)
            is_same = ours is not None and theirs is not None and ours.digest == theirs.digest
            if name in found:
                found[name].lasts = not is_same
            elif not is_same:
                found[name] = Difference(name, moment, row.step, ours, theirs, lasts=True)
    only_in_one = [moment for moment in one.rows if moment not in other.rows]
    only_in_other = [moment for moment in other.rows if moment not in one.rows]
    return Comparison(list(found.values()), only_in_one, only_in_other, compared)


def that_matter(comparison: Comparison) -> list[Difference]:
    """The differences that a user would call one.

    An attribute that differs for a while, and neither at the end nor with any effect on a result,
    is one that is filled when it is first needed.
    """
    results = [each for each in comparison.differences if each.kind != HELD]
    if results:
        return comparison.differences
    return [each for each in comparison.differences if each.lasts]


def names_that_vary(undisturbed: Comparison) -> frozenset[str]:
    """What differs between two undisturbed runs, and therefore cannot be compared."""
    return frozenset(each.name for each in undisturbed.differences)


def results_that_vary(undisturbed: Comparison) -> list[Difference]:
    """What must not differ between two undisturbed runs. An attribute, or what is logged, may: it
    may measure time.
    """
    return [each for each in undisturbed.differences if each.kind not in (HELD, LOGGED)]


def same_samples(one: Recording, wanted: Difference) -> Moment | None:
    """Where the first recording has the samples that the second has at a difference."""
    if wanted.kind != SAMPLES or wanted.other is None:
        return None
    for moment, row in one.rows.items():
        entry = row.values.get(wanted.name)
        if entry is None or moment[1] != wanted.moment[1]:
            continue
        if entry.digest == wanted.other.digest:
            return moment
    return None
