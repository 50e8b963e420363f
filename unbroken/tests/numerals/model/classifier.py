"""The MNIST classifier."""

from typing import Any

import torch
from torch import nn
from unbroken.tasks import ImageClassifier

from numerals.model.networks import ConvNet


class MNISTClassifier(ImageClassifier):
    """:class:`ImageClassifier` with :class:`ConvNet` unless another network is given.

    Args:
        network: Maps standardized images (batch, 1, 28, 28) to logits (batch, 10).
        kwargs: Those of :class:`ImageClassifier`.
    """

    def __init__(self, network: nn.Module | None = None, **kwargs: Any) -> None:
        if network is None:
            network = ConvNet()
        super().__init__(network, **kwargs)
        # Checkpoints of older versions lack both numbers, and were trained with these.
        self.mean = torch.tensor([0.1307])
        self.std = torch.tensor([0.3081])
