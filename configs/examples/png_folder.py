"""A folder of pictures, too many for memory: ``root/train/CLASS/*.png``, ``root/test/CLASS/*.png``.

python -m project.fit --config configs/examples/png_folder.yaml --data.root pictures
"""

from pathlib import Path
from typing import Any

from torchvision.datasets import FakeData
from torchvision.transforms import RandomHorizontalFlip
from unbroken.data import BatchedDataModule, PictureFolder, Split, check_classes, class_folders
from unbroken.errors import UserError


class PngFolder(BatchedDataModule):
    """Decoded and fitted to 32 × 32 RGB in worker processes.

    Classes are the names of the folders in ``root/train``, in alphabetical order.
    """

    image_shape = (3, 32, 32)
    mean = [0.5, 0.5, 0.5]
    std = [0.25, 0.25, 0.25]
    class_names = ["noise", "static", "snow"]  # without a root

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        if root is not None and (Path(root) / "train").is_dir():
            self.class_names = class_folders(Path(root) / "train")

    def make_split(self, split: Split) -> Any:
        part = "test" if split == "test" else "train"
        # A flip is random, yet the same again in a resumed run.
        flip = RandomHorizontalFlip() if split == "train" else None
        if self.root is None:
            size = (3, 40, 48)
            pictures: Any = FakeData(200, size, 3, transform=flip, random_offset=len(part))
        else:
            folder = Path(self.root) / part
            if not folder.is_dir():
                raise UserError(f"--data.root must hold a folder {part}, got {self.root}.")
            if (Path(self.root) / "test").is_dir():
                # Before the training, not after it.
                check_classes(Path(self.root) / "test", self.class_names)
            pictures = PictureFolder(folder, self.class_names, transform=flip)
        if split == "test":
            return pictures
        return self.hold_out(pictures, split)
