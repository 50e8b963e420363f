"""What a sweep searches: a file in W&B's format, read for Optuna."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from unbroken.errors import UserError, nearest, require
from unbroken.tables import is_number, load_yaml

Method = Literal["bayes", "random", "grid"]
Goal = Literal["maximize", "minimize"]

METHODS = ("bayes", "random", "grid")
GOALS = ("maximize", "minimize")
# W&B's distributions that have min and max.
RANGES = ("int_uniform", "uniform", "log_uniform_values")
# W&B's distributions of single values. The values alone say the same.
CHOICES = ("categorical", "constant")
ENTRY_KEYS = ("value", "values", "min", "max", "distribution")

# The sections of W&B's format that a local sweep uses, and those that it leaves to W&B.
USED = ("method", "metric", "parameters", "early_terminate")
LEFT_TO_WANDB = (
    "$schema",
    "command",
    "controller",
    "description",
    "entity",
    "imageuri",
    "job",
    "name",
    "program",
    "project",
    "run_cap",
)


@dataclass
class Space:
    """The part of a sweep file in W&B's format that a local sweep uses."""

    # An option of ``fit`` without its dashes, such as model.lr → its values.
    parameters: dict[str, BaseDistribution]
    # Any metric that fit logs.
    metric: str = "val/accuracy"
    goal: Goal = "maximize"
    # Epochs after which a trial may be stopped early.
    min_epochs: int = 1
    method: Method = "bayes"
    # What the sweep says at its start: what it does not use of the file, and what it does instead.
    notes: list[str] = field(default_factory=list)

    def best(self, values: Iterable[float]) -> float | None:
        """The best of some values of the metric; None where none is finite."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return None
        return max(finite) if self.goal == "maximize" else min(finite)

    def values_in(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a trial has drawn of this space. The file of a sweep's results may name more, such
        as a class, and each value becomes an option of ``fit``.
        """
        return {name: params[name] for name in self.parameters if name in params}

    def first_setting(self) -> dict[str, Any]:
        """A setting of the space, with the first value of each parameter."""
        setting = {}
        for name, drawn_from in self.parameters.items():
            if isinstance(drawn_from, CategoricalDistribution):
                setting[name] = drawn_from.choices[0]
            else:
                setting[name] = cast(FloatDistribution | IntDistribution, drawn_from).low
        return setting

    def grid_size(self) -> int:
        """How many settings a grid has."""
        return math.prod(len(values) for values in self._grid_values())

    def grid_setting(self, number: int) -> dict[str, Any]:
        """A setting of the grid, counted from 0. The last parameter of the file changes first."""
        combinations = itertools.product(*self._grid_values())
        values = next(itertools.islice(combinations, number, None))
        return dict(zip(self.parameters, values, strict=True))

    def _grid_values(self) -> Iterator[range | tuple[Any, ...]]:
        for drawn_from in self.parameters.values():
            if isinstance(drawn_from, IntDistribution):
                yield range(drawn_from.low, drawn_from.high + 1)
            else:
                yield cast(CategoricalDistribution, drawn_from).choices


def as_typed(value: Any) -> str:
    """A value as it is typed on the command line, where ``null`` is no value and ``None`` a
    text.
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def read_space(path: Path) -> Space:
    """The search space of a sweep file; a UserError for what a local sweep cannot search."""
    sections = read_sections(path)
    parameters = sections.get("parameters")
    if not isinstance(parameters, dict):
        raise UserError(
            f"--space: {path} must have a section `parameters:`, as configs/sweep.yaml has."
        )
    check_names(path, sections)
    method = sections.get("method", "bayes")
    hint = nearest(str(method), METHODS)
    require(method in METHODS, "--space: method", f"be one of {', '.join(METHODS)}", method, hint)
    metric, goal = read_metric(sections.get("metric", {}))
    space = Space(
        parameters={str(name): distribution(name, entry) for name, entry in parameters.items()},
        metric=metric,
        goal=goal,
        min_epochs=read_min_epochs(sections.get("early_terminate", {})),
        method=method,
        notes=[describe_goal(metric, goal, sections.get("metric", {})), *notes_of(path, sections)],
    )
    if method == "grid":
        check_grid(space)
    return space


def read_sections(path: Path) -> dict[str, Any]:
    """The sections of a sweep file that hold anything; none where the file holds something else."""
    try:
        # A named pipe would be waited for.
        is_odd = path.exists() and not path.is_file()
        require(not is_odd, "--space", "be an ordinary file", path)
        content = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
        raise UserError(f"--space: {reason}. Name a file in W&B's format.") from None
    except (RecursionError, UnicodeDecodeError, yaml.YAMLError):
        raise UserError(f"--space: {path} is not valid YAML.") from None
    except ValueError as error:
        raise UserError(f"--space: {path} is not valid YAML: {error}.") from None
    if not isinstance(content, dict):
        return {}
    return {str(name): section for name, section in content.items() if section}


def check_names(path: Path, sections: Mapping[str, Any]) -> None:
    """A UserError for a section that W&B's format does not have: a misspelt one would be
    ignored.
    """
    known = (*USED, *LEFT_TO_WANDB)
    for name in sections:
        if name not in known:
            hint = nearest(name, known)
            raise UserError(f"--space: {path} has an unknown section `{name}:`.{hint}")


def read_metric(section: Any) -> tuple[str, Goal]:
    """The metric to follow, and whether it is to be large or small.

    A metric without a goal is to be small, as in W&B. Without a metric it is the accuracy.
    """
    must = "be {name: ..., goal: maximize or minimize}"
    require(isinstance(section, dict), "--space: metric", must, section)
    usual_goal = "minimize" if "name" in section else "maximize"
    goal = section.get("goal", usual_goal)
    require(goal in GOALS, "--space: metric", must, section)
    name = section.get("name", "val/accuracy")
    require(isinstance(name, str) and name.strip(), "--space: metric.name", "be a text", name)
    return name, cast(Goal, goal)


def describe_goal(metric: str, goal: Goal, section: Mapping[str, Any]) -> str:
    """What the best trial has, in words for the user."""
    extreme = "largest" if goal == "maximize" else "smallest"
    told = f"the best trial has the {extreme} {metric}"
    if "name" in section and "goal" not in section:
        return f"{told}: W&B minimizes where metric has no goal."
    return f"{told}."


def read_min_epochs(section: Any) -> int:
    """The epochs that every trial may train, of the section ``early_terminate``."""
    least = section.get("min_iter", 1) if isinstance(section, dict) else section
    is_count = isinstance(section, dict) and type(least) is int and least > 0
    must = "be an integer of at least 1"
    require(is_count, "--space: early_terminate.min_iter", must, least)
    return cast(int, least)


def notes_of(path: Path, sections: Mapping[str, Any]) -> list[str]:
    """What a local sweep does not use of the file, and what it does instead."""
    notes = []
    left = [name for name in sections if name in LEFT_TO_WANDB]
    if left:
        notes.append(f"{path}: {', '.join(left)}: for W&B alone, not used here.")
    unused = [f"metric.{key}" for key in sections.get("metric", {}) if key not in ("name", "goal")]
    if unused:
        notes.append(f"{path}: {', '.join(unused)}: not used here.")
    stopping = sections.get("early_terminate", {})
    unused = [f"{key}: {value}" for key, value in stopping.items() if key != "min_iter"]
    rule = "a trial that is worse than the median of the others is stopped early"
    epochs = stopping.get("min_iter", 1)
    after = f"after {epochs} epoch{'s' if epochs > 1 else ''} or later"
    instead = f" (not by `{', '.join(unused)}`)" if unused else ""
    notes.append(f"{rule}, {after}{instead}.")
    return notes


def check_grid(space: Space) -> None:
    """A UserError for a grid over a parameter that has no list of values."""
    for name, drawn_from in space.parameters.items():
        if isinstance(drawn_from, FloatDistribution):
            ends = f"min {drawn_from.low:g}, max {drawn_from.high:g}"
            raise UserError(
                f"--space: {name} needs values in a grid, got {ends}. "
                "List `values: [...]`, or write `method: random`."
            )


def distribution(name: Any, entry: Any) -> BaseDistribution:
    """The distribution of a parameter; a UserError for an entry that is not in W&B's format."""
    if isinstance(entry, list):
        entry = {"values": entry}
    elif not isinstance(entry, dict):
        entry = {"value": entry}
    for key in entry:
        if key not in ENTRY_KEYS:
            known = f"a local sweep knows {', '.join(ENTRY_KEYS)}"
            hint = nearest(str(key), ENTRY_KEYS)
            raise UserError(f"--space: {name}.{key} cannot be used: {known}.{hint}")
    if "value" not in entry and "values" not in entry:
        return range_of(name, entry)
    kind = entry.get("distribution", CHOICES[0])
    must = f"be {' or '.join(CHOICES)} where there are values"
    require(kind in CHOICES, f"--space: {name}.distribution", must, kind)
    if "values" in entry:
        values = entry["values"]
        is_list = isinstance(values, list) and len(values) > 0
        require(is_list, f"--space: {name}.values", "be a non-empty list", values)
        return choice(values)
    return choice([entry["value"]])


def choice(values: list[Any]) -> CategoricalDistribution:
    """One of several values. Optuna keeps plain ones alone: lists are written as they are typed."""
    choices = []
    for value in values:
        if value is None or isinstance(value, str | int | float):
            choices.append(value)
        elif isinstance(value, list | dict):
            choices.append(json.dumps(value, default=str))
        else:
            # YAML reads 2020-01-01 as a date.
            choices.append(str(value))
    return CategoricalDistribution(choices)


def range_of(name: Any, entry: Mapping[str, Any]) -> IntDistribution | FloatDistribution:
    """The numbers between a parameter's ``min`` and ``max``."""
    low: Any = entry.get("min")
    high: Any = entry.get("max")
    both_whole = type(low) is int and type(high) is int
    kind = entry.get("distribution", "int_uniform" if both_whole else "uniform")
    must = f"be one of {', '.join(RANGES)}"
    hint = nearest(str(kind), RANGES)
    require(kind in RANGES, f"--space: {name}.distribution", must, kind, hint)
    is_whole = kind == "int_uniform"
    fits = both_whole if is_whole else is_number(low) and is_number(high)
    if not fits or low >= high:
        numbers = "whole numbers" if is_whole else "numbers"
        got = f"got min {low}, max {high}."
        if isinstance(low, str) or isinstance(high, str):
            got += " YAML reads 1e-4 as text: write 0.0001."
        raise UserError(f"--space: {name} needs values, or {numbers} min below max, {got}")
    if is_whole:
        return IntDistribution(low, high)
    is_log = kind == "log_uniform_values"
    if is_log:
        require(low > 0, f"--space: {name}.min", "be above 0 on a logarithmic scale", low)
    return FloatDistribution(low, high, log=is_log)
