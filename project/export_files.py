"""The three files of an export: ONNX and torch.export with normalisation inside, and the weights as safetensors."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from project import __version__
from project.checkpoints import Loaded
from project.errors import UserError

PACKAGES = ("onnx", "onnxruntime", "onnxscript", "safetensors")


def require_packages() -> None:
    """Raise a :class:`UserError` that says how to install what exporting needs beyond training."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"export needs {', '.join(missing)}, which training does not. Run pip install '.[export]' first."
        )


def network_of(loaded: Loaded) -> nn.Module:
    """The network inside the Lightning module."""
    network = loaded.module.network
    assert isinstance(network, nn.Module)
    return network


class InferenceGraph(nn.Module):
    """What is exported: images in 0-1 → logits, the data module's normalisation included.

    Args:
        loaded: The checkpoint.
    """

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        self.network = network_of(loaded)
        # a method held as a plain attribute: the data module is no part of the weights
        self.normalize = loaded.datamodule.normalize
        self.image_shape = tuple(loaded.datamodule.image_shape)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Float32 images (batch, channels, height, width) in 0-1 → logits (batch, classes)."""
        return self.network(self.normalize(images)).float()

    def export(self) -> torch.export.ExportedProgram:
        """The graph with a free batch size.

        Raises:
            UserError: The network does what cannot be put into a graph.
        """
        example = torch.rand(2, *self.image_shape)
        batch = torch.export.Dim("batch", min=1)
        try:
            with torch.no_grad():
                exported = torch.export.export(self, (example,), dynamic_shapes={"images": {0: batch}})
        except Exception as error:
            raise UserError(f"--ckpt_path: its network cannot be exported: {_first_line(error)}") from error
        for node in exported.graph.nodes:
            node.meta.pop("stack_trace", None)  # source lines with the paths of this machine
        return exported


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def metadata(loaded: Loaded, images: Tensor, labels: Tensor, source: str) -> dict[str, str]:
    """What every file says of itself: text values, ``classes`` and the normalisation as JSON."""
    datamodule = loaded.datamodule
    facts: dict[str, Any] = {
        "classes": json.dumps(datamodule.class_names, ensure_ascii=False),
        "input": f"images: float32 in 0-1, (batch, {', '.join(map(str, datamodule.image_shape))})",
        "output": f"logits: float32, (batch, {len(datamodule.class_names)})",
        "mean": json.dumps(list(datamodule.mean)),
        "std": json.dumps(list(datamodule.std)),
        "network": type(network_of(loaded)).__name__,
        "run_name": loaded.run.get("run_name"),
        "checkpoint": loaded.path.name,
        "trained_on": loaded.run.get("data_source"),
        "val/accuracy": (loaded.run.get("metrics") or {}).get("val/accuracy"),
        "project_version": __version__,
        "torch_version": torch.__version__,
    }
    if len(labels):
        from project.export_check import reference_logits

        right = (reference_logits(loaded, images).argmax(dim=1) == labels).double().mean()
        facts |= {"test/accuracy": round(float(right), 6), "test_images": f"{len(images)} of {source}"}
    return {key: str(value) for key, value in facts.items() if value is not None}


def write_onnx(path: Path, exported: torch.export.ExportedProgram, facts: dict[str, str]) -> None:
    """ONNX with one file for graph and weights: ``images`` (batch, ...) → ``logits`` (batch, classes).

    Raises:
        UserError: The network does what ONNX has no operator for.
    """
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                exported,
                dynamo=True,
                input_names=["images"],
                output_names=["logits"],
                external_data=False,
                verbose=False,
            )
        except Exception as error:
            raise UserError(f"--ckpt_path: its network has no form in ONNX: {_first_line(error)}") from error
    assert program is not None
    model = program.model_proto
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output, model.graph):
        del part.metadata_props[:]  # torch's notes on where each node came from
    symbol = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param  # such as s34
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = size.dim_param.replace(symbol, "batch")
    for key, value in facts.items():
        model.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())


def write_pt2(path: Path, exported: torch.export.ExportedProgram, facts: dict[str, str]) -> None:
    """A ``torch.export`` archive; ``torch.export.load(path).module()`` runs it, ``metadata.json`` lies inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an internal one about weights that share a group
        torch.export.save(exported, path, extra_files={"metadata.json": json.dumps(facts, indent=2)})


def write_safetensors(path: Path, loaded: Loaded, facts: dict[str, str]) -> None:
    """The network's weights under its own names, without normalisation."""
    from safetensors.torch import save_file

    # clones: safetensors refuses tensors that share memory, as tied weights do
    weights = {name: value.detach().clone().contiguous() for name, value in network_of(loaded).state_dict().items()}
    save_file(weights, path, metadata=facts)
