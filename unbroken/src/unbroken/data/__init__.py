"""Where samples come from, how they become batches, and how these reach the device.

The names for images are imported when they are asked for: they need Pillow and torchvision, which
the extra ``images`` brings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unbroken.data.base import Split as Split
from unbroken.data.base import SplitDataModule as SplitDataModule
from unbroken.data.base import TensorRows as TensorRows
from unbroken.data.idx_files import find_idx as find_idx
from unbroken.data.idx_files import read_idx as read_idx

if TYPE_CHECKING:
    from unbroken.data.images import BatchedDataModule as BatchedDataModule
    from unbroken.data.images import TensorImages as TensorImages

OF_IMAGES = ("BatchedDataModule", "TensorImages")


def __getattr__(name: str) -> Any:
    if name not in OF_IMAGES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.images"), name)
