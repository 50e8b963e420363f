"""Exports against the checkpoint they were made of, on the test images."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from project.checkpoints import Loaded
from project.data.base import as_unit_floats
from project.errors import UserError
from project.export_files import network_of

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
