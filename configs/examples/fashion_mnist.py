"""Fashion-MNIST: the same file format as MNIST, so only names and numbers differ.

python -m project.fit --config configs/examples/fashion_mnist.yaml
"""

from typing import Any

from unbroken.data import BatchedDataModule, IdxSet, Split
from unbroken.errors import UserError


class FashionMNIST(BatchedDataModule):
    """60,000 + 10,000 pictures of clothes, from ``root/FashionMNIST/raw`` or torchvision's
    download.
    """

    files = IdxSet("FashionMNIST/raw")  # no checksums to compare with
    may_download = True  # the library says no where a stranger's checkpoint asks for the data
    mean = [0.2860]
    std = [0.3530]
    class_names = [
        *("T-shirt", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Boot"),
    ]

    def __init__(
        self, root: str = "data", batch_size: int = 192, shift_pixels: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(batch_size=batch_size, shift_pixels=shift_pixels, **kwargs)
        self.root = root

    def prepare_data(self) -> None:
        missing = self.files.missing(self.root)
        if not missing:
            return
        problem = self.files.download(self.root, fetch) if self.may_download else ""
        if problem or not self.may_download:
            folder = self.files.folder(self.root)
            lacks = f"{folder} lacks {', '.join(missing)}{problem}"
            raise UserError(f"--data.root {self.root}: {lacks}. Put the files there.")

    def make_split(self, split: Split) -> Any:
        if split == "test":
            return self.files.read(self.root, "t10k")
        return self.hold_out(self.files.read(self.root, "train"), split, 1 / 12)


def fetch(folder: str) -> None:
    """Torchvision's download."""
    from torchvision import datasets

    datasets.FashionMNIST(folder, download=True)
