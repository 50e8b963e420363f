"""Activations recomputed in the backward pass: less memory for one more forward pass."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(network: nn.Module) -> None:
    """Let each part of a network keep only its input, and compute its activations again for the
    gradients.

    The parts are the direct children of ``network.blocks``, where the network has this, else of the
    network, as far as they have parameters. They are changed in place, and the keys of a checkpoint
    stay the same. Random generators are restored for the second pass, so that dropout drops the
    same units in both. What the second pass counts, such as the running statistics of a batch norm,
    is dropped: the first has counted it.
    """
    parts = getattr(network, "blocks", network)
    for part in parts.children():
        has_parameters = any(True for _ in part.parameters())
        if has_parameters:
            # A partial and no closure: a deep copy of the network must call its own layers.
            part.forward = partial(forward_again, part, part.forward)


def forward_again(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """``forward`` of a module that recomputes its activations while it is trained."""
    if not module.training:
        return forward(*args)
    if torch.compiler.is_compiling():
        # A compiled backward pass recomputes values, and changes no buffer.
        return checkpoint(forward, *args, use_reentrant=False)
    contexts = partial(first_and_second_pass, module)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts)


def first_and_second_pass(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What is entered for the forward pass, and for the one that recomputes it.

    The second pass begins with the buffers that the first one began with: a spectral norm computes
    its weights from them.
    """
    before = []
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            before.append((layer, name, buffer.clone()))
    return nullcontext(), with_buffers(before)


@contextmanager
def with_buffers(buffers: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Inside, layers have copies of these buffers; afterwards their own, as they were before."""
    own = []
    for layer, name, buffer in buffers:
        own.append((layer, name, getattr(layer, name)))
        setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, name, buffer in own:
            setattr(layer, name, buffer)
