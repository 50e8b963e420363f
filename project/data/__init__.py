"""Where the digits come from, and how they become batches."""

from project.data.mnist import MNISTDataModule as MNISTDataModule
