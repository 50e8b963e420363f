"""Compares the files of an export with the module that they were made from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from unbroken import contract
from unbroken.cli.read_checkpoint import Loaded
from unbroken.commands.export.forward import Forward, Outputs, answer
from unbroken.commands.export.samples import Samples
from unbroken.commands.export.write import weights_of, written_part
from unbroken.errors import UserError
from unbroken.tables import Row

# One sample, a size that fits no vector unit, and many: kernels, and so the rounding, differ.
BATCH_SIZES = (1, 7, 1024)
# The largest difference of a value is float32 rounding of the sums, times 10. The second is
# relative, for networks with larger values.
ABSOLUTE_TOLERANCE = 1e-4
RELATIVE_TOLERANCE = 1e-5


class CannotRun(UserError):
    """The ONNX file holds an operation that onnxruntime has not on a CPU."""


def compare(files: Mapping[str, Path], loaded: Loaded, samples: Samples) -> list[Row]:
    """One row per file and batch size.

    A row has the labels that differ, the largest difference of a value, and whether that agrees.

    Raises:
        CannotRun: The ONNX file cannot be run here, so that it cannot be compared.
    """
    forward = Forward(loaded.module, samples.way, samples.names)
    models: dict[str, Callable[..., Any]] = {}
    if "onnx" in files:
        models["onnx"] = onnx_model(files["onnx"], samples)
    if "pt2" in files:
        models["torch.export"] = torch.export.load(files["pt2"]).module()
    expected = answer(forward, samples.inputs)
    rows: list[Row] = []
    for kind, model in models.items():
        for size in BATCH_SIZES:
            started = time.perf_counter()
            found = answer(model, samples.exported, size)
            seconds = time.perf_counter() - started
            first_batch = tuple(tensor[:size] for tensor in samples.inputs)
            found, wanted = comparable(found, expected, samples, forward, first_batch)
            compared = difference(wanted, found, loaded, samples)
            row = {"file": kind, "batch_size": size, **compared, "seconds": seconds}
            rows.append(row)
    if "safetensors" in files:
        rows.append(compare_loaded(files["safetensors"], expected, loaded, samples))
    return rows


def comparable(
    found: Outputs,
    expected: Outputs,
    samples: Samples,
    forward: Forward,
    first_batch: tuple[Tensor, ...],
) -> tuple[Outputs, Outputs]:
    """Both answers, but of outputs without a batch dimension only that of the first batch.

    Such an output may depend on which samples are together in a batch.
    """
    if all(output.is_batched for output in samples.outputs):
        return found, expected
    found = dict(found)
    expected = dict(expected)
    with_first = answer(forward, first_batch, len(first_batch[0]))
    for output in samples.outputs:
        if not output.is_batched:
            expected[output.key] = with_first[output.key]
            found[output.key] = first_part(found[output.key], with_first[output.key])
    return found, expected


def first_part(joined: Tensor, like: Tensor) -> Tensor:
    """The first batch's part of outputs that were put one after the other."""
    return joined if joined.ndim == 0 else joined[: len(like)]


def difference(
    expected: Outputs, found: Outputs, loaded: Loaded, samples: Samples
) -> dict[str, Any]:
    """How far an export's answers are from the module's own, and whether they agree."""
    row: dict[str, Any] = {"samples": len(samples.inputs[0])}
    agrees = outputs_agree(expected, found, loaded)
    if samples.classes:
        labels = expected["output"].argmax(dim=1)
        different = int((labels != found["output"].argmax(dim=1)).sum())
        row["different_labels"] = different
        agrees = agrees and different == 0
    row["largest_difference"] = max(
        largest_difference(value, found[name]) for name, value in expected.items()
    )
    row["agrees"] = agrees
    return row


def outputs_agree(expected: Outputs, found: Outputs, loaded: Loaded) -> bool:
    """Whether an export's answers are good enough, by the module's own measure where it has one."""
    module: Any = loaded.module
    if isinstance(module, contract.ComparesOutputs):
        if len(expected) == 1:
            (name,) = expected
            return bool(module.outputs_agree(expected[name], found[name]))
        return bool(module.outputs_agree(expected, found))
    return all(
        torch.allclose(
            value.double(),
            found[name].double(),
            rtol=RELATIVE_TOLERANCE,
            atol=ABSOLUTE_TOLERANCE,
            equal_nan=True,
        )
        for name, value in expected.items()
    )


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of a value, 0 without values."""
    if ours.numel() == 0:
        return 0.0
    return float((ours.double() - theirs.double()).abs().max())


def onnx_model(path: Path, samples: Samples) -> Callable[..., Outputs]:
    """An ONNX file as a function of tensors, with the outputs by their keys in forward's answer."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Its own default ignores a container's limit.
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # Its errors have no class of their own in common.
        reason = " ".join(str(error).split())
        raise CannotRun(
            f"{path.name} was not written: onnxruntime cannot run it on a CPU, so it was not"
            f" compared ({reason}). Layers in bfloat16 are one cause."
        ) from error
    keys = [output.key for output in samples.outputs]
    names = [output.name for output in samples.outputs]

    def model(*inputs: Tensor) -> Outputs:
        arrays = {name: tensor.numpy() for name, tensor in zip(samples.names, inputs, strict=True)}
        tensors = [torch.as_tensor(array) for array in session.run(names, arrays)]
        return dict(zip(keys, tensors, strict=True))

    return model


def compare_loaded(path: Path, expected: Outputs, loaded: Loaded, samples: Samples) -> Row:
    """The row of the weights: the module's answers once it has loaded them from the file.

    The module has none of its own then: a weight that the file lacks makes another answer.
    """
    from safetensors.torch import load_file

    with torch.no_grad():
        for tensor in [*loaded.module.parameters(), *weights_of(loaded).values()]:
            tensor.zero_()
    written_part(loaded).load_state_dict(load_file(path), strict=False)
    forward = Forward(loaded.module, samples.way, samples.names)
    found = answer(forward, samples.inputs)
    return {"file": "safetensors", **difference(expected, found, loaded, samples)}


def compare_weights(path: Path, loaded: Loaded) -> Row:
    """The row of the weights alone: whether every tensor is the same, bit for bit."""
    from safetensors.torch import load_file

    ours = weights_of(loaded)
    theirs = load_file(path)
    is_same = ours.keys() == theirs.keys()
    for name, value in ours.items():
        # Compared as bytes: a number that is not one equals nothing, itself included.
        is_same = is_same and as_bytes(value) == as_bytes(theirs[name])
    return {"file": "safetensors", "tensors": len(ours), "agrees": is_same}


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor's values."""
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
