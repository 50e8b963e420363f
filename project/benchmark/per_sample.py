"""Data as the course and most templates feed them: one Pillow image, one transform, one sample at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from project.data.base import BatchedDataModule
from project.data.sampler import TensorImages


class PerSampleImages(Dataset[tuple[Tensor, int]]):
    """Grey images as torchvision's MNIST gives them with the usual transforms: tensor, Pillow, tensor, normalised.

    Args:
        data: uint8 images (count, 1, height, width) and labels.
        mean: Of images scaled to 0-1.
        std: Of images scaled to 0-1.
    """

    def __init__(self, data: TensorImages, mean: float, std: float) -> None:
        from torchvision import transforms

        self.data = data
        self.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((mean,), (std,))])

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image = Image.fromarray(self.data.images[index, 0].numpy(), mode="L")
        return self.transform(image), int(self.data.labels[index])


def per_sample_loader(datamodule: BatchedDataModule, split: str, **options: Any) -> DataLoader[Any]:
    """A loader over single samples of a split that has been set up; training batches are shuffled.

    Args:
        datamodule: Whose samples, batch size and normalisation.
        split: "train", "val" or "test".
        options: Further arguments of :class:`torch.utils.data.DataLoader`.
    """
    data: Any = datamodule.splits[split]
    dataset = PerSampleImages(data, datamodule.mean[0], datamodule.std[0])
    defaults = {"batch_size": datamodule.batch_size, "shuffle": split == "train"}
    return DataLoader(dataset, **(defaults | options))
