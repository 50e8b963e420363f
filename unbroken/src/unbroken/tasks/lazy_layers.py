"""Layers such as ``nn.LazyLinear``, which learn the size of their input from the first one."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader
from unbroken.errors import UserError
from unbroken.tasks.evaluating import evaluating


@runtime_checkable
class HoldsSplits(Protocol):
    """A data module that keeps its datasets by split."""

    splits: dict[str, Any]

    def collate_function(self) -> Callable[[Any], Any]:
        """The function that turns a list of samples into a batch."""
        ...


def has_no_size(network: nn.Module) -> bool:
    """Whether a network has weights or buffers that are not made yet."""
    tensors = [*network.parameters(), *network.buffers()]
    return any(is_lazy(tensor) for tensor in tensors)


def give_size(network: nn.Module, forward: Callable[[Any], Any], datamodule: Any) -> None:
    """Make the weights of a network's lazy layers, by one training sample.

    It must happen before the optimizer is made, which needs to know which weights decay.

    Args:
        network: Has lazy layers.
        forward: Calls the network with what it wants of a batch.
        datamodule: Set up for training.

    Raises:
        UserError: The data module gives no sample, or the network does not use all of its layers.
    """
    if isinstance(datamodule, HoldsSplits) and "train" in datamodule.splits:
        batch = first_batch(datamodule)
        with evaluating(network), torch.no_grad():
            forward(batch)  # draws the first weights, by the run's own seed
    if has_no_size(network):
        unsized = [part for part in network.modules() if is_lazy_layer(part)]
        kinds = ", ".join(sorted({type(part).__name__ for part in unsized}))
        fix = "Give the sizes, or call the network once on an input where it is made."
        raise UserError(
            f"--model.network {type(network).__name__} has layers without a size ({kinds}). {fix}"
        )


def first_batch(datamodule: HoldsSplits) -> Any:
    """A batch of one training sample. No random generator changes."""
    collate = datamodule.collate_function()
    with isolate_rng():
        loader = DataLoader(datamodule.splits["train"], batch_size=1, collate_fn=collate)
        return next(iter(loader))


def is_lazy_layer(part: nn.Module) -> bool:
    """Whether a layer itself has weights that are not made yet."""
    return any(is_lazy(tensor) for tensor in part.parameters(recurse=False))
