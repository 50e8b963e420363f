"""What ``predict_step`` answers, as the columns of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from unbroken import contract
from unbroken.cli.read_checkpoint import Loaded
from unbroken.errors import UserError

# Below this probability a label is unsure. Of a small network's labels on a test set of handwriting
# 90 % of the wrong ones are, and 3 % of the right ones.
UNSURE = 0.7


def predict_batch(loaded: Loaded, batch: Tensor) -> Any:
    """What ``predict_step`` returns for a batch of inputs, without targets."""
    try:
        # A module may ask for gradients inside, as that of a force does: inference mode has none.
        with torch.no_grad():
            answer = loaded.module.predict_step(batch, 0)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise UserError(
            f"{type(loaded.module).__name__}.predict_step must take a batch of inputs alone, "
            f"got {tuple(batch.shape)} of {batch.dtype} ({reason})."
        ) from error
    # What it needed for gradients would stay in memory until all files are read.
    return apply_to_collection(answer, Tensor, Tensor.detach)


def are_probabilities(answer: Any, classes: int) -> bool:
    """Whether an answer is a tensor (batch, classes) of probabilities.

    Several labels may hold at once; their sigmoids do not sum to 1, and are no probabilities of
    classes.
    """
    if not isinstance(answer, Tensor) or answer.ndim != 2 or answer.shape[1] != classes:
        return False
    sums = answer.float().sum(dim=1)  # (batch,)
    return bool((answer >= 0).all() and ((sums - 1).abs() < 1e-3).all())


def to_rows(loaded: Loaded, answers: Sequence[tuple[Any, int]]) -> list[dict[str, Any]]:
    """One row per input. ``answers``: what ``predict_step`` returned, and for how many inputs."""
    names = loaded.class_names
    # Either all batches are labelled, or none: the columns of a table are the same in all rows.
    if not all(are_probabilities(answer, len(names)) for answer, _ in answers):
        names = []
    column = "label"
    if isinstance(loaded.datamodule, contract.NamesLabel):
        column = loaded.datamodule.label_name
    rows: list[dict[str, Any]] = []
    for answer, count in answers:
        table = label_columns(answer, names, column) if names else value_columns(answer)
        if not table or any(len(values) != count for values in table.values()):
            got = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise UserError(
                f"{type(loaded.module).__name__}.predict_step must return a tensor or a dict of "
                f"tensors with an entry for each of {count} inputs, got {got}."
            )
        for values in zip(*table.values(), strict=True):
            row = dict(zip(table, values, strict=True))
            rows.append(row)
    return rows


def label_columns(answer: Tensor, names: Sequence[str], column: str) -> dict[str, list[Any]]:
    """The two most likely classes of each input, with their probabilities.

    ``answer``: (batch, classes), probabilities. ``column``: what the most likely class is called.
    """
    top = answer.float().topk(min(2, len(names)), dim=1)
    first = [names[index] for index in top.indices[:, 0].tolist()]
    second = [names[index] for index in top.indices[:, -1].tolist()]
    return {
        column: first,
        "probability": top.values[:, 0].tolist(),
        "runner_up": second,
        "runner_up_probability": top.values[:, -1].tolist(),
    }


def value_columns(answer: Any) -> dict[str, Sequence[Any]]:
    """The columns of any other answer: ``prediction``, or a dictionary's own keys; of a tuple of
    tensors ``prediction_0``, ``prediction_1`` and so on.

    A tensor (batch, n) becomes n columns, ``NAME_0``, ``NAME_1`` and so on; one of n = 1 keeps its
    name. A value that has no entries per input becomes an empty column.
    """
    parts: Mapping[str, Any] = {"prediction": answer}
    if isinstance(answer, Mapping):
        parts = answer
    elif is_of_tensors(answer):
        parts = {f"prediction_{index}": part for index, part in enumerate(answer)}
    table: dict[str, Sequence[Any]] = {}
    for name, values in parts.items():
        if isinstance(values, Tensor) and values.ndim == 2 and values.shape[1] > 1:
            for index, column in enumerate(values.unbind(dim=1)):
                table[f"{name}_{index}"] = column.tolist()
        else:
            table[str(name)] = one_column(values)
    return table


def is_of_tensors(answer: Any) -> bool:
    """Whether an answer is a tuple of tensors, such as a prediction and its target."""
    return isinstance(answer, tuple) and all(isinstance(part, Tensor) for part in answer)


def one_column(values: Any) -> list[Any] | tuple[Any, ...]:
    """A list with an entry per input; empty where ``values`` are no such thing."""
    if isinstance(values, Tensor) and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if hasattr(values, "tolist"):  # tensors and NumPy's arrays
        values = values.tolist()
    return values if isinstance(values, list | tuple) else []


def note_for(row: Mapping[str, Any], note: str) -> str:
    """The note of a labelled row: that of its preparation, or that the label is unsure."""
    if note:
        return note
    return f"unsure (below {UNSURE:.0%})" if row["probability"] < UNSURE else ""
