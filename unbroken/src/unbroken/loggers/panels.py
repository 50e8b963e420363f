"""Which metrics share a chart in ``report.html`` and the W&B dashboard: ``panels.yaml``, read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

# First word of a metric's name → label.
PARTS = {"train": "train", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class Panel:
    """A chart of metrics over optimizer steps. It is left out where none of them was logged."""

    section: str
    title: str
    lines: dict[str, str]  # metric → label
    unit: str = ""
    # Of the vertical axis. "log" only where values span a factor of ten.
    axis: Literal["from zero", "fitting", "log"] = "from zero"
    # False: the report of one run shows it elsewhere, but runs are compared by it.
    in_report: bool = True


def read_panels() -> list[Panel]:
    """The panels of ``panels.yaml``, in its order."""
    text = Path(__file__).with_name("panels.yaml").read_text(encoding="utf-8")
    return [Panel(**each) for each in yaml.safe_load(text)]


PANELS = read_panels()
