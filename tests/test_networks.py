"""The networks: their sizes, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from unbroken.errors import UserError

from project.model import MLP, ConvNet


@pytest.mark.parametrize(("network", "count"), [(MLP(), 235_146), (ConvNet(), 29_434)])
def test_a_network_has_as_many_parameters_as_the_pages_say(network: nn.Module, count: int) -> None:
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@pytest.mark.parametrize("make", [MLP, ConvNet])
@pytest.mark.parametrize("count", [0, 3])
def test_a_network_gives_a_logit_for_each_class(make: Any, count: int) -> None:
    network = make(image_shape=(3, 32, 40), num_classes=7, dropout=0.5).eval()
    assert network(torch.rand(count, 3, 32, 40)).shape == (count, 7)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (MLP, {"hidden": []}, r"^--model.network.hidden must list some sizes of at least 1, got"),
        (ConvNet, {"widths": [16, 0, 64]}, r"^--model.network.widths must list 3 sizes"),
        (ConvNet, {"kernels": [5]}, r"^--model.network.kernels must list 3 sizes"),
        (ConvNet, {"image_shape": (1, 8, 8)}, r"the stages leave nothing of images of \(1, 8, 8\)"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_a_line(
    make: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make(**arguments)
