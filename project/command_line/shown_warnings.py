"""Which warnings of libraries a user sees, and how."""

import logging
import warnings
from pathlib import Path

UNFOUNDED = Path(__file__).with_name("unfounded_advice.txt")


def silence_unfounded_advice() -> None:
    """Hide Lightning's notes, and advice of Lightning and W&B that is wrong here; show every other
    warning.
    """
    # Lightning sets INFO when it is imported. Our own lines say what matters.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # What was asked for by a flag is shown.
    for name in ("callbacks.model_summary", "profilers.profiler"):
        logging.getLogger(f"lightning.pytorch.{name}").setLevel(logging.INFO)
    # A line of the file says how a warning begins, as a regular expression, and behind it why it is
    # hidden.
    for line in UNFOUNDED.read_text(encoding="utf-8").splitlines():
        warnings.filterwarnings("ignore", line.partition("  #")[0])
