"""Data modules: where images come from, how batches are made, and how they reach the device."""

from project.data.base import BatchedDataModule, Split
from project.data.mnist import MNISTDataModule
from project.data.sampler import TensorImages

__all__ = ["BatchedDataModule", "MNISTDataModule", "Split", "TensorImages"]
