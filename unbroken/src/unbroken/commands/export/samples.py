"""What a module is traced with, and what its exports are compared on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from unbroken import contract
from unbroken.cli.read_checkpoint import Loaded
from unbroken.commands.export.forward import (
    Forward,
    NoBatchDimension,
    Output,
    Way,
    find_outputs,
    first_line,
)
from unbroken.errors import UserError

MOST_SAMPLES = 10_000
RANDOM_IMAGES = 1_000


@dataclass
class Samples:
    """Inputs for a module's forward, and what is known of it."""

    # Of forward, each (count, ...), as the data module's loader gives them
    inputs: tuple[Tensor, ...]
    names: list[str]
    way: Way
    # Where they are from, in words
    source: str
    outputs: list[Output]
    # Of an image classifier's test set (count,)
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    are_images: bool = False

    @property
    def exported(self) -> tuple[Tensor, ...]:
        """The inputs of the exports: images are float32 in 0-1."""
        if not self.are_images:
            return self.inputs
        return tuple(x.float() / 255 if x.dtype == torch.uint8 else x for x in self.inputs)


@dataclass
class Candidate:
    """Tensors that may be what forward takes."""

    # By their place in the batch, or by their name in it
    entries: dict[int, Tensor] | dict[str, Tensor]
    source: str
    labels: Tensor | None = None


class NoSamples(Exception):
    """There are none of this kind. The message says why, in words for the user; it may be empty."""


class OtherLayers(UserError):
    """The module's setup has left other layers than those whose weights were loaded."""


def find_samples(loaded: Loaded) -> Samples:
    """The test set, else the module's ``example_input_array``, else random images.

    The first that ``forward`` takes is used; a UserError where it takes none of them.
    """
    module = loaded.module
    name = type(module).__name__
    if type(module).forward is LightningModule.forward:
        raise UserError(f"export traces the module's forward, and {name} has none. Write one.")
    reasons: list[str] = []
    for make in (test_set, example_inputs, random_images):
        try:
            candidate = make(loaded)
        except NoSamples as reason:
            reasons.append(str(reason))
            continue
        found = fitting(loaded, candidate, reasons)
        if found is not None:
            found.source = "; ".join(filter(None, [found.source, *reasons]))
            return found
    raise UserError(
        f"export has nothing to trace {name} with: {'; '.join(filter(None, reasons))}. "
        "Give the module an example_input_array, tensors with a batch dimension, "
        "or the data module a test set."
    )


def fitting(loaded: Loaded, candidate: Candidate, reasons: list[str]) -> Samples | None:
    """The samples of a candidate if forward takes them; else None, and why not among
    ``reasons``.
    """
    problem = ""
    for way, entries in ways_to_call(loaded.module, candidate.entries):
        inputs = tuple(entries.values())
        try:
            outputs = find_outputs(Forward(loaded.module, way, list(entries)), inputs)
        except NoBatchDimension:
            raise
        except Exception as error:  # forward is somebody else's code
            problem = problem or first_line(error)
            continue
        return describe(loaded, candidate, way, entries, outputs)
    name = type(loaded.module).__name__
    reasons.append(f"{name}.forward fails on {candidate.source}: {problem}")
    return None


def ways_to_call(
    module: LightningModule, entries: dict[int, Tensor] | dict[str, Tensor]
) -> Iterator[tuple[Way, dict[str, Tensor]]]:
    """The ways in which forward may take a batch's entries, each with the inputs by name."""
    parameters = list(inspect.signature(module.forward).parameters)
    by_name = {str(key): tensor for key, tensor in entries.items()}
    if 0 in entries:
        # A forward of *args has fewer names than inputs.
        names = parameters[: len(entries)]
        names += [f"input_{index}" for index in range(len(names), len(entries))]
        yield "positions", dict(zip(names, entries.values(), strict=True))
        return
    taken = {name: by_name[name] for name in parameters if name in by_name}
    if taken:
        yield "names", taken
    yield "dictionary", asked_for(module, by_name)


class Recorder(dict[str, Tensor]):
    """A dictionary that knows which of its keys were asked for."""

    def __init__(self, entries: dict[str, Tensor]) -> None:
        super().__init__(entries)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.asked.add(key)
        return super().__getitem__(key)


def asked_for(module: LightningModule, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries that a forward of one dictionary uses: a label beside them is no input."""
    recorder = Recorder(entries)
    with torch.no_grad(), contextlib.suppress(Exception):
        module(recorder)
    return {key: tensor for key, tensor in entries.items() if key in recorder.asked} or entries


def describe(
    loaded: Loaded,
    candidate: Candidate,
    way: Way,
    entries: dict[str, Tensor],
    outputs: list[Output],
) -> Samples:
    """Samples with names for inputs and outputs: those of an image classifier, or the module's
    own.
    """
    data: Any = loaded.datamodule
    names = list(entries)
    inputs = tuple(entries.values())
    are_images = len(names) == 1 and isinstance(data, contract.ShapesImages)
    if are_images and way == "positions":
        names = ["images"]
    samples = Samples(inputs, names, way, candidate.source, outputs, are_images=are_images)
    classes = tuple(loaded.class_names)
    if classes and returns_logits(loaded.module, samples, len(classes)):
        samples.labels = candidate.labels
        samples.classes = classes
        samples.outputs = [Output("output", "logits")]
    samples.outputs = [unlike_inputs(output, samples) for output in samples.outputs]
    return samples


def returns_logits(module: LightningModule, samples: Samples, classes: int) -> bool:
    """Whether the only output is (batch, classes)."""
    if [output.key for output in samples.outputs] != ["output"]:
        return False
    with torch.no_grad():
        output = Forward(module, samples.way, samples.names)(*(x[:1] for x in samples.inputs))
    return tuple(output.shape) == (1, classes)


def unlike_inputs(output: Output, samples: Samples) -> Output:
    """The output with a name that no input has: in ONNX all names of a graph differ."""
    name = output.name
    taken = {*samples.names, *(each.name for each in samples.outputs if each is not output)}
    while name in taken:
        name += "_output"
    return dataclasses.replace(output, name=name)


def test_set(loaded: Loaded) -> Candidate:
    """The first samples of the test set, of the data module or the module itself."""
    data: Any = loaded.module if loaded.datamodule is None else loaded.datamodule
    batches: list[dict[Any, Tensor]] = []
    set_up(loaded, data)
    try:
        for batch in data.test_dataloader():
            batch = data.on_before_batch_transfer(batch, 0)
            batch = data.on_after_batch_transfer(batch, 0)
            batches.append(tensors_of(batch))
            if sum(len(next(iter(each.values()))) for each in batches) >= MOST_SAMPLES:
                break
        keys = batches[0] if batches else {}
        entries = {key: torch.cat([each[key] for each in batches])[:MOST_SAMPLES] for key in keys}
    # Somebody else's data are missing in their own way, and an export does not need them.
    except Exception as error:
        raise no_test_set(error) from None
    if not entries:
        raise NoSamples("the test set has no batch")
    source = data.data_source if isinstance(data, contract.NamesSource) else type(data).__name__
    if 0 not in entries:
        return Candidate(entries, f"{source} test")
    # In a tuple the inputs of forward come first, then the labels of a classifier.
    count = inputs_of_example(loaded.module)
    labels = entries.get(count)
    if labels is not None and labels.dtype != torch.int64:
        labels = None
    inputs = {place: tensor for place, tensor in entries.items() if place < count}
    return Candidate(inputs, f"{source} test", labels)


def set_up(loaded: Loaded, data: Any) -> None:
    """Let a data module, or the module itself, make its test set ready. The module keeps its
    weights.

    Raises:
        NoSamples: where there is no test set.
        OtherLayers: where the setup of the module makes others when it is called again.
    """
    module = loaded.module
    weights = copy.deepcopy(module.state_dict()) if data is module else None
    try:
        data.prepare_data()
        data.setup("test")
    except Exception as error:
        raise no_test_set(error) from None
    finally:
        # Its setup may have made its layers once more, with random weights.
        if weights is not None:
            give_back(module, weights)


def give_back(module: LightningModule, weights: dict[str, Any]) -> None:
    """Give a module the weights that it had before its setup."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        name = type(module).__name__
        raise OtherLayers(
            f"{name}.setup makes other layers when it is called again: {first_line(error)}"
        ) from error
    # New layers begin in training mode.
    module.eval()


def no_test_set(error: Exception) -> NoSamples:
    """What is said of a test set that cannot be made or read."""
    return NoSamples(f"no test set of tensors: {first_line(error)}")


def tensors_of(batch: Any) -> dict[Any, Tensor]:
    """The tensors of a batch that have a batch dimension, by their place or their name in it."""
    if isinstance(batch, Tensor):
        batch = (batch,)
    # Some loaders give the inputs by name, beside the targets.
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Mapping):
        batch = batch[0]
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    found = {key: part for key, part in entries if isinstance(part, Tensor) and part.ndim > 0}
    if not found:
        raise NoSamples("its batches hold no tensor")
    return found


def inputs_of_example(module: LightningModule) -> int:
    """How many inputs forward takes, by the module's ``example_input_array``; 1 without it."""
    example = module.example_input_array
    return len(example) if isinstance(example, tuple | list) and example else 1


def example_inputs(loaded: Loaded) -> Candidate:
    """The module's ``example_input_array``: a tensor, a tuple of them, or a dictionary by name."""
    example = loaded.module.example_input_array
    if example is None:
        raise NoSamples
    entries = tensors_of(example)
    if isinstance(example, tuple | list) and len(entries) < len(example):
        raise NoSamples("example_input_array is not made of tensors alone")
    # Two copies, so that there is more than one sample.
    doubled = {key: torch.cat([tensor, tensor]) for key, tensor in entries.items()}
    return Candidate(doubled, "example_input_array")


def random_images(loaded: Loaded) -> Candidate:
    """Random images of the data module's shape."""
    data: Any = loaded.datamodule
    if not isinstance(data, contract.ShapesImages):
        raise NoSamples
    shape = (RANDOM_IMAGES, *data.image_shape)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    return Candidate({0: pixels}, "random images")
