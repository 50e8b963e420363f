"""Yours: where samples come from, how they become batches, and how these reach the device."""

from project.data.base import BatchedDataModule, Split, SplitDataModule, TensorImages, TensorRows
from project.data.mnist import MNISTDataModule

__all__ = ["BatchedDataModule", "MNISTDataModule", "Split", "SplitDataModule", "TensorImages", "TensorRows"]
