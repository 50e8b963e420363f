"""What keeps a run's promises in any Lightning Trainer.

    from unbroken import ExactCheckpoint

Names are imported when they are asked for. A command takes over signals and threads, with files of
this package, before it imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unbroken import lightning_names
from unbroken.version import __version__ as __version__

if TYPE_CHECKING:
    from unbroken.checkpoint.exact_checkpoint import ExactCheckpoint as ExactCheckpoint
    from unbroken.parts.part import Part as Part
    from unbroken.stopping.signals import Stopped as Stopped

# Most public code says `import pytorch_lightning`. From here on that is the same package.
lightning_names.alias()

PLACES = {
    "ExactCheckpoint": "checkpoint.exact_checkpoint",
    "Part": "parts.part",
    "Stopped": "stopping.signals",
}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)
