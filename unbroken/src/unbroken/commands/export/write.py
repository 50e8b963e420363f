"""Writes the files of an export, and what each says of itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from unbroken import __version__, contract
from unbroken.cli.read_checkpoint import Loaded
from unbroken.commands.export.forward import Forward, answer, first_line
from unbroken.commands.export.samples import Samples
from unbroken.errors import UserError


def write_files(
    files: Mapping[str, Path],
    loaded: Loaded,
    program: torch.export.ExportedProgram,
    samples: Samples,
) -> None:
    """Write the file of each format in ``files``."""
    facts = metadata(loaded, samples)
    with warnings.catch_warnings():
        # Internal ones of torch, such as about weights that share a group
        warnings.simplefilter("ignore")
        if "pt2" in files:
            extra = {"metadata.json": json.dumps(facts, indent=2)}
            torch.export.save(program, files["pt2"], extra_files=extra)
        if "onnx" in files:
            write_onnx(files["onnx"], loaded, program, samples, facts)
    if "safetensors" in files:
        write_weights(files["safetensors"], loaded, facts)


def write_onnx(
    path: Path,
    loaded: Loaded,
    program: torch.export.ExportedProgram,
    samples: Samples,
    facts: dict[str, str],
) -> None:
    """Write ONNX, graph and weights in one file."""
    import onnx

    try:
        converted = torch.onnx.export(
            program,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=samples.names,
            output_names=[output.name for output in samples.outputs],
            dynamic_shapes=[{0: "batch"} for _ in samples.names],
        )
    except Exception as error:
        name = type(loaded.module).__name__
        raise UserError(f"{name} has no form in ONNX: {first_line(error)}") from error
    assert converted is not None
    model = converted.model_proto
    graph = model.graph
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, graph):
        # torch's notes on where each node came from
        del part.metadata_props[:]
    onnx.helper.set_model_props(model, facts)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())


def write_weights(path: Path, loaded: Loaded, facts: dict[str, str]) -> None:
    """Write the weights and buffers of the :func:`written_part` as safetensors."""
    from safetensors.torch import save

    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    weights = {name: value.clone().contiguous() for name, value in weights_of(loaded).items()}
    # save_file would make the file readable by its owner alone.
    path.write_bytes(save(weights, facts))


def weights_of(loaded: Loaded) -> dict[str, Tensor]:
    """The tensors of the :func:`written_part`, by name; a state of another kind has no place in the
    file.
    """
    state = written_part(loaded).state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def written_part(loaded: Loaded) -> nn.Module:
    """The network, where all parameters of the module lie in it; else the whole module."""
    module = loaded.module
    if not isinstance(module, contract.HasNetwork) or not isinstance(module.network, nn.Module):
        return module
    of_network = {id(parameter) for parameter in module.network.parameters()}
    has_all = all(id(parameter) in of_network for parameter in module.parameters())
    return module.network if has_all else module


def metadata(loaded: Loaded, samples: Samples | None = None) -> dict[str, str]:
    """What every file says of itself, as text; ``classes``, ``mean`` and ``std`` as JSON.

    Without ``samples``, as for weights alone, nothing is said of inputs, outputs and accuracy.
    """
    facts: dict[str, Any] = {}
    if samples is not None:
        facts |= facts_of_forward(samples)
    facts |= {
        "network": type(written_part(loaded)).__name__,
        "run_name": loaded.run.get("run_name"),
        "checkpoint": loaded.path.name,
        "trained_on": loaded.run.get("data_source"),
        "unbroken_version": __version__,
        "torch_version": torch.__version__,
    }
    metrics = loaded.run.get("metrics") or {}
    facts |= {name: value for name, value in metrics.items() if name.startswith("val")}
    facts |= facts_of_normalisation(loaded)
    if samples is not None and samples.labels is not None:
        facts |= facts_of_test(loaded, samples, samples.labels)
    return {name: str(value) for name, value in facts.items() if value is not None}


def facts_of_forward(samples: Samples) -> dict[str, Any]:
    """Inputs, outputs, and classes."""
    inputs = []
    for name, tensor in zip(samples.names, samples.exported, strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        shape = ", ".join(str(size) for size in tensor.shape[1:])
        inputs.append(f"{name}: {kind}, (batch, {shape})")
    facts: dict[str, Any] = {
        "input": "; ".join(inputs),
        "output": ", ".join(output.name for output in samples.outputs),
    }
    if samples.classes:
        facts["classes"] = json.dumps(samples.classes, ensure_ascii=False)
    return facts


def facts_of_normalisation(loaded: Loaded) -> dict[str, str]:
    """``mean`` and ``std`` per channel, of the module, or else of the data module."""
    facts = {}
    for name in ("mean", "std"):
        for owner in (loaded.module, loaded.datamodule):
            value = getattr(owner, name, None)
            if value is not None:
                channels = torch.as_tensor(value).flatten().tolist()
                facts[name] = json.dumps([round(channel, 6) for channel in channels])
                break
    return facts


def facts_of_test(loaded: Loaded, samples: Samples, labels: Tensor) -> dict[str, Any]:
    """The accuracy on the test set, labels (count,)."""
    forward = Forward(loaded.module, samples.way, samples.names)
    logits = answer(forward, samples.inputs)["output"]  # (count, classes)
    is_right = logits.argmax(dim=1) == labels
    return {
        "test/accuracy": round(float(is_right.double().mean()), 6),
        "test_samples": f"{len(is_right)} of {samples.source}",
    }
