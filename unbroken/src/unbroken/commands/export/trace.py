"""Traces a module's forward as a graph with a free batch size."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

import torch
from torch import Tensor
from unbroken.cli.read_checkpoint import Loaded
from unbroken.commands.export.forward import Forward, first_line, named
from unbroken.commands.export.samples import Samples
from unbroken.errors import UserError

# Words in what torch.export says, and what they mean in terms of the module
MEANINGS = {
    "data-dependent": "it decides by the values of its inputs, as `if x.sum() > 0` does. "
    "A graph has no such branch: torch.where chooses between two results",
    "Constraints violated": "it is written for certain batch sizes: it branches on the batch's "
    "size, or has a fixed size where the batch's should stand, as .view(16, 4)",
    "fake tensor in the exported program": "it asks for gradients, or for something else that"
    " PyTorch cannot trace",
    ".numpy()": "it leaves PyTorch by .numpy(). A graph holds operations on tensors alone",
}


def trace(loaded: Loaded, samples: Samples) -> torch.export.ExportedProgram:
    """The module's forward as a graph with a free batch size; outputs in float32.

    Raises:
        UserError: where forward has no graph, with the reason in terms of the module.
    """
    name = type(loaded.module).__name__
    forward = Forward(loaded.module, samples.way, samples.names).eval()
    example = tuple(tensor[:2].clone() for tensor in samples.exported)
    check_repeats_itself(forward, example, name)
    batch = torch.export.Dim("batch", min=1)
    sizes = tuple({0: batch} for _ in example)
    try:
        with torch.no_grad(), without_notes():
            exported = torch.export.export(forward, example, dynamic_shapes=(sizes,))
    except Exception as error:
        raise UserError(f"{name}.forward cannot be exported: {meaning(error)}.") from error
    for node in exported.graph.nodes:
        # The source lines would carry the paths of this machine.
        node.meta.pop("stack_trace", None)
    return exported


def check_repeats_itself(forward: Forward, example: tuple[Tensor, ...], name: str) -> None:
    """A UserError where forward answers the same question in two ways: no export could agree."""
    with torch.no_grad():
        first = named(forward(*example))
        second = named(forward(*example))
    for key, value in first.items():
        if not torch.equal(value.nan_to_num(), second[key].nan_to_num()):
            raise UserError(
                f"{name}.forward cannot be exported: it gives two answers to the same input. "
                "Random numbers belong behind `if self.training`."
            )


def meaning(error: Exception) -> str:
    """What torch.export's error means in terms of the module; else its own first line."""
    text = first_line(error)
    for words, means in MEANINGS.items():
        if words in text:
            return means
    return text.rstrip(".")


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Keep torch from printing half a graph before the error that it raises."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
