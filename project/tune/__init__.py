"""Finding a learning rate and a batch size by short real trainings that leave nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def tell(text: str) -> None:
    """Progress, on stderr: one line that is overwritten on a terminal, lines in a log file."""
    on_terminal = sys.stderr.isatty()
    print(f"\r\x1b[K{text}" if on_terminal else text, end="" if on_terminal else "\n", file=sys.stderr, flush=True)


@contextmanager
def picture(path: Path, title: str, panels: int) -> Iterator[list[Axes]]:
    """A row of axes to draw on in the block; written as PNG at its end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 + 2.6 * panels, 3.8), layout="constrained")
    row = list(figure.subplots(1, panels, squeeze=False)[0])
    yield row
    for axes in row:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
