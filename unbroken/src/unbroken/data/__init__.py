"""Where samples come from, how they become batches, and how these reach the device.

The names for images are imported when they are asked for: they need Pillow and torchvision, which
the extra ``images`` brings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unbroken.data.base import Split as Split
from unbroken.data.base import SplitDataModule as SplitDataModule
from unbroken.data.base import TensorRows as TensorRows
from unbroken.data.base import bytes_on_device as bytes_on_device
from unbroken.data.base import check_loading as check_loading
from unbroken.data.base import copy_to as copy_to
from unbroken.data.base import first_samples as first_samples
from unbroken.data.base import hold_out as hold_out
from unbroken.data.base import is_same_on_all_ranks as is_same_on_all_ranks
from unbroken.data.base import make_loader as make_loader

if TYPE_CHECKING:
    from unbroken.data.augmentation import random_changes as random_changes
    from unbroken.data.augmentation import transformed as transformed
    from unbroken.data.drawn_figures import find_figure as find_figure
    from unbroken.data.idx_files import IdxSet as IdxSet
    from unbroken.data.idx_files import find_idx as find_idx
    from unbroken.data.idx_files import read_idx as read_idx
    from unbroken.data.idx_files import read_part as read_part
    from unbroken.data.images import BatchedDataModule as BatchedDataModule
    from unbroken.data.images import TensorImages as TensorImages
    from unbroken.data.picture_folder import PictureFolder as PictureFolder
    from unbroken.data.picture_folder import check_classes as check_classes
    from unbroken.data.picture_folder import class_folders as class_folders
    from unbroken.pictures import read_picture as read_picture

OF_IMAGES = {
    "BatchedDataModule": "images",
    "IdxSet": "idx_files",
    "PictureFolder": "picture_folder",
    "TensorImages": "images",
    "check_classes": "picture_folder",
    "class_folders": "picture_folder",
    "find_figure": "drawn_figures",
    "find_idx": "idx_files",
    "random_changes": "augmentation",
    "read_idx": "idx_files",
    "read_part": "idx_files",
    "read_picture": "picture_folder",
    "transformed": "augmentation",
}


def __getattr__(name: str) -> Any:
    if name not in OF_IMAGES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{OF_IMAGES[name]}"), name)
