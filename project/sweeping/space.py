"""The search space of a sweep file in W&B's format, so that one file serves ``wandb sweep`` and the local sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from project.errors import UserError, nearest

DISTRIBUTIONS = ("categorical", "constant", "int_uniform", "uniform", "log_uniform_values")


@dataclass
class Parameter:
    """One parameter of a sweep: an option of ``fit`` without its dashes, and where its values come from."""

    name: str  # model.lr
    distribution: str  # one of DISTRIBUTIONS
    values: list[Any]  # the choices, or [lowest, highest]

    def suggest(self, trial: Any) -> Any:
        """A value from an Optuna trial."""
        if self.distribution in ("categorical", "constant"):
            return trial.suggest_categorical(self.name, self.values)
        low, high = self.values
        if self.distribution == "int_uniform":
            return trial.suggest_int(self.name, low, high)
        return trial.suggest_float(self.name, low, high, log=self.is_log)

    @property
    def is_log(self) -> bool:
        """Whether equal factors, not equal steps, are equally likely."""
        return self.distribution == "log_uniform_values"


@dataclass
class Space:
    """What a sweep file says, as far as a local sweep needs it."""

    parameters: list[Parameter]
    metric: str
    maximize: bool
    min_epochs: int  # no trial is stopped before


def read_space(path: Path) -> Space:
    """The search space of a sweep file.

    Raises:
        UserError: There is no such file, it is no sweep file, or a distribution is not one of DISTRIBUTIONS.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"--space: {path} cannot be read: {error.strerror}.") from None
    except yaml.YAMLError:
        raise UserError(f"--space: {path} is not valid YAML.") from None
    if not isinstance(content, dict) or not isinstance(content.get("parameters"), dict):
        raise UserError(f"--space: {path} must have a section `parameters:`, as configs/sweep.yaml has.")
    metric = content.get("metric") or {}
    return Space(
        [_parameter(name, entry) for name, entry in content["parameters"].items()],
        metric.get("name", "val/accuracy"),
        metric.get("goal", "maximize") == "maximize",
        int((content.get("early_terminate") or {}).get("min_iter", 1)),
    )


def _parameter(name: str, entry: Any) -> Parameter:
    entry = entry if isinstance(entry, dict) else {"value": entry}
    if "value" in entry:
        return Parameter(name, "constant", [entry["value"]])
    if "values" in entry:
        return Parameter(name, "categorical", list(entry["values"]))
    whole = all(isinstance(entry.get(end), int) for end in ("min", "max"))
    distribution = entry.get("distribution", "int_uniform" if whole else "uniform")
    if distribution not in DISTRIBUTIONS:
        raise UserError(
            f"--space: {name}.distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution}."
            f"{nearest(str(distribution), DISTRIBUTIONS)}"
        )
    low, high = entry.get("min"), entry.get("max")
    if not all(isinstance(end, (int, float)) for end in (low, high)) or low >= high:
        hint = " YAML reads 1e-4 as text: write 0.0001." if isinstance(low, str) or isinstance(high, str) else ""
        raise UserError(f"--space: {name} needs values, or numbers min below max, got min {low}, max {high}.{hint}")
    if distribution == "log_uniform_values" and low <= 0:
        raise UserError(f"--space: {name}.min must be above 0 on a logarithmic scale, got {low}.")
    return Parameter(name, distribution, [low, high])
