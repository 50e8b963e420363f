"""The journal of a sweep, judged before Optuna replays it: the folder may be a stranger's.

Optuna checks nothing of what stands there, and a value of a trial becomes an option of ``fit``, of
which the parser may make any class. So a journal is read if each of its lines is one that a sweep
of the same search space writes.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.study import StudyDirection
from optuna.trial import TrialState
from unbroken.commands.sweep.space import Space
from unbroken.storage.reading import LONGEST_LINE, LONGEST_NUMBER, NotRead, opened
from unbroken.tables import is_plain_number

# The name of the one study in a journal
STUDY = "sweep"
# What a trial keeps beside its results
SECONDS = "seconds"
MOST_BYTES = 2**26
MOST_TRIALS = 10_000
# With each epoch Optuna copies all that the trial has had before. So many take about half a minute.
MOST_COPIES = 2**31
LAST_EPOCH = 10**9
# How far a number that is drawn on a logarithmic scale may lie beyond an end: it is rounded.
ROUNDING = 1e-9
# Where Optuna's sampler tells trials at the same time what this one has drawn
SHARED = re.compile(r"tpe:relative_params:(\d\d?)")
LONGEST_SHARED = 2_045


def check_journal(path: Path, space: Space) -> None:
    """A :class:`NotRead` for a journal that no sweep of this space has written."""
    try:
        file = opened(path, MOST_BYTES)
    except FileNotFoundError:
        return
    judge = Judge(space)
    with file:
        lines = iter(partial(file.readline, LONGEST_LINE), b"")
        for number, line in enumerate(lines, 1):
            try:
                judge.check(line)
            except NotRead as odd:
                raise NotRead(f"has in line {number:,} {odd}") from None
            except (ValueError, RecursionError):
                raise NotRead(f"is damaged in line {number:,}") from None
    judge.check_shared()


class Judge:
    """Compares the lines of a journal, one after the other, with what a sweep of a space writes."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.distributions = {
            name: same_text(distribution_to_json(drawn_from))
            for name, drawn_from in space.parameters.items()
        }
        # Of each trial: what it has drawn, its epochs, and what it has shared, in parts.
        self.drawn: list[set[str]] = []
        self.epochs: list[int] = []
        self.shared: list[dict[int, str]] = []
        self.copies = 0
        # By Optuna's numbers of what a line does
        self.checks: dict[int, Callable[[Mapping[str, Any]], None]] = {
            0: self.check_study,
            4: self.check_trial,
            5: self.check_parameter,
            6: self.check_state,
            7: self.check_epoch,
            8: self.check_seconds,
            9: self.check_part,
        }

    def check(self, line: bytes) -> None:
        """One line; a ValueError where it is damaged, a :class:`NotRead` where it is odd."""
        expect(line.endswith(b"\n"), "no end: it is cut off or too long")
        content = parsed(line.decode())
        expect(isinstance(content, dict), "no mapping")
        kind = content.get("op_code")
        known = type(kind) is int and kind in self.checks
        expect(known, "what no sweep writes")
        self.checks[kind](content)

    def check_study(self, line: Mapping[str, Any]) -> None:
        """The study, which each start of the sweep writes again: has it the sweep file's goal?"""
        expect(line.get("study_name") == STUDY, "another study than the sweep's")
        direction = StudyDirection[self.space.goal.upper()]
        is_same = same(line.get("directions"), [int(direction)])
        expect(is_same, "another direction than the goal of the sweep file's metric")

    def check_trial(self, line: Mapping[str, Any]) -> None:
        """A new trial, which may wait with values of a grid."""
        expect(same(line.get("study_id"), 0), "a trial of another study")
        expect(len(self.drawn) < MOST_TRIALS, f"more than {MOST_TRIALS:,} trials")
        waits = same(line.get("state"), int(TrialState.WAITING))
        expect("state" not in line or waits, "a trial that has ended as it began")
        for name in ("value", "values", "params", "distributions", "user_attrs"):
            expect(not line.get(name), f"a trial that began with {name}")
        expect(not line.get("intermediate_values"), "a trial that began with results")
        given = line.get("system_attrs") or {}
        expect(isinstance(given, dict) and given.keys() <= {"fixed_params"}, "what no sweep writes")
        self.check_values(given.get("fixed_params", {}))
        self.drawn.append(set())
        self.epochs.append(0)
        self.shared.append({})

    def check_parameter(self, line: Mapping[str, Any]) -> None:
        """A value that a trial has drawn: does it lie in the sweep file's distribution?"""
        number = self.trial_of(line)
        name: Any = line.get("param_name")
        is_known = isinstance(name, str) and name in self.distributions
        expect(is_known, "a parameter that is not in the sweep file")
        is_same = same_text(line.get("distribution")) == self.distributions[name]
        expect(is_same, f"{name} with other limits or choices than in the sweep file")
        is_inside = is_number_of(line.get("param_value_internal"), self.space.parameters[name])
        expect(is_inside, f"a value of {name} that is not in the sweep file")
        expect(name not in self.drawn[number], f"{name} a second time")
        self.drawn[number].add(name)

    def check_state(self, line: Mapping[str, Any]) -> None:
        """How a trial goes on or ends, with its result."""
        self.trial_of(line)
        state = line.get("state")
        expect(type(state) is int and state in list(TrialState), "an unknown state")
        values: Any = line.get("values")
        is_one = isinstance(values, list) and len(values) == 1
        if state == TrialState.COMPLETE:
            expect(is_one and is_finite(values[0]), "a result that is no number")
        elif values is not None:
            expect(is_one and is_plain_number(values[0]), "a result that is no number")

    def check_epoch(self, line: Mapping[str, Any]) -> None:
        """The metric after an epoch. Where a loss has become NaN or infinite, it is written so."""
        number = self.trial_of(line)
        step = line.get("step")
        expect(type(step) is int and 0 <= step <= LAST_EPOCH, "an epoch that is none")
        is_result = is_plain_number(line.get("intermediate_value"))
        expect(is_result, "a result that is no number")
        self.epochs[number] += 1
        self.copies += self.epochs[number]
        expect(self.copies <= MOST_COPIES, "more epochs than can be read")

    def check_seconds(self, line: Mapping[str, Any]) -> None:
        """The seconds of a trial's training."""
        self.trial_of(line)
        kept: Any = line.get("user_attr")
        expect(isinstance(kept, dict) and list(kept) == [SECONDS], "what no sweep writes")
        expect(is_finite(kept[SECONDS]), f"{SECONDS} that are no number")

    def check_part(self, line: Mapping[str, Any]) -> None:
        """A part of what a trial has drawn, for trials at the same time."""
        number = self.trial_of(line)
        kept: Any = line.get("system_attr")
        expect(isinstance(kept, dict) and len(kept) == 1, "what no sweep writes")
        [(name, text)] = kept.items()
        found = SHARED.fullmatch(name)
        is_part = isinstance(text, str) and len(text) <= LONGEST_SHARED
        if found is None or not is_part:
            raise NotRead("what no sweep writes")
        self.shared[number][int(found[1])] = text

    def check_shared(self) -> None:
        """What the trials have shared, as their last lines have left it."""
        for number, parts in enumerate(self.shared):
            # Optuna reads as far as one part follows the other.
            in_order = takewhile(bool, (parts.get(part) for part in count()))
            try:
                values = parsed("".join(map(str, in_order)))
            except ValueError:
                # A part of an earlier, longer text stands behind it. Optuna leaves out such a one.
                continue
            except RecursionError:
                raise NotRead(f"has shared values of trial {number} that are damaged") from None
            try:
                self.check_values(values)
            except NotRead as odd:
                raise NotRead(f"has, shared by trial {number}, {odd}") from None

    def check_values(self, values: Any) -> None:
        """Values as they are typed, by the names of their parameters."""
        expect(isinstance(values, dict), "what no sweep writes")
        for name, value in values.items():
            is_known = name in self.space.parameters
            expect(is_known, "a parameter that is not in the sweep file")
            is_inside = is_value_of(value, self.space.parameters[name])
            expect(is_inside, f"a value of {name} that is not in the sweep file")

    def trial_of(self, line: Mapping[str, Any]) -> int:
        """The number of the trial that a line is about."""
        number = line.get("trial_id")
        is_known = type(number) is int and 0 <= number < len(self.drawn)
        expect(is_known, "a trial that has not begun")
        return int(line["trial_id"])


def expect(fits: object, odd: str) -> None:
    """A :class:`NotRead` that says what is odd, unless a line fits."""
    if not fits:
        raise NotRead(odd)


def parsed(text: str) -> Any:
    """What a JSON text holds; a very long number as a float, of which no long text is made."""
    return json.loads(
        text, parse_int=lambda digits: (int if len(digits) <= LONGEST_NUMBER else float)(digits)
    )


def same(value: Any, other: Any) -> bool:
    """Whether two plain values are the same, of the same kinds: 1, 1.0 and True are three."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def same_text(text: Any) -> str:
    """A JSON text in the one form that can be compared."""
    expect(isinstance(text, str), "a distribution that is no text")
    return json.dumps(parsed(text), sort_keys=True)


def is_finite(value: Any) -> bool:
    """Whether a value is a number, and neither infinite nor NaN."""
    return is_plain_number(value) and math.isfinite(value)


def is_number_of(value: Any, drawn_from: BaseDistribution) -> bool:
    """Whether a number, as a journal has it, is in a distribution: of a choice it is the place."""
    if not is_finite(value):
        return False
    if isinstance(drawn_from, CategoricalDistribution):
        return value in range(len(drawn_from.choices))
    if isinstance(drawn_from, IntDistribution):
        return float(value).is_integer() and drawn_from.low <= value <= drawn_from.high
    return isinstance(drawn_from, FloatDistribution) and is_between(value, drawn_from)


def is_value_of(value: Any, drawn_from: BaseDistribution) -> bool:
    """Whether a value, as it is typed, is in a distribution, and of the very kind."""
    if isinstance(drawn_from, CategoricalDistribution):
        is_plain = value is None or isinstance(value, str | int | float)
        return is_plain and any(same(value, choice) for choice in drawn_from.choices)
    if isinstance(drawn_from, IntDistribution) and type(value) is not int:
        return False
    return is_number_of(value, drawn_from)


def is_between(value: float, drawn_from: FloatDistribution) -> bool:
    """Whether a number lies between the ends of a distribution, or as good as on one."""
    ends = (drawn_from.low, drawn_from.high)
    is_end = any(math.isclose(value, end, rel_tol=ROUNDING) for end in ends)
    return is_end or ends[0] <= value <= ends[1]
