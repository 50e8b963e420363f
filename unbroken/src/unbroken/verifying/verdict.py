"""What a trial has shown, as one line, a table and advice."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from unbroken.tables import format_table
from unbroken.verifying import recorder as kinds
from unbroken.verifying.causes import (
    Cause,
    causes_of,
    growth,
    has_other_moments,
    moment_text,
    nondeterminism,
)
from unbroken.verifying.differences import (
    Comparison,
    Difference,
    compare,
    names_that_vary,
    results_that_vary,
    that_matter,
)
from unbroken.verifying.processes import Ended
from unbroken.verifying.recorder import MEASURED
from unbroken.verifying.recordings import Moment
from unbroken.verifying.trial import Trial, Tried

# What a row of the table is called, in its order.
TITLES = {
    kinds.SAMPLES: "samples",
    kinds.RANDOM: "generators",
    kinds.HELD: "attributes",
    kinds.RATE: "rates",
    kinds.OPTIMIZER: "optimizer state",
    kinds.WEIGHTS: "weights",
    kinds.LOSS: "loss",
    kinds.LOGGED: "logged",
    kinds.BEST: "best.ckpt",
    kinds.TEST: "test",
}
# Lines of a failed run's output that are shown.
TAIL = 12
# Epoch and batch
Step = tuple[int, int]


@dataclass
class Verdict:
    """The result of a trial.

    Attributes:
        is_exact: Whether the killed run's results are those of the undisturbed one, bit for bit.
        line: The result in one line.
        rows: What differs, since when, how much. Of an exact run: attributes.
        causes: Why, the likeliest first.
        notes: What was compared, and what was left out.
    """

    is_exact: bool
    line: str
    rows: list[dict[str, str]] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_silent(self) -> bool:
        """Whether the line says all that a user has to know."""
        return self.is_exact and not self.rows

    @property
    def text(self) -> str:
        """All of it."""
        parts = [self.line]
        if self.rows:
            parts.append(format_table(self.rows))
        if self.causes:
            lines = ["why, the likeliest first:"]
            for number, cause in enumerate(self.causes, 1):
                lines.append(f"{number}. {cause.text}")
                if cause.mend:
                    lines.append("   write:")
                lines += [f"       {line}" for line in cause.mend]
            parts.append("\n".join(lines))
        parts += ["\n".join(self.notes)] if self.notes else []
        return "\n\n".join(parts)


def judge(trial: Trial) -> Verdict:
    """What the runs of a trial show."""
    for name, tried in (("undisturbed", trial.first), ("second undisturbed", trial.second)):
        if not tried.is_done:
            return Verdict(
                False, f"the {name} run failed: nothing was compared.", notes=_tail(tried)
            )
    undisturbed = compare(trial.first.recording, trial.second.recording)
    varying = results_that_vary(undisturbed)
    if varying or has_other_moments(undisturbed):
        return _of_varying(trial, undisturbed, varying)
    if not trial.killed.is_done:
        return _of_failed_resume(trial)
    left_out = names_that_vary(undisturbed)
    comparison = compare(trial.first.recording, trial.killed.recording, left_out)
    notes = _notes(trial, comparison, undisturbed)
    differences = that_matter(comparison)
    places = _places(trial.killed)
    results = [each for each in differences if each.kind != kinds.HELD]
    if not results and not has_other_moments(comparison):
        return _of_equal_results(trial, comparison, differences, notes)
    found = causes_of(trial.first.recording, trial.killed.recording, comparison)
    if not any(each.moment in trial.killed.recording.resumes for each in differences):
        found = _computed_differently(trial, differences, is_killed=True) + found
    since = _since(trial, differences, comparison)
    line = (
        f"not exact: the run that was killed ({places}) differs from the undisturbed one {since}."
    )
    rows = table_of(differences, comparison, _most_of_weights(trial))
    return Verdict(False, line, rows, found, notes)


def _of_equal_results(
    trial: Trial, comparison: Comparison, attributes: list[Difference], notes: list[str]
) -> Verdict:
    """The verdict where at most attributes differ."""
    steps = max(row.step for row in trial.first.recording.rows.values())
    resumed, anew = _starts(trial.killed)
    if not resumed:
        line = "nothing was shown: the run has no place after its first save to be killed at."
        return Verdict(False, f"{line} Make it longer.", notes=notes)
    killed = f"killed {len(trial.killed.kills)} times ({_places(trial.killed)})"
    killed += f" and resumed {len(resumed)} times"
    if anew:
        # There was no save yet to resume from.
        killed += f", begun anew {len(anew)} times"
    if not attributes:
        line = f"exact: {killed}, the run is the undisturbed one, bit for bit: {steps} steps,"
        return Verdict(True, f"{line} {comparison.compared:,} values.", notes=notes)
    names = [each.label for each in attributes]
    which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    line = (
        f"exact in its results, but not in {which}: {killed}, the run has the samples, weights and"
        f" logged values of the undisturbed one, bit for bit. What differs has changed nothing in"
        f" these {steps} steps. In a longer run it may, as a counter of patience does: write what"
        " is below, or make sure that no result depends on it."
    )
    found = causes_of(trial.first.recording, trial.killed.recording, comparison)
    return Verdict(True, line, table_of(attributes, comparison, ""), found, notes)


def table_of(
    differences: list[Difference], comparison: Comparison, most: str
) -> list[dict[str, str]]:
    """A row for each kind of value that differs."""
    rows = []
    for kind, title in TITLES.items():
        found = [each for each in differences if each.kind == kind]
        if not found:
            continue
        first = found[0]
        names = first.label
        if kind == kinds.SAMPLES:
            # Such as validation:1:validation[0], of its second loader
            names = names.rpartition(":")[2]
        if len(found) > 1:
            names += f" and {len(found) - 1} more"
        how = _how(first)
        if kind == kinds.WEIGHTS and most:
            how = f"at the end by up to {most}"
        where = f"{first.step} ({moment_text(first.moment)})"
        rows.append({"what differs": title, "which": names, "from step": where, "how": how})
    for name, moments in (
        ("batches that the resumed run lacks", comparison.only_in_one),
        ("batches that only the resumed run has", comparison.only_in_other),
    ):
        if moments:
            where = moment_text(moments[0])
            rows.append(
                {"what differs": name, "which": "-", "from step": where, "how": str(len(moments))}
            )
    return rows


def _how(each: Difference) -> str:
    one = "missing" if each.one is None else each.one.shown
    other = "missing" if each.other is None else each.other.shown
    if each.kind == kinds.RANDOM:
        return "another state"
    return "other values" if one == other else f"{one} → {other}"


def _since(trial: Trial, differences: list[Difference], comparison: Comparison) -> str:
    places = {moment: place for place, moment in enumerate(trial.first.recording.rows)}
    moments = [each.moment for each in differences]
    moments += [moment for moment in comparison.only_in_one if moment in places]
    if not moments:
        return "at its end"
    first = min(moments, key=lambda moment: places[moment])
    step = trial.first.recording.rows[first].step
    when = "as soon as it was resumed" if first in trial.killed.recording.resumes else "later"
    return f"from step {step} on ({moment_text(first)}; {when})"


def _of_varying(trial: Trial, undisturbed: Comparison, varying: list[Difference]) -> Verdict:
    line = "not deterministic: two undisturbed runs differ, so a resume cannot be exact."
    if varying:
        found = nondeterminism(trial.first.recording, undisturbed, varying)
    else:
        found = [Cause("two undisturbed runs have other batches.", [])]
    found = _computed_differently(trial, varying, is_killed=False) + found
    shown = [each for each in undisturbed.differences if each in varying or each.kind == kinds.HELD]
    rows = table_of(shown, undisturbed, _most_of(trial, "second"))
    return Verdict(False, line, rows, found, _notes(trial, undisturbed, undisturbed))


def _computed_differently(
    trial: Trial, differences: list[Difference], is_killed: bool
) -> list[Cause]:
    """Which operation of a step differs first, where the step began with the same state and samples
    and ended with others.
    """
    rows = trial.first.recording.rows
    step = step_that_differs(list(rows), differences)
    if step is None:
        return []
    epoch, batch = step
    words = trial.look_closer(epoch, batch, is_killed)
    if words is None:
        return []
    return [
        Cause(
            f"epoch {epoch}, batch {batch} began with the same weights, random numbers and samples,"
            f" and was computed differently. What differs first is {words}.",
            [],
        )
    ]


def step_that_differs(moments: list[Moment], differences: list[Difference]) -> Step | None:
    """Epoch and batch of the training step in which two runs have parted. None: they have not
    parted in a step.
    """
    places = {moment: place for place, moment in enumerate(moments)}
    known = [each for each in differences if each.moment in places]
    if not known:
        return None
    first = min(places[each.moment] for each in known)
    if any(each.kind == kinds.SAMPLES for each in known if places[each.moment] == first):
        return None
    rank, kind, *place = moments[first]
    if kind == "trained":
        return place[0], place[1]
    if kind not in ("train", "end"):
        return None
    # What a batch begins with is what the one before it has left.
    before = [each for each in moments[:first] if each[:2] == (rank, "train")]
    return (before[-1][2], before[-1][3]) if before else None


def _of_failed_resume(trial: Trial) -> Verdict:
    ended = trial.killed.ended
    assert ended is not None
    places = _places(trial.killed)
    if ended.code is None:
        line = f"not exact: the run that was killed ({places}) hangs after its resume."
    elif not trial.killed.kills:
        line = "the third run failed before it was killed, and two before it did not."
    else:
        line = f"not exact: the run that was killed ({places}) cannot be resumed."
    said = last_words(ended)
    return Verdict(
        False,
        line,
        causes=[*growth(trial.first.recording), Cause(f"it says: {said}", [])],
        notes=_tail(trial.killed),
    )


def last_words(ended: Ended) -> str:
    """The line of a failed run's output that says most."""
    lines = [line.strip() for line in ended.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or "Error" in line.split(":")[0]]
    last = (errors or lines or ["nothing"])[-1]
    if last.endswith(":") and last != lines[-1]:
        last += f" {lines[lines.index(last) + 1]}"
    return last


def _tail(tried: Tried) -> list[str]:
    ended = tried.ended
    if ended is None:
        return []
    code = "did not end" if ended.code is None else f"ended with {ended.code}"
    return [f"it {code}; the last of what it printed:", *ended.output.splitlines()[-TAIL:]]


def _starts(tried: Tried) -> tuple[list[Moment], list[Moment]]:
    """Where the starts after a kill have resumed, and where they began anew: at the first batch."""
    found = tried.recording.resumed_at
    anew = [moment for moment in found if moment[2:] == (0, 0)]
    return [moment for moment in found if moment not in anew], anew


def _places(tried: Tried) -> str:
    return ", ".join(f"{kill.kind}" for kill in tried.kills)


def _notes(trial: Trial, comparison: Comparison, undisturbed: Comparison) -> list[str]:
    compared = (
        f"compared: {comparison.compared:,} values at {len(trial.first.recording.rows)} moments"
    )
    notes = [f"{compared}: samples, generators, attributes, rates, optimizer states, weights,"]
    notes[0] += " loss, logged values, the best, the test."
    measured = ", ".join(f"{each}*" for each in MEASURED)
    notes.append(f"not compared, because they measure the machine: {measured}, seconds.")
    vary = sorted(each.label for each in undisturbed.of(kinds.HELD, kinds.LOGGED))
    if vary:
        text = ", ".join(vary[:8]) + (f" and {len(vary) - 8} more" if len(vary) > 8 else "")
        notes.append(f"not compared, because they differ between two undisturbed runs: {text}.")
    kills = trial.killed.kills
    notes += [f"killed {kill.kind}: {moment_text((0, *kill.moment))}" for kill in kills]
    resumed, anew = _starts(trial.killed)
    notes += [f"begun anew at {moment_text(each)}" for each in anew]
    notes += [f"resumed at {moment_text(each)}" for each in resumed]
    notes.append(f"torch {torch.__version__}")
    return notes


def _most_of_weights(trial: Trial) -> str:
    return _most_of(trial, "killed")


def _most_of(trial: Trial, name: str) -> str:
    """The largest difference of a weight at the training's end; an empty text: there is none."""
    paths = [Path(trial.folder, each, "rank0-weights.pt") for each in ("first", name)]
    if not all(path.exists() for path in paths):
        return ""
    one, other = (torch.load(path, weights_only=True) for path in paths)
    shared = one.keys() & other.keys()
    most = max((_largest_difference(one[key], other[key]) for key in shared), default=0.0)
    return f"{most:.2g}" if most else ""


def _largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two tensors element by element; 0 where they have other shapes or no plain layout."""
    is_plain = one.layout == torch.strided and one.numel() > 0
    if one.shape != other.shape or not is_plain:
        return 0.0
    return float((one.double() - other.double()).abs().max())
