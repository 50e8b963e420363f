"""The three files of an export: ONNX and torch.export with normalisation inside, and the weights as safetensors."""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from project import __version__
from project.data.base import as_unit_floats
from project.engine.checkpoint_files import Loaded
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


# Exports against the checkpoint they were made of, on the test images.


# Single images, a size that fits no vector unit, and many: kernels and so rounding differ between them.
BATCH_SIZES = (1, 7, 1024)
# Largest difference of a logit: float32 rounding of the sums, times 10. Relative for networks with larger logits.
ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 1e-4, 1e-5
MOST_IMAGES = 10_000


def test_images(loaded: Loaded, as_in_training: bool) -> tuple[Tensor, Tensor, str]:
    """Images as the loader gives them, (count, channels, height, width), labels (count,), and where they are from.

    At most ``MOST_IMAGES``. Where the run's test set cannot be had, random images without labels: an export does not
    need the data it was trained on.

    Args:
        loaded: The checkpoint.
        as_in_training: Where the run trained on the bundled digits, take those of them; else look for the data anew.
    """
    datamodule = loaded.datamodule
    seen = loaded.run.get("data_source")
    if seen == "sample" and as_in_training:
        datamodule.stay_with(seen)  # `auto` would look for the full set first
    try:
        datamodule.prepare_data()
        datamodule.setup("test")
    except UserError as error:
        print(f"no test images ({error}): comparing on random ones", flush=True)
        generator = torch.Generator().manual_seed(0)
        shape = (1000, *datamodule.image_shape)
        return torch.randint(256, shape, dtype=torch.uint8, generator=generator), torch.empty(0), "random"
    batches: list[tuple[Tensor, Tensor]] = []
    for images, labels in datamodule.test_dataloader():
        batches.append((images, labels))
        if sum(len(labels) for _, labels in batches) >= MOST_IMAGES:
            break
    images, labels = (torch.cat(parts)[:MOST_IMAGES] for parts in zip(*batches, strict=True))
    return images, labels, f"{datamodule.data_source} test"


def reference_logits(loaded: Loaded, images: Tensor) -> Tensor:
    """Logits (count, classes) of the checkpoint itself, its images normalised by the data module as in training."""
    with torch.inference_mode():
        parts = [loaded.module(loaded.datamodule.normalize(part)).float() for part in images.split(1000)]
    return torch.cat(parts)


def compare(loaded: Loaded, images: Tensor, onnx: Path, pt2: Path, safetensors: Path) -> list[dict[str, Any]]:
    """One row per file and batch size: labels that differ, the largest difference of a logit, whether that agrees."""
    reference = reference_logits(loaded, images)
    inputs = as_unit_floats(images)
    rows = []
    runners = {"onnx": onnx_runner(onnx), "torch.export": pt2_runner(pt2)}
    for kind, batch_size in itertools.product(runners, BATCH_SIZES):
        parts = inputs.split(batch_size)
        started = time.perf_counter()
        bar = tqdm(parts, desc=f"{kind}, batches of {batch_size}", leave=False, disable=None)  # no bar in a log file
        logits = torch.cat([runners[kind](part) for part in bar])
        seconds = time.perf_counter() - started
        rows.append({"file": kind, "batch_size": batch_size, **difference(reference, logits), "seconds": seconds})
    rows.append({"file": "safetensors", **difference(reference, safetensors_logits(safetensors, loaded, images))})
    return rows


def difference(reference: Tensor, logits: Tensor) -> dict[str, Any]:
    """How logits (count, classes) differ from the reference ones."""
    return {
        "images": len(logits),
        "different_labels": int((logits.argmax(dim=1) != reference.argmax(dim=1)).sum()),
        "largest_logit_difference": float((logits - reference).abs().max()),
        "agrees": torch.allclose(logits, reference, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE)
        and bool((logits.argmax(dim=1) == reference.argmax(dim=1)).all()),
    }


def onnx_runner(path: Path) -> Callable[[Tensor], Tensor]:
    """Images in 0-1 → logits by ONNX Runtime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()  # its default ignores a container's limit
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        return torch.from_numpy(logits)

    return run


def pt2_runner(path: Path) -> Callable[[Tensor], Tensor]:
    """Images in 0-1 → logits by the ``torch.export`` archive."""
    program = torch.export.load(path).module()

    def run(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return program(images)

    return run


def safetensors_logits(path: Path, loaded: Loaded, images: Tensor) -> Tensor:
    """Logits of the checkpoint's network with the weights that were read back from the file."""
    from safetensors.torch import load_file

    network_of(loaded).load_state_dict(load_file(path))
    return reference_logits(loaded, images)
