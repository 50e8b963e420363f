"""A folder of pictures, too many for memory: ``root/train/CLASS/*.png`` and ``root/test/CLASS/*.png``.

python -m project.fit --config configs/examples/png_folder.yaml --data.root pictures
"""

from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder
from torchvision.transforms import RandomHorizontalFlip

from project.data import BatchedDataModule, Split
from project.errors import UserError


class PngFolder(BatchedDataModule):
    """Decoded and fitted to 32 × 32 RGB in worker processes; classes are the folders' names, in alphabetical order."""

    image_shape = (3, 32, 32)
    mean = [0.5, 0.5, 0.5]
    std = [0.25, 0.25, 0.25]

    def __init__(self, root: str = "pictures", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        if (Path(root) / "train").is_dir():
            self.class_names = sorted(folder.name for folder in (Path(root) / "train").iterdir() if folder.is_dir())

    def make_split(self, split: Split) -> Any:
        folder = Path(self.root) / ("test" if split == "test" else "train")
        if not folder.is_dir():
            raise UserError(f"--data.root must hold a folder {folder.name}, got {self.root}.")
        flip = RandomHorizontalFlip() if split == "train" else None  # random, yet the same again in a resumed run
        pictures = ImageFolder(str(folder), transform=flip)
        return pictures if split == "test" else self.hold_out(pictures, split)
