"""Activations recomputed in the backward pass: less memory for one more forward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(network: nn.Module) -> None:
    """Let each part of a network keep only its input, and compute its activations again for the
    gradients.

    The parts are the direct children of ``network.blocks``, where the network has this, else of the
    network, as far as they have parameters. They are changed in place, and the keys of a checkpoint
    stay the same. Random generators are restored for the second pass, so that dropout drops the
    same units in both.
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
    return checkpoint(forward, *args, use_reentrant=False)
