"""The file that shows a run's chain of digests, so that two runs are compared without their
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unbroken.parts.chain import KINDS, Link, in_hexadecimal
from unbroken.tables import Row, write_rows

DIGESTS = "digests.csv"


def write_digests(links: Sequence[Link], folder: Path) -> None:
    """Write a line for each window of a run: its epoch, its last step, and four digests."""
    rows: list[Row] = []
    for link in links:
        digests = {kind: in_hexadecimal(getattr(link, kind)) for kind in KINDS}
        rows.append({"epoch": link.epoch, "step": link.step, **digests})
    write_rows(folder / DIGESTS, rows)
