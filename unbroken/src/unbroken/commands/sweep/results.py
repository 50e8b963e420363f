"""What a sweep has found: a table of its trials, and a picture."""

from pathlib import Path
from typing import Any

import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState
from unbroken.commands.sweep.journal import SECONDS
from unbroken.commands.sweep.space import Space

STATES = {
    TrialState.COMPLETE: "done",
    TrialState.PRUNED: "stopped early",
    TrialState.RUNNING: "interrupted",
    TrialState.WAITING: "interrupted",
    TrialState.FAIL: "failed",
}
# The colours of the picture, from the back to the front: the best trial is drawn on top.
COLOURS = {
    "stopped early": "#b0b7bf",
    "finished": "#33658a",
    "best": "#c1272d",
}


def result_rows(study: optuna.Study, space: Space) -> list[dict[str, Any]]:
    """A row per trial that measured anything, the best first."""
    rows = []
    for trial in study.trials:
        best = space.best(trial.intermediate_values.values())
        if best is None:
            continue
        row: dict[str, Any] = {"trial": trial.number, space.metric: best}
        row |= space.values_in(trial.params)
        row["epochs"] = len(trial.intermediate_values)
        if SECONDS in trial.user_attrs:
            row[SECONDS] = trial.user_attrs[SECONDS]
        row["state"] = STATES[trial.state]
        rows.append(row)
    return sorted(rows, key=lambda row: row[space.metric], reverse=space.goal == "maximize")


def draw(path: Path, study: optuna.Study, space: Space, title: str) -> None:
    """Every trial's curve, and its best value over each parameter.

    Optuna has pictures as well, but they leave out the trials that were stopped early.
    """
    parameters = space.parameters
    varied = {name: parameters[name] for name in parameters if not parameters[name].single()}
    figure = Figure(figsize=(3.4 + 2.4 * len(varied), 3.6), layout="constrained")
    panels = figure.subplots(1, 1 + len(varied), sharey=True, squeeze=False)[0]
    curves = panels[0]
    over_parameters = dict(zip(varied, panels[1:], strict=True))
    curves.set(xlabel="epoch", ylabel=space.metric)
    curves.grid(alpha=0.25)
    curves.xaxis.get_major_locator().set_params(integer=True)
    for trial in study.trials:
        best = space.best(trial.intermediate_values.values())
        if best is None:
            continue
        kind = kind_of(trial, study)
        style = {"color": COLOURS[kind], "zorder": 2 + list(COLOURS).index(kind)}
        draw_curve(curves, trial, style)
        for name, value in space.values_in(trial.params).items():
            if name in varied:
                place = varied[name].to_internal_repr(value)
                over_parameters[name].scatter(place, best, s=28, clip_on=False, **style)
    for name, axes in over_parameters.items():
        label_axis(axes, name, varied[name])
    for kind in reversed(COLOURS):
        curves.plot([], [], color=COLOURS[kind], marker="o", markersize=4, label=kind)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def kind_of(trial: FrozenTrial, study: optuna.Study) -> str:
    """The colour's name of a trial."""
    if trial.state != TrialState.COMPLETE:
        return "stopped early"
    return "best" if trial.number == study.best_trial.number else "finished"


def draw_curve(axes: Axes, trial: FrozenTrial, style: dict[str, Any]) -> None:
    """The trial's metric over its epochs, which are counted from 1 here."""
    reported = sorted(trial.intermediate_values.items())
    epochs = [epoch + 1 for epoch, _ in reported]
    values = [value for _, value in reported]
    axes.plot(epochs, values, marker="o", markersize=3, linewidth=1.4, **style)


def label_axis(axes: Axes, name: str, drawn_from: BaseDistribution) -> None:
    """Name a parameter, and show all that it could be, also what no trial drew."""
    axes.set_xlabel(name)
    axes.grid(alpha=0.25)
    if isinstance(drawn_from, CategoricalDistribution):
        # The choices stand at equal distances.
        axes.set_xticks(range(len(drawn_from.choices)), [str(one) for one in drawn_from.choices])
        return
    if not isinstance(drawn_from, FloatDistribution | IntDistribution):
        return
    if drawn_from.log:
        axes.set_xscale("log")
    axes.set_xlim(drawn_from.low, drawn_from.high)
    # Upright labels would cover each other, such as 2×10⁻³ and 3×10⁻³.
    axes.tick_params(axis="x", which="minor", labelsize=7, labelrotation=90)
