"""Values as a checkpoint can hold them: plain ones, or an error that names the place."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from unbroken.parts.plain_values import SPARSE
from unbroken.storage.contents import MAPPINGS, PLAIN, SEQUENCES, leaves, record_in


class NotPlain(TypeError):
    """A value that a checkpoint cannot hold; its message names the place."""


def make_hyperparameters_plain(checkpoint: dict[str, Any]) -> None:
    """Keep ``hparams`` that are no plain data as the configuration has them, for
    ``load_from_checkpoint`` to make them again. What is not from there is kept as text, such as a
    path, or as numbers and lists where it is NumPy's.
    """
    # A class of OmegaConf
    checkpoint.pop("hparams_type", None)
    for key, part in {"hyper_parameters": "model", "datamodule_hyper_parameters": "data"}.items():
        if key not in checkpoint:
            continue
        given = dict(checkpoint[key])
        odd = {name: value for name, value in given.items() if _reason_not_plain(value, name)}
        for name, value in odd.items():
            given[name] = value.tolist() if hasattr(value, "tolist") else str(value)
        config = record_in(checkpoint).get("config", {})
        written = config.get(part) or {}
        arguments = written.get("init_args", {})
        if odd and odd.keys() <= arguments.keys():
            for name in odd:
                given[name] = arguments[name]
            given["_class_path"] = written["class_path"]
            given["_instantiator"] = "lightning.pytorch.cli.instantiate_module"
        checkpoint[key] = given


def made_plain(value: Any, place: str) -> Any:
    """``value`` as it is saved: NumPy's numbers become Python's, an expanded tensor a whole one.
    Containers are new; the run's own stay as they are.

    Raises:
        NotPlain: What would not load again, by name.
    """
    if isinstance(value, Tensor):
        return _tensor_as_saved(value, place)
    if isinstance(value, numpy.generic):
        number = value.item()
        if isinstance(number, numpy.generic):
            # Python has no number of that precision, as of a longdouble.
            raise NotPlain(_no_plain(value, place))
        return made_plain(number, place)
    kind = type(value)
    if kind in MAPPINGS:
        return _mapping_made_plain(value, place)
    if kind is set:
        return {made_plain(item, f"{place}[...]") for item in value}
    if kind in SEQUENCES:
        return kind([made_plain(item, f"{place}[{index}]") for index, item in enumerate(value)])
    if kind not in PLAIN:
        raise NotPlain(_no_plain(value, place))
    return value


def _mapping_made_plain(value: Any, place: str) -> Any:
    made = type(value)()
    for key, item in value.items():
        plain_key = made_plain(key, f"a key of {place}")
        made[plain_key] = made_plain(item, f"{place}[{key!r}]")
    # nn.Module keeps the versions of its parts as an attribute of a state dict.
    if isinstance(value, OrderedDict):
        vars(made).update(vars(value))
    return made


def _tensor_as_saved(tensor: Tensor, place: str) -> Tensor:
    if is_lazy(tensor):
        raise NotPlain(
            f"{place} is the weight of a lazy layer that no batch has passed, and has no size:"
            " use the layer, or remove it."
        )
    if tensor.is_meta:
        raise NotPlain(f"{place} is a tensor without values (on the device meta).")
    if tensor.layout != torch.strided:
        if tensor.layout not in SPARSE:
            raise NotPlain(
                f"{place} is a tensor of layout {tensor.layout}, which would not load again."
            )
        return tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
    if tensor.is_nested:
        raise NotPlain(f"{place} is a nested tensor, which would not load again.")
    if tensor.is_quantized:
        raise NotPlain(f"{place} is a quantized tensor, which would not load again.")
    is_foreign = type(tensor) not in (Tensor, nn.Parameter) and type(tensor.detach()) is not Tensor
    if is_foreign and not hasattr(tensor, "__tensor_flatten__"):
        kind = type(tensor).__name__
        raise NotPlain(f"{place} is a tensor of the class {kind}, which would not load again.")
    # An expanded tensor says that it is larger than what it stores. Such a file would be refused.
    if is_expanded(tensor):
        tensor = tensor.contiguous()
    # A view that negates or conjugates as it is read, and attributes of a tensor, are no plain
    # values.
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach() if vars(tensor) else tensor


def is_expanded(tensor: Tensor) -> bool:
    """Whether several places of a tensor are one place in memory, as after ``expand``."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_nested:
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in sizes)


def _no_plain(value: Any, place: str) -> str:
    kind = type(value)
    allowed = "checkpoints hold plain values only (numbers, text, lists, dicts, tensors)"
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{place} is a {name}, which would not load again: {allowed}."


def _reason_not_plain(value: Any, place: str) -> str | None:
    """What in a value is no plain data and would not load with ``weights_only=True``, in words.
    None: nothing.
    """
    for where, leaf in leaves(value, place):
        if type(leaf) not in PLAIN and not isinstance(leaf, Tensor):
            return _no_plain(leaf, where)
    return None


def plain_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Those entries that a checkpoint can hold."""
    found: dict[str, Any] = {}
    for name, value in entries.items():
        with suppress(NotPlain):
            found[name] = made_plain(value, name)
    return found
