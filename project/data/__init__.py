"""Yours: where samples come from, how they become batches, and how these reach the device."""

from project.data.base import Split as Split  # feature: supervised
from project.data.base import SplitDataModule as SplitDataModule  # feature: supervised
from project.data.base import TensorRows as TensorRows  # feature: supervised
from project.data.images import BatchedDataModule as BatchedDataModule  # feature: images
from project.data.images import TensorImages as TensorImages  # feature: images
from project.data.mnist import MNISTDataModule as MNISTDataModule  # feature: mnist
