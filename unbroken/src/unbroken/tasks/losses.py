"""The loss by its name: one form of it is trained, another is logged."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from unbroken.errors import UserError, require
from unbroken.tasks.by_name import make, named_class

# Arguments that change what is trained. A logged loss is without them, so that runs can be compared
# by it.
TRAINED_ONLY = ("weight", "label_smoothing")
HALF = (torch.float16, torch.bfloat16)

# What an error says that comes from the device, such as a lack of memory, and not from the shapes.
DEVICE_WORDS = ("memory", "CUDA", "HIP error", "cuBLAS", "cuDNN", "MPS")


class Losses(NamedTuple):
    """A loss in two forms."""

    trained: nn.Module
    measured: (
        nn.Module
    )  # without weights and smoothing; one value per sample where the class can give these
    differ: bool  # whether the two give different means


def make_losses(name: str, arguments: dict[str, Any]) -> Losses:
    """The loss of ``torch.nn`` with this name, or of this import path.

    A list of numbers becomes a tensor.

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
    """A list of numbers, such as class weights, as the tensor that PyTorch's losses want.

    Others as they are.
    """
    if isinstance(value, list):
        return torch.tensor(value, dtype=torch.float32)
    return value


def evaluate_loss(loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of outputs, in float32 where these are of half precision.

    Class numbers stay integers. Targets of the outputs' own shape, such as labels of 0 and 1, get
    the outputs' type.

    Raises:
        UserError: A loss of PyTorch's refuses outputs and targets of these shapes, or the loss
            gives no tensor. An error in a loss of the user's own keeps its traceback.
    """
    if outputs.dtype in HALF:
        outputs = outputs.float()
        loss = loss.float()
    if outputs.shape == targets.shape:
        targets = targets.to(outputs.dtype)
    try:
        value = loss(outputs, targets)
    except (RuntimeError, ValueError, IndexError) as error:
        if not is_refusal(loss, error):
            raise
        shapes = f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
        told = " ".join(str(error).split())
        option = f"--model.loss {type(loss).__name__}"
        raise UserError(
            f"{option} refuses outputs and targets of shapes {shapes}: {told[:300]}"
        ) from None
    if not isinstance(value, Tensor):
        option = f"--model.loss {type(loss).__name__}"
        require(False, option, "give a tensor", f"a {type(value).__name__}")
    return value


def counted_targets(loss: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Which targets a loss does not ignore, bool in their shape; None: it ignores none."""
    ignored = getattr(loss, "ignore_index", None)
    if not isinstance(ignored, int):
        return None
    if isinstance(loss, nn.CrossEntropyLoss) and outputs.shape == targets.shape:
        # These are class probabilities, (batch, classes, ...), and PyTorch ignores none of them.
        return None
    return targets != ignored


def is_refusal(loss: nn.Module, error: Exception) -> bool:
    """Whether a loss of PyTorch's says that it does not take such outputs and targets."""
    is_pytorchs = type(loss).__module__.startswith("torch.")
    is_of_the_device = any(word in str(error) for word in DEVICE_WORDS)
    return is_pytorchs and not is_of_the_device
