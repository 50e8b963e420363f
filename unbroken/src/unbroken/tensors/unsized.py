"""Layers such as ``nn.LazyLinear``, whose weights are made by the first batch that passes them."""

from torch import nn
from torch.nn.parameter import is_lazy

CANNOT_BE_SHARED = (
    "several ranks cannot train lazy layers, whose sizes come with the first batch. Give the layers"
    " their sizes, or run a batch through them in the module's configure_model."
)
CANNOT_BE_AVERAGED = (
    "the weights of lazy layers cannot be averaged: their sizes come with the first batch. Give the"
    " layers their sizes, or run a batch through them in the module's configure_model."
)


def has_lazy_layers(module: nn.Module) -> bool:
    """Whether a module has weights that are not made yet."""
    return any(is_lazy(parameter) for parameter in module.parameters())
