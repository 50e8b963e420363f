"""A sweep at a glance: every trial's course over the epochs, and its result over every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project.sweep.trials import Parameter, Space

BEST, DONE, PRUNED = "#c1272d", "#33658a", "#b0b7bf"


def draw(path: Path, study: Any, space: Space, title: str) -> None:
    """Write the picture as PNG. Trials without a value are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    trials = [trial for trial in study.trials if trial.intermediate_values]
    varied = [p for p in space.parameters if p.distribution != "constant"]
    columns = 1 + len(varied)
    figure, axes = plt.subplots(
        1, columns, figsize=(3.4 + 2.4 * len(varied), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    best = best_trial(trials, space)
    for trial in sorted(trials, key=lambda t: rank(t, best)):
        colour = (PRUNED, DONE, BEST)[rank(trial, best)]
        values = [trial.intermediate_values[epoch] for epoch in sorted(trial.intermediate_values)]
        style = {"color": colour, "zorder": 2 + rank(trial, best)}
        axes[0, 0].plot(range(1, len(values) + 1), values, marker="o", markersize=3, linewidth=1.4, **style)
        for axis, parameter in zip(axes[0, 1:], varied, strict=True):
            if parameter.name in trial.params:
                score = (max if space.maximize else min)(values)
                axis.scatter(position(trial.params[parameter.name], parameter), score, s=28, **style)
    axes[0, 0].set(xlabel="epoch", ylabel=space.metric)
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    for axis, parameter in zip(axes[0, 1:], varied, strict=True):
        label_axis(axis, parameter)
    for axis in axes[0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Line2D([], [], color=c, marker="o", markersize=4) for c in (BEST, DONE, PRUNED)]
    figure.legend(handles, ["best", "finished", "stopped early"], loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def best_trial(trials: list[Any], space: Space) -> Any:
    """The finished trial with the best value; None where none has finished."""
    done = [trial for trial in trials if trial.value is not None and trial.state.name == "COMPLETE"]
    return (max if space.maximize else min)(done, key=lambda trial: trial.value) if done else None


def rank(trial: Any, best: Any) -> int:
    """0 for a trial stopped early, 1 for a finished one, 2 for the best."""
    return 2 if best is not None and trial.number == best.number else int(trial.state.name == "COMPLETE")


def position(value: Any, parameter: Parameter) -> Any:
    """Where a value stands on its axis: choices stand at equal distances."""
    return parameter.values.index(value) if parameter.distribution == "categorical" else value


def label_axis(axis: Any, parameter: Parameter) -> None:
    """Scale, ticks and name of a parameter's axis."""
    axis.set_xlabel(parameter.name)
    if parameter.distribution == "categorical":
        axis.set_xticks(range(len(parameter.values)), [str(value) for value in parameter.values])
        axis.set_xlim(-0.5, len(parameter.values) - 0.5)
    elif parameter.is_log:
        axis.set_xscale("log")
