"""Yours: where samples come from, how they become batches, and how these reach the device."""

from project.data.base import BatchedDataModule, Split, SplitDataModule, TensorImages, TensorRows
from project.data.mnist import MNISTDataModule  # feature: mnist

__all__ = ["BatchedDataModule", "Split", "SplitDataModule", "TensorImages", "TensorRows"]
__all__ += ["MNISTDataModule"]  # feature: mnist
