"""A module's forward with inputs and outputs that have names: what is traced, and compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from unbroken.errors import UserError

Outputs = dict[str, Tensor]
# How forward gets its inputs: one after the other, by their names, or in one dictionary
Way = Literal["positions", "names", "dictionary"]
MUST_RETURN = "it must return a tensor, a tuple or a dict of tensors"


class Forward(nn.Module):
    """Calls a module with tensors, one after the other, in the way that its forward wants them.

    Returns the only output, or a dictionary of several; numbers in float32.
    """

    def __init__(self, module: LightningModule, way: Way, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.way = way
        self.names = list(names)

    def forward(self, *inputs: Tensor) -> Any:
        if self.way == "positions":
            output = self.module(*inputs)
        elif self.way == "names":
            output = self.module(**dict(zip(self.names, inputs, strict=True)))
        else:
            output = self.module(dict(zip(self.names, inputs, strict=True)))
        outputs = named(output)
        return outputs["output"] if list(outputs) == ["output"] else outputs


def named(output: Any) -> Outputs:
    """Outputs by name, numbers in float32; those that are None are left out.

    The names are ``output``, or ``output_0``, ... of a tuple, or a dictionary's own keys.
    """
    if isinstance(output, Mapping):
        parts = {str(name): part for name, part in output.items()}
    elif isinstance(output, tuple | list):
        parts = {f"output_{index}": part for index, part in enumerate(output)}
    else:
        parts = {"output": output}
    found: Outputs = {}
    for name, part in parts.items():
        if isinstance(part, Tensor):
            found[name] = part.float() if part.is_floating_point() else part
        elif part is not None:
            raise TypeError(f"{MUST_RETURN}, got a {type(part).__name__}")
    if not found:
        raise TypeError(f"{MUST_RETURN}, got None")
    return found


@dataclass(frozen=True)
class Output:
    """Something that forward returns."""

    # Its name in what forward returns, and in the files; they differ where an input has the same
    key: str
    name: str
    # Whether its first dimension is the batch; else it has the same shape for every batch
    is_batched: bool = True


class NoBatchDimension(UserError):
    """An output's shape depends on the batch in a way that cannot be exported."""


def find_outputs(forward: Forward, inputs: tuple[Tensor, ...]) -> list[Output]:
    """What forward returns, by its answers to batches of 1, 2 and 3.

    Raises:
        NoBatchDimension: where an output's shape depends on the batch, and not by its first
            dimension alone.
    """
    sizes = (1, 2, 3)
    answers = []
    with torch.no_grad():
        for size in sizes:
            batch = tuple(resized(tensor, size) for tensor in inputs)
            answers.append(named(forward(*batch)))
    outputs = []
    for key in answers[0]:
        shapes = [tuple(answer[key].shape) for answer in answers]
        has_batch = all(shape[:1] == (size,) for shape, size in zip(shapes, sizes, strict=True))
        is_batched = has_batch and len({shape[1:] for shape in shapes}) == 1
        if not is_batched and len(set(shapes)) > 1:
            raise NoBatchDimension(
                f"{type(forward.module).__name__}.forward cannot be exported: {key} must have the "
                f"batch as its first dimension, got the shape {shapes[0]} for one sample and "
                f"{shapes[1]} for two. If .squeeze() does that, .squeeze(-1) names the dimension."
            )
        outputs.append(Output(key, key, is_batched))
    return outputs


def resized(tensor: Tensor, size: int) -> Tensor:
    """A batch of ``size`` samples, which are repeated where there are fewer."""
    copies = -(-size // len(tensor))
    return torch.cat([tensor] * copies)[:size]


def answer(model: Callable[..., Any], inputs: tuple[Tensor, ...], size: int = 1000) -> Outputs:
    """What a model returns for inputs in batches of ``size``, by name.

    Outputs of the batches are put one after the other; one without dimensions is the first batch's.
    A model may ask for gradients inside, as that of a force does: inference mode has none.
    """
    batches = zip(*(tensor.split(size) for tensor in inputs), strict=True)
    with torch.no_grad():
        parts = [named(model(*batch)) for batch in batches]
    return {name: joined([part[name].detach() for part in parts]) for name in parts[0]}


def joined(parts: list[Tensor]) -> Tensor:
    """One output of all batches."""
    return parts[0] if parts[0].ndim == 0 else torch.cat(parts)


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
