"""The frame of tune's pictures: panels side by side, under a title that names the training."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from unbroken.cli.cli import Configuration
from unbroken.machine import hardware
from unbroken.results.facts import network_of
from unbroken.tables import MADE_BY


@contextlib.contextmanager
def picture(
    path: Path, config: Configuration, flags: dict[str, Any], panels: int
) -> Iterator[list[Axes]]:
    """Axes side by side, to draw on inside. The picture is saved as PNG at the end."""
    figure = Figure(figsize=(4 + 2.6 * panels, 3.8), layout="constrained")
    yield list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in figure.axes:
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title_of(config, flags), fontsize=9)
    figure.savefig(path, dpi=130, metadata=MADE_BY)


def title_of(config: Configuration, flags: dict[str, Any]) -> str:
    """Network, optimizer, precision and device, such as "MLP, AdamW, 32-true on Apple M1"."""
    trained = type(network_of(config.module)).__name__
    optimizer = config.module.hparams.get("optimizer")
    if isinstance(optimizer, str):
        trained += f", {optimizer}"
    gpus = hardware.accelerators()
    if flags["accelerator"] == "cpu" or not gpus:
        cpu = hardware.cpu()
        device = f"{cpu['name']}, {cpu['cores']} cores"
    else:
        device = gpus[0]["name"]
    return f"{trained}, {flags['precision'] or '32-true'} on {device}"
