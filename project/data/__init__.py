"""Data modules: where images come from, how batches are made, and how they reach the device."""

from project.data.base import BatchedDataModule, Split
from project.data.loader import TensorImages
from project.data.mnist import MNISTDataModule

__all__ = ["BatchedDataModule", "MNISTDataModule", "Split", "TensorImages"]
