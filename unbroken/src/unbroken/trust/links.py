"""What a run or a sweep refuses in the folder that it writes into: links out of it, and pipes."""

from __future__ import annotations

import os
from pathlib import Path

from unbroken.errors import UserError
from unbroken.trust.places import is_inside

WANDB_LOG = "debug-core.log"


def refuse_links_that_leave(folder: Path) -> None:
    """A UserError if a link in a run's folder leads out of it: the run would write there.

    W&B makes links of its own to its log in the user's cache. A run writes through none of them.
    """
    inside = folder.resolve()
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            is_wandbs_log = path.name == WANDB_LOG and path.parent.name == "logs"
            leaves = path.is_symlink() and not is_inside(path, inside)
            if leaves and not is_wandbs_log:
                raise UserError(
                    f"{path} is a link out of the run's folder, and a run writes only into its"
                    " folder. Remove the link."
                )


def refuse_pipes(folder: Path) -> None:
    """A UserError if a named pipe is in a run's folder: a run that opens it waits for ever."""
    for place, _, files in os.walk(folder):
        for name in files:
            path = Path(place, name)
            if path.is_fifo():
                raise UserError(
                    f"{path} is a named pipe, and a run reads and writes files. Remove it."
                )
