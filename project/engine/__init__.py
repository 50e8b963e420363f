"""The engine: what keeps a run's promises in any Lightning Trainer.

    from project.engine import ExactCheckpoint

Names are imported when they are asked for. A command takes over signals and threads, with files of
this package, before it imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from project.engine import lightning_names

if TYPE_CHECKING:
    from project.engine.exact_checkpoint import ExactCheckpoint as ExactCheckpoint
    from project.engine.parts.part import Part as Part
    from project.engine.signals import Stopped as Stopped

# Most public code says `import pytorch_lightning`. From here on that is the same package.
lightning_names.alias()

PLACES = {"ExactCheckpoint": "exact_checkpoint", "Part": "parts.part", "Stopped": "signals"}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)
