"""What the engine and the commands may ask of your classes. Everything here is optional.

A module, data module, dataset, loader or callback that has these names is asked for them; one that
lacks them is used as it is. Nothing has to be inherited: ``isinstance(thing,
contract.NamesMetric)`` is true for any object that has the names of the protocol. A type checker
compares the arguments as well.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

# What typing adds to every Protocol.
OF_TYPING = ("__init__", "__subclasshook__")


class AsksByName(type(Protocol)):  # type: ignore[misc]
    """Lets ``isinstance`` ask an object for a Protocol's names as ``hasattr`` does.

    From Python 3.12 on, ``isinstance`` passes ``__getattr__`` by. But that is where a module has
    its layers and buffers, and a wrapper the methods of what it wraps.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return all(hasattr(instance, name) for name in names_of(cls))


@functools.cache
def names_of(protocol: type) -> frozenset[str]:
    """The attributes and methods that a Protocol asks for."""
    names: set[str] = set()
    for kind in protocol.__mro__:
        if isinstance(kind, AsksByName):
            names |= inspect.get_annotations(kind).keys()
            for name, value in vars(kind).items():
                if isinstance(value, FunctionType | property) and name not in OF_TYPING:
                    names.add(name)
    return frozenset(names)


# What a LightningModule may have


@runtime_checkable
class NamesMetric(Protocol, metaclass=AsksByName):
    """A module that names the metric by which checkpoints are compared.

    ``--monitor`` wins over it.
    """

    monitor: str


@runtime_checkable
class NamesMode(Protocol, metaclass=AsksByName):
    """A module that says whether a small or a large value of its metric is good.

    ``--mode`` wins over it.
    """

    mode: Literal["min", "max"]


@runtime_checkable
class KeepsSums(Protocol, metaclass=AsksByName):
    """A module, or an object in an attribute of it, that adds up values outside of torchmetrics and
    ``self.log``, and wants them in a checkpoint.
    """

    def metric_state(self) -> dict[str, Tensor]:
        """The sums so far: tensors by name."""
        ...

    def load_metric_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`metric_state` returned."""
        ...


@runtime_checkable
class HasNetwork(Protocol, metaclass=AsksByName):
    """A module whose trained network is one part of it. Tables name it, and ``export`` writes the
    weights of it alone where the module has no others.
    """

    network: nn.Module


@runtime_checkable
class ChoosesMemoryFormat(Protocol, metaclass=AsksByName):
    """A module that says how the channels of its images lie in memory."""

    memory_format: torch.memory_format


@runtime_checkable
class NamesClasses(Protocol, metaclass=AsksByName):
    """A module or data module that names the classes that it tells apart, in the order of the
    outputs.
    """

    class_names: list[str]


@runtime_checkable
class NamesLabel(Protocol, metaclass=AsksByName):
    """A data module that has a word for what its classes are, such as ``species``. It is the column
    of ``predict`` with the most likely class, which is ``label`` otherwise.
    """

    label_name: str


@runtime_checkable
class ComparesOutputs(Protocol, metaclass=AsksByName):
    """A module that knows how far the outputs of its exported form may be from its own."""

    def outputs_agree(self, ours: Any, theirs: Any) -> bool:
        """Whether ``theirs``, of the exported file, are as good as ``ours``."""
        ...


@runtime_checkable
class ValidatesTrainedWeights(Protocol, metaclass=AsksByName):
    """A module or callback that says whether its hooks at a validation's start leave the weights as
    they are.

    Where a hook may put other weights in, a stop inside a validation needs a copy of the trained
    ones.
    """

    validates_trained_weights: bool


# What a LightningDataModule may have


@runtime_checkable
class NamesSource(Protocol, metaclass=AsksByName):
    """A data module that says where its samples come from, such as ``files`` or ``sample``."""

    data_source: str | None


@runtime_checkable
class StaysWithSource(Protocol, metaclass=AsksByName):
    """A data module with several sources.

    A run that goes on must use the source that it began with.
    """

    def stay_with(self, data_source: str | None) -> None:
        """Use this source and no other."""
        ...


@runtime_checkable
class MayDownload(Protocol, metaclass=AsksByName):
    """A data module that fetches files. Where a stranger's checkpoint is used, it may not, unless
    the user types where the data are.
    """

    may_download: bool


@runtime_checkable
class SaysWhatItFinds(Protocol, metaclass=AsksByName):
    """A data module with a ``root`` that says whether its files lie there, for ``devices``."""

    def state_of_files(self) -> dict[str, Any]:
        """``found`` (bool), the ``folder``, and a ``text`` of one line."""
        ...


@runtime_checkable
class DescribesData(Protocol, metaclass=AsksByName):
    """A data module that learns facts from its files, such as class names.

    ``predict`` needs them without the files.
    """

    def description(self) -> dict[str, Any]:
        """The facts, as plain values. A checkpoint holds them."""
        ...

    def describe(self, description: dict[str, Any]) -> None:
        """Take the facts over from a checkpoint."""
        ...


def describes_data(data: Any) -> TypeGuard[DescribesData]:
    """Whether a data module describes its data. Others may have a text of that name."""
    return isinstance(data, DescribesData) and callable(data.description)


@runtime_checkable
class ShapesImages(Protocol, metaclass=AsksByName):
    """A data module of images, all of one shape."""

    image_shape: tuple[int, int, int]  # channels, height, width


@runtime_checkable
class PreparesFiles(Protocol, metaclass=AsksByName):
    """A data module that turns a file into an input of the network, for ``predict``."""

    def prepare_file(self, path: Path) -> Tensor:
        """The input, without a batch dimension."""
        ...


@runtime_checkable
class PreparesImages(Protocol, metaclass=AsksByName):
    """A data module that turns the pixels of a picture into an input of the network, for
    ``predict``.
    """

    def prepare_image(self, pixels: np.ndarray) -> Any:
        """``pixels``: float32 (height, width, 3) in 0-1.

        Returns the input, a tensor or array without a batch dimension; or a tuple of it and a note
        on the picture, which may be empty.
        """
        ...


@runtime_checkable
class HoldsDataOnDevice(Protocol, metaclass=AsksByName):
    """A data module that keeps whole splits in the device's memory."""

    bytes_on_device: dict[str, int]  # by split


@runtime_checkable
class HasBatchSize(Protocol, metaclass=AsksByName):
    """A data module whose loaders follow this number, or one whose ``hparams`` have it: ``tune``
    and ``benchmark`` set it.
    """

    batch_size: int


@runtime_checkable
class HasEvalBatchSize(Protocol, metaclass=AsksByName):
    """A data module, or its ``hparams``, with another batch size for validation and test."""

    eval_batch_size: int


@runtime_checkable
class StandardizesImages(Protocol, metaclass=AsksByName):
    """A data module whose images get mean 0 and standard deviation 1, channel by channel."""

    mean: list[float]
    std: list[float]


# What a dataset may have


@runtime_checkable
class GathersBatches(Protocol, metaclass=AsksByName):
    """A dataset in memory that gives a whole batch in one call, ready for the step."""

    def gather(self, indices: Tensor) -> Any:
        """``indices``: int64 (batch,). Returns the batch.

        It may draw random numbers from torch's generator in CPU memory for any batch. If it draws
        from others (Python's, NumPy's, the GPU's), it does so for each batch: the first one of an
        epoch tells.
        """
        ...


@runtime_checkable
class HoldsImages(Protocol, metaclass=AsksByName):
    """A dataset whose images lie in memory, all of one shape."""

    images: Tensor  # uint8 in 0-255 or float in 0-1, (count, channels, height, width)
    labels: Tensor  # int64 (count,)


@runtime_checkable
class LivesOnDevice(Protocol, metaclass=AsksByName):
    """A dataset whose tensors lie on a device, where its batches are gathered."""

    device: torch.device


# What a sampler, a loader or a dataset may have


@runtime_checkable
class HasState(Protocol, metaclass=AsksByName):
    """A sampler, loader or dataset that can be saved and gone on with."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is, as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        ...


@runtime_checkable
class OrdersByEpoch(Protocol, metaclass=AsksByName):
    """A sampler, loader or dataset whose order is a function of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """The next pass is of this epoch, counted from 0."""
        ...


@runtime_checkable
class HasWorkers(Protocol, metaclass=AsksByName):
    """A loader that fetches in worker processes."""

    num_workers: int
    persistent_workers: bool  # they live on from epoch to epoch


# What a callback may have


@runtime_checkable
class PausesWhileSaving(Protocol, metaclass=AsksByName):
    """A callback that measures time, and leaves out what a checkpoint takes."""

    def pause_while_saving(self) -> AbstractContextManager[Any]:
        """What happens inside does not count."""
        ...


# What a strategy may have


@runtime_checkable
class CountsWholeModule(Protocol, metaclass=AsksByName):
    """A strategy that cuts the module into shards, and has counted its parameters before."""

    whole_parameters: int  # 0 before the module was cut


# What a sampler or a loader may have, besides the above


@runtime_checkable
class BindsGenerator(Protocol, metaclass=AsksByName):
    """A sampler with a generator of its own.

    If it is torch's, the engine seeds it for each epoch.
    """

    generator: Any


@runtime_checkable
class FetchesSeveral(Protocol, metaclass=AsksByName):
    """A dataset that gives several samples in one call: PyTorch's DataLoader prefers that."""

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        """One sample for each key, in order."""
        ...
