"""A run of the default network, trained once for all tests that need a checkpoint, on the bundled
digits.
"""

from __future__ import annotations

from pathlib import Path

from tests.commands import made_once

EPOCHS = 3


def trained_checkpoint() -> Path:
    """``best.ckpt`` of the default network after a few epochs.

    Other files of the run lie beside it. Read only.
    """
    flags = [
        "--data.source",
        "sample",
        "--max_epochs",
        str(EPOCHS),
        "--data.batch_size",
        "64",
        "--accelerator",
        "cpu",
    ]
    return made_once("trained", *flags) / "best.ckpt"
