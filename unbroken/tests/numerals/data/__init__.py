"""Where the digits come from, and how they become batches."""

from numerals.data.mnist import MNISTDataModule as MNISTDataModule
