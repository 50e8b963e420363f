"""Where samples come from, how they become batches, and how these reach the device."""

from unbroken.data.base import Split as Split
from unbroken.data.base import SplitDataModule as SplitDataModule
from unbroken.data.base import TensorRows as TensorRows
from unbroken.data.images import BatchedDataModule as BatchedDataModule
from unbroken.data.images import TensorImages as TensorImages
