"""Activation checkpointing: less memory for activations, one more forward pass."""

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(network: nn.Module) -> None:
    """Make a network recompute its activations in the backward pass, in place and without new checkpoint keys.

    Every direct child of ``network.blocks`` that has parameters (of ``network`` itself where it has no ``blocks``)
    keeps only its input. Generators are restored for the second pass, so dropout drops the same units.
    """
    for child in getattr(network, "blocks", network).children():
        if any(True for _ in child.parameters()):
            child.forward = _Recomputed(child.forward, child)


class _Recomputed:
    """A module's forward under :func:`torch.utils.checkpoint.checkpoint` while it trains."""

    def __init__(self, forward: Any, module: nn.Module) -> None:
        self.forward = forward
        self.module = module

    def __call__(self, *args: Any) -> Any:
        if not self.module.training:
            return self.forward(*args)
        return checkpoint(self.forward, *args, use_reentrant=False)
