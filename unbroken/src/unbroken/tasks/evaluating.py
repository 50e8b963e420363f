"""A network that is put into evaluation for a moment."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Inside, a network changes no batch statistics and draws no random number, as in evaluation.

    Afterwards each of its parts is what it was. Frozen parts stay in evaluation.
    """
    training = [part for part in network.modules() if part.training]
    network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
