"""A folder of pictures, too many for memory: ``root/train/CLASS/*.png`` and ``root/test/CLASS/*.png``.

python -m project.fit --config configs/examples/png_folder.yaml --data.root pictures
"""

from pathlib import Path
from typing import Any

from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import RandomHorizontalFlip

from project.data import BatchedDataModule, Split
from project.errors import UserError


class PngFolder(BatchedDataModule):
    """Decoded and fitted to 32 × 32 RGB in worker processes; classes are the folders' names, in alphabetical order."""

    image_shape = (3, 32, 32)
    mean = [0.5, 0.5, 0.5]
    std = [0.25, 0.25, 0.25]
    class_names = ["noise", "static", "snow"]  # without a root

    def __init__(self, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        if root and (Path(root) / "train").is_dir():
            self.class_names = sorted(
                folder.name for folder in (Path(root) / "train").iterdir() if folder.is_dir()
            )

    def make_split(self, split: Split) -> Any:
        folder = "test" if split == "test" else "train"
        flip = (
            RandomHorizontalFlip() if split == "train" else None
        )  # random, yet the same again in a resumed run
        if self.root is None:
            pictures: Any = FakeData(
                200, (3, 40, 48), num_classes=3, transform=flip, random_offset=len(folder)
            )
        elif (Path(self.root) / folder).is_dir():
            pictures = ImageFolder(str(Path(self.root) / folder), transform=flip)
        else:
            raise UserError(f"--data.root must hold a folder {folder}, got {self.root}.")
        return pictures if split == "test" else self.hold_out(pictures, split)
