"""Whether a network takes a data module's images and has a logit for each of its classes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from project.errors import UserError


def check_fit(network: nn.Module, datamodule: Any) -> None:
    """Try the network on one blank image. Draws no random number and leaves no trace in batch statistics.

    Args:
        network: Maps images (batch, channels, height, width) to logits (batch, classes).
        datamodule: Has ``image_shape`` and ``class_names``.

    Raises:
        UserError: The network refuses the image or answers with another number of logits.
    """
    weight = next(network.parameters(), None)
    if weight is None or weight.device.type == "meta":
        return
    shape, classes = tuple(datamodule.image_shape), len(datamodule.class_names)
    data = f"{type(datamodule).__name__}'s images of shape {shape} and {classes} classes"
    fix = _fix(network, shape, classes)
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            # .forward: a compiled network would compile itself for this one image
            logits = network.forward(torch.zeros(1, *shape, device=weight.device, dtype=weight.dtype))
    except (RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--model.network {type(network).__name__} must take {data}: {reason}.{fix}") from None
    finally:
        network.train(was_training)
    if tuple(logits.shape) != (1, classes):
        raise UserError(
            f"--model.network {type(network).__name__} must give {classes} logits for {data}, "
            f"got shape {tuple(logits.shape)} for one image.{fix}"
        )


def _fix(network: nn.Module, shape: tuple[int, ...], classes: int) -> str:
    """The flags to try, for a network that has this project's names for its sizes."""
    known = inspect.signature(type(network)).parameters
    flags = {"image_shape": f"[{','.join(map(str, shape))}]", "num_classes": classes}
    typed = [f"--model.network.{name} {value}" for name, value in flags.items() if name in known]
    return f" Try {' '.join(typed)}" if typed else ""
