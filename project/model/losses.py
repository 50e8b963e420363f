"""The loss by its name: one form of it is trained, another is logged."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from project.model.by_name import make, named_class

# Arguments that change what is trained. A logged loss is without them, so that runs can be compared
# by it.
TRAINED_ONLY = ("weight", "label_smoothing")
HALF = (torch.float16, torch.bfloat16)


class Losses(NamedTuple):
    """A loss in two forms."""

    trained: nn.Module
    measured: (
        nn.Module
    )  # without weights and smoothing; one value per sample where the class can give these
    differ: bool  # whether the two give different means


def make_losses(name: str, arguments: dict[str, Any]) -> Losses:
    """The loss of ``torch.nn`` with this name, or of this import path. A list of numbers becomes a
    tensor.

    Raises:
        UserError: There is no such class, or it does not take these arguments.
    """
    loss_class = named_class("--model.loss", name, nn, nn.Module)
    arguments = {key: as_argument(value) for key, value in arguments.items()}
    trained = make("--model.loss", loss_class, arguments)
    if any(True for _ in trained.parameters()):
        # The loss has weights of its own. Only those of this object are trained, so it must be
        # measured, too.
        return Losses(trained, trained, differ=False)
    plain = {key: value for key, value in arguments.items() if key not in TRAINED_ONLY}
    differ = len(plain) < len(arguments)
    if "reduction" in inspect.signature(loss_class).parameters:
        plain["reduction"] = "none"
    return Losses(trained, make("--model.loss", loss_class, plain), differ)


def as_argument(value: Any) -> Any:
    """A list of numbers, such as class weights, as the tensor that PyTorch's losses want. Others as
    they are.
    """
    if isinstance(value, list):
        return torch.tensor(value, dtype=torch.float32)
    return value


def evaluate_loss(loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of outputs, in float32 where these are of half precision.

    Class numbers stay integers. Targets of the outputs' own shape, such as labels of 0 and 1, get
    the outputs' type.
    """
    if outputs.dtype in HALF:
        outputs = outputs.float()
        loss = loss.float()
    if outputs.shape == targets.shape:
        targets = targets.to(outputs.dtype)
    return loss(outputs, targets)
