"""Turn a checkpoint into ONNX, torch.export and safetensors files, checked against it on the test set.

python -m project.export
python -m project.export --ckpt_path checkpoints/mine/best.ckpt --output_dir exported

Writes model.onnx, model.pt2 and model.safetensors beside the checkpoint. The first two are the module's own `forward`.
Of an image classifier: `images`, float32 in 0-1, (batch, channels, height, width), to `logits` (batch, classes).
"""

import importlib.util
import inspect
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from project.engine.command import CommandParser, add_checkpoint, add_output, prepare_process, run

prepare_process(__name__)  # threads and signals, before torch is imported

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from project import __version__
from project.engine.restore import Loaded, find_checkpoint, load
from project.engine.summary import network_of
from project.errors import UserError
from project.tables import format_table, write_rows

Outputs = dict[str, Tensor]
NAMES = ("model.onnx", "model.pt2", "model.safetensors")
PACKAGES = ("onnx", "onnxruntime", "onnxscript", "safetensors")
BATCH_SIZES = (
    1,
    7,
    1024,
)  # one sample, a size that fits no vector unit, many: kernels, and rounding, differ
# Largest difference of a value: float32 rounding of the sums, times 10. Relative for networks with larger values.
ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 1e-4, 1e-5
MOST_SAMPLES = 10_000


def main(argv: list[str]) -> int:
    """Export as ``argv`` says. Returns 1, and leaves no new file, where an export disagrees with the checkpoint."""
    parser = CommandParser("project.export", __doc__)
    add_checkpoint(parser)
    parser.add_argument(
        "--output_dir", metavar="DIR", help="folder for the files (default: the checkpoint's)"
    )
    add_output(parser)
    parser.add_argument(
        "--data.root", metavar="DIR", help="where the test set is (default: as in training)"
    )
    parser.add_argument(
        "--data.source",
        metavar="auto|mnist|sample",
        help="which test set (default: as in training)",
    )
    args = parser.parse_args(argv)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"export needs {', '.join(missing)}, which training does not. Run pip install '.[export]'."
        )
    checkpoint = find_checkpoint(args.ckpt_path)
    folder = Path(args.output_dir) if args.output_dir else checkpoint.parent
    typed = {
        name: value
        for name, value in vars(args).items()
        if name.startswith(("data.", "allow_")) and value
    }
    loaded = load(checkpoint, [f"--{name}={value}" for name, value in typed.items()])
    data: Any = loaded.datamodule
    if (
        typed.keys() <= {"allow_imports"}
        and loaded.run.get("data_source") == "sample"
        and hasattr(data, "stay_with")
    ):
        data.stay_with("sample")  # `auto` would look for the full set first
    samples = find_samples(loaded)
    exported = trace(loaded, samples)
    try:
        str(folder).encode()  # torch ends the process where it is not UTF-8
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", "its name is not UTF-8")
        raise UserError(
            f"--output_dir must be a folder you may write to, got {folder} ({reason})."
        ) from None
    print(
        f"{checkpoint}: comparing the exports on {len(samples.inputs[0]):,} samples ({samples.source})",
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
        write_files(Path(scratch), loaded, exported, samples)
        print(format_table(rows := compare(Path(scratch), loaded, samples)))
        if args.output:
            write_rows(args.output, rows)
        if not all(row["agrees"] for row in rows):
            print(
                "error: an export disagrees with the checkpoint, see above; nothing was written.",
                flush=True,
            )
            return 1
        for name in NAMES:
            os.replace(Path(scratch) / name, folder / name)
            print(
                f"{os.path.relpath(folder / name)}  {(folder / name).stat().st_size / 1e6:,.2f} MB"
            )
    return 0


@dataclass
class Samples:
    """What the exports are traced with and compared on."""

    inputs: tuple[
        Tensor, ...
    ]  # of forward, each (count, ...), as the data module's loader gives them
    names: list[str]  # of the inputs
    source: str  # where they are from
    outputs: list[str]  # names of what forward returns
    labels: Tensor | None = None  # (count,), of a classifier's test set
    classes: tuple[str, ...] = ()  # of a classifier

    @property
    def exported(self) -> tuple[Tensor, ...]:
        """The inputs of the exports: images are float32 in 0-1."""
        return tuple(
            x.float() / 255 if self.names == ["images"] and x.element_size() == 1 else x
            for x in self.inputs
        )


def find_samples(loaded: Loaded) -> Samples:
    """The test set, else the module's ``example_input_array``, else random images: the first that ``forward`` takes."""
    module, data, name = loaded.module, loaded.datamodule, type(loaded.module).__name__
    if type(module).forward is LightningModule.forward:
        raise UserError(f"export traces the module's forward, and {name} has none. Write one.")
    shape, example = tuple(getattr(data, "image_shape", ())), module.example_input_array
    example = (
        (example,) if isinstance(example, Tensor) else example if isinstance(example, tuple) else ()
    )
    candidates, reasons = test_set(loaded, len(example) or 1)  # and why those before would not do
    if example:
        candidates.append((tuple(torch.cat([x, x]) for x in example), None, "example_input_array"))
    if shape:
        pixels = torch.randint(
            256, (1000, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        candidates.append(((pixels,), None, "random images"))
    for inputs, labels, source in candidates:
        try:
            found = answer(module, tuple(x[:2] for x in inputs))
        except Exception as error:
            reasons.append(f"{name}.forward fails on {source}: {first_line(error)}")
            continue
        source = "; ".join([source, *reasons])
        names = (
            ["images"]
            if shape
            else list(inspect.signature(module.forward).parameters)[: len(inputs)]
        )
        classes = tuple(
            getattr(module, "class_names", None) or getattr(data, "class_names", None) or ()
        )
        if list(found) == ["output"] and classes and found["output"].shape[1:] == (len(classes),):
            return Samples(inputs, names, source, ["logits"], labels, classes)
        return Samples(inputs, names, source, list(found))
    give = "Give the module an example_input_array, tensors with a batch dimension, or the data module a test set."
    raise UserError(f"export has nothing to trace {name} with: {'; '.join(reasons)}. {give}")


def test_set(
    loaded: Loaded, count: int
) -> tuple[list[tuple[tuple[Tensor, ...], Tensor | None, str]], list[str]]:
    """The first ``count`` tensors of the test set's batches, labels (samples,), where both are from; or why not."""
    data: Any = loaded.module if loaded.datamodule is None else loaded.datamodule
    try:
        data.prepare_data()
        data.setup("test")
        batches: list[Any] = []
        for batch in data.test_dataloader():
            batch = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
            batches.append((batch,) if isinstance(batch, Tensor) else tuple(batch))
            if sum(len(batch[0]) for batch in batches) >= MOST_SAMPLES:
                break
        inputs = [torch.cat(parts)[:MOST_SAMPLES] for parts in zip(*batches, strict=True)]
    except (
        Exception
    ) as error:  # somebody else's data are missing in their own way: an export does not need them
        return [], [f"no test set of tensors: {first_line(error)}"]
    if not inputs:
        return [], ["the test set has no batch"]
    labels = inputs[count] if len(inputs) > count and inputs[count].dtype == torch.int64 else None
    return [
        (tuple(inputs[:count]), labels, f"{getattr(data, 'data_source', type(data).__name__)} test")
    ], []


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def named(output: Any) -> Outputs:
    """Outputs by name, numbers in float32: ``output``, or ``output_0``, ... of a tuple, or a dict's own keys."""
    parts = dict(output) if isinstance(output, Mapping) else {"output": output}
    if isinstance(output, tuple | list):
        parts = {f"output_{index}": part for index, part in enumerate(output)}
    if wrong := [type(part).__name__ for part in parts.values() if not isinstance(part, Tensor)]:
        raise UserError(f"it must return a tensor, a tuple or a dict of tensors, got a {wrong[0]}")
    return {
        name: part.float() if part.is_floating_point() else part for name, part in parts.items()
    }


def answer(model: Callable[..., Any], inputs: tuple[Tensor, ...], size: int = 1000) -> Outputs:
    """What a model returns for inputs in batches of ``size``, by name."""
    with torch.inference_mode():
        answers = [
            named(model(*batch)) for batch in zip(*(x.split(size) for x in inputs), strict=True)
        ]
    return {name: torch.cat([found[name] for found in answers]) for name in answers[0]}


def trace(loaded: Loaded, samples: Samples) -> torch.export.ExportedProgram:
    """The module's forward as a graph with a free batch size; outputs in float32."""

    class Graph(nn.ModuleDict):
        def forward(self, *inputs: Tensor) -> Any:
            outputs = named(self["module"](*inputs))
            return outputs["output"] if list(outputs) == ["output"] else outputs

    example = tuple(x[:2].clone() for x in samples.exported)
    sizes = ({0: torch.export.Dim("batch", min=1)},) * len(example)
    try:
        with torch.no_grad():
            exported = torch.export.export(
                Graph({"module": loaded.module}).eval(), example, dynamic_shapes=(sizes,)
            )
    except Exception as error:
        raise UserError(
            f"{type(loaded.module).__name__}.forward cannot be exported: {first_line(error)}"
        ) from error
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # source lines with the paths of this machine
    return exported


def metadata(loaded: Loaded, samples: Samples) -> dict[str, str]:
    """What every file says of itself: text values; ``classes``, ``mean`` and ``std`` as JSON."""
    sizes = [f"{x.dtype}, (batch, {', '.join(map(str, x.shape[1:]))})" for x in samples.exported]
    facts: dict[str, Any] = {
        "classes": json.dumps(samples.classes, ensure_ascii=False) if samples.classes else None,
        "input": "; ".join(map(": ".join, zip(samples.names, sizes, strict=True))).replace(
            "torch.", ""
        ),
        "output": ", ".join(samples.outputs),
        "network": type(network_of(loaded.module)).__name__,
        "run_name": loaded.run.get("run_name"),
        "checkpoint": loaded.path.name,
        "trained_on": loaded.run.get("data_source"),
        **{
            name: value
            for name, value in (loaded.run.get("metrics") or {}).items()
            if name.startswith("val")
        },
        "project_version": __version__,
        "torch_version": torch.__version__,
    }
    for name, owner in itertools.product(("mean", "std"), (loaded.module, loaded.datamodule)):
        if (value := getattr(owner, name, None)) is not None:
            channels = torch.as_tensor(value).flatten().tolist()
            facts.setdefault(name, json.dumps([round(channel, 6) for channel in channels]))
    if samples.labels is not None:
        right = answer(loaded.module, samples.inputs)["output"].argmax(dim=1) == samples.labels
        facts["test/accuracy"] = round(float(right.double().mean()), 6)
        facts["test_samples"] = f"{len(right)} of {samples.source}"
    return {key: str(value) for key, value in facts.items() if value is not None}


def write_files(
    folder: Path, loaded: Loaded, exported: torch.export.ExportedProgram, samples: Samples
) -> None:
    """Write ONNX (graph and weights in one file), torch.export (``metadata.json`` inside) and the network's weights."""
    import onnx
    from safetensors.torch import save

    facts = metadata(loaded, samples)
    names: dict[str, Any] = {"input_names": samples.names, "output_names": samples.outputs}
    names["dynamic_shapes"] = [{0: "batch"} for _ in samples.names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # internal ones, such as about weights that share a group
        torch.export.save(
            exported, folder / NAMES[1], extra_files={"metadata.json": json.dumps(facts, indent=2)}
        )
        try:
            program = torch.onnx.export(
                exported, dynamo=True, external_data=False, verbose=False, **names
            )
        except Exception as error:
            raise UserError(
                f"{type(loaded.module).__name__} has no form in ONNX: {first_line(error)}"
            ) from error
    assert program is not None
    model = program.model_proto
    graph = model.graph
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, graph):
        del part.metadata_props[:]  # torch's notes on where each node came from
    onnx.helper.set_model_props(model, facts)
    onnx.checker.check_model(model, full_check=True)
    (folder / NAMES[0]).write_bytes(model.SerializeToString())
    # clones: safetensors refuses tensors that share memory, as tied weights do
    weights = {
        name: value.clone().contiguous()
        for name, value in network_of(loaded.module).state_dict().items()
    }
    (folder / NAMES[2]).write_bytes(
        save(weights, facts)
    )  # save_file would make it readable by its owner alone


def compare(folder: Path, loaded: Loaded, samples: Samples) -> list[dict[str, Any]]:
    """One row per file and batch size: labels that differ, the largest difference of a value, whether that agrees."""
    import onnxruntime
    from safetensors.torch import load_file

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = (
        torch.get_num_threads()
    )  # its default ignores a container's limit
    session = onnxruntime.InferenceSession(
        folder / NAMES[0], options, providers=["CPUExecutionProvider"]
    )
    expected, rows = answer(loaded.module, samples.inputs), []
    own = getattr(loaded.module, "outputs_agree", None)

    def difference(found: Outputs) -> dict[str, Any]:
        pairs = [(value, found[name]) for name, value in expected.items()]
        row: dict[str, Any] = {"samples": len(pairs[0][0])}
        if samples.classes:
            row["different_labels"] = int(
                (pairs[0][0].argmax(dim=1) != pairs[0][1].argmax(dim=1)).sum()
            )
        row["largest_difference"] = max(
            float((a.double() - b.double()).abs().max()) for a, b in pairs
        )
        agrees = all(
            torch.allclose(a, b, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE) for a, b in pairs
        )
        if own is not None:
            agrees = bool(own(*pairs[0]) if len(pairs) == 1 else own(expected, found))
        return row | {"agrees": agrees and not row.get("different_labels")}

    def run_onnx(*inputs: Tensor) -> Outputs:
        outputs = session.run(
            samples.outputs,
            {name: x.numpy() for name, x in zip(samples.names, inputs, strict=True)},
        )
        return dict(zip(expected, map(torch.from_numpy, outputs), strict=True))

    models: dict[str, Any] = {
        "onnx": run_onnx,
        "torch.export": torch.export.load(folder / NAMES[1]).module(),
    }
    for (kind, model), size in itertools.product(models.items(), BATCH_SIZES):
        started = time.perf_counter()
        found = answer(model, samples.exported, size)
        seconds = time.perf_counter() - started
        rows.append({"file": kind, "batch_size": size, **difference(found), "seconds": seconds})
    network_of(loaded.module).load_state_dict(load_file(folder / NAMES[2]))
    return [*rows, {"file": "safetensors", **difference(answer(loaded.module, samples.inputs))}]


if __name__ == "__main__":
    run(main)
