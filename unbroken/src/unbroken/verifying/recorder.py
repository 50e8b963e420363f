"""A callback that writes down what a run does and becomes, as digests, at each batch."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from unbroken.verifying.digests import Entry, digest_of, of_plain, of_tensor
from unbroken.verifying.facts import facts_of_object
from unbroken.verifying.held_values import OF_EVERY_OPTIMIZER, HeldValues
from unbroken.verifying.operations import Operations, write_operations

# Values that measure the machine, and not the training, by the beginning of their names.
MEASURED = ("throughput/", "memory/")
# Of a loader, what may be the user's own.
OF_A_LOADER = ("dataset", "sampler", "batch_sampler", "collate_fn", "generator", "worker_init_fn")
# Kinds of values, in the order in which a difference of one explains one of the next.
SAMPLES = "samples"
RANDOM = "random"
HELD = "held"
RATE = "rate"
OPTIMIZER = "optimizer"
WEIGHTS = "weights"
LOSS = "loss"
LOGGED = "logged"
BEST = "best"
TEST = "test"
OPAQUE = "opaque"
FACTS = "facts"
# What is told of values, and is none.
NOT_COMPARED = (f"{OPAQUE}:", f"{FACTS}:")
OF_A_STATE = tuple(f"{kind}:" for kind in (RANDOM, HELD, RATE, OPTIMIZER, WEIGHTS, OPAQUE, FACTS))


class Recorder(Callback):
    """Writes a row at each batch, with every value that is not what it was in the row before.

    It writes and changes nothing else: it draws no random number, logs nothing and has no state in
    checkpoints. It stands behind all other callbacks. A row's moment is, for example, ``["train",
    2, 5]``: before the sixth batch of the third epoch, when the batch is there and no step was made
    of it.

    Args:
        folder: Where the file of each rank is written, a line a row, flushed at once.
        start: How often the run was started before.
        watched: Epoch and batch of the training step whose operations are noted, too.
    """

    def __init__(self, folder: Path, start: int, watched: tuple[int, int] | None = None) -> None:
        self._folder = folder
        self._start = start
        self._watched = watched
        self._operations: Operations | None = None
        self._file: Any = None
        self._before: dict[str, Entry] = {}
        self._held = HeldValues()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is None:
            name = f"rank{trainer.global_rank}-start{self._start}.jsonl"
            self._file = open(self._folder / name, "w", encoding="utf-8")  # noqa: SIM115 - open for the process's life

    # Training

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        values = {**self._everything(trainer, pl_module), **samples_of("training", 0, batch)}
        self._write(["train", trainer.current_epoch, batch_idx], trainer, values)
        if (trainer.current_epoch, batch_idx) == self._watched:
            self._operations = Operations(pl_module)
            self._operations.begin()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._operations is not None:
            self._operations.end()
            name = f"rank{trainer.global_rank}-operations.json"
            write_operations(self._operations.found, self._folder / name)
            self._operations = None
        values = logged(trainer)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            values[f"{LOSS}:loss"] = of_tensor(loss)
        self._write(["trained", trainer.current_epoch, batch_idx], trainer, values)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(["epoch", trainer.current_epoch], trainer, logged(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = self._everything(trainer, pl_module) | logged(trainer)
        self._write(["end"], trainer, values)
        weights = {name: tensor.detach().cpu() for name, tensor in weights_of(pl_module)}
        torch.save(weights, self._folder / f"rank{trainer.global_rank}-weights.pt")

    # Validation and test

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            values = samples_of("validation", dataloader_idx, batch) | generators(trainer)
            self._write(
                ["validation", trainer.global_step, dataloader_idx, batch_idx], trainer, values
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(["validated", trainer.global_step], trainer, logged(trainer))

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        values = samples_of("test", dataloader_idx, batch)
        self._write(["test", dataloader_idx, batch_idx], trainer, values)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = trainer.callback_metrics
        values = {f"{TEST}:{name}": of_tensor(value) for name, value in found.items()}
        self._write(["tested"], trainer, values)

    # A row

    def _everything(self, trainer: Trainer, module: LightningModule) -> dict[str, Entry]:
        """Weights, optimizers, schedules, generators, and whatever the user's objects hold."""
        values = generators(trainer)
        weights = list(weights_of(module))
        for name, tensor in weights:
            values[f"{WEIGHTS}:{name}"] = of_tensor(tensor)
        names = {id(tensor): name for name, tensor in weights}
        optimizers = [unwrapped(each) for each in trainer.optimizers]
        for number, optimizer in enumerate(optimizers):
            values |= entries_of_optimizer(number, optimizer, names)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            values[f"{OPTIMIZER}:loss scale"] = of_plain(scaler.state_dict())
        roots = dict(roots_of(trainer, module))
        known = [trainer, *(tensor for _, tensor in weights)]
        for name, entry in self._held.of(roots, known).items():
            # Keys may name the folder of the run, which is another one for each.
            values[f"{HELD}:{name.replace(str(self._folder), '…')}"] = entry
        for name, kind in self._held.opaque.items():
            values[f"{OPAQUE}:{name}"] = Entry("opaque", kind)
        facts = dict(self._held.facts)
        for number, optimizer in enumerate(optimizers):
            facts[f"optimizers[{number}]"] = facts_of_object(optimizer)
        for name, each in facts.items():
            values[f"{FACTS}:{name}"] = Entry("facts", each.text)
        return values

    def _write(self, moment: list[Any], trainer: Trainer, values: dict[str, Entry]) -> None:
        """Write what changed since this process's last row that had a value of the name."""
        changed = {name: entry for name, entry in values.items() if self._before.get(name) != entry}
        kinds = kinds_at(moment)
        gone = [name for name in self._before if name not in values and name.startswith(kinds)]
        for name in gone:
            del self._before[name]
        self._before |= changed
        row = {"at": moment, "step": trainer.global_step, "changed": changed, "gone": gone}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def kinds_at(moment: list[Any]) -> tuple[str, ...]:
    """How the names of the values begin that a row of this moment tells."""
    kind = moment[0]
    if kind == "train":
        return (f"{SAMPLES}:training:", *OF_A_STATE)
    if kind == "validation":
        return (f"{SAMPLES}:validation:{moment[2]}:", f"{RANDOM}:")
    if kind == "test":
        return (f"{SAMPLES}:test:{moment[1]}:",)
    return {
        "trained": (f"{LOSS}:", f"{LOGGED}:"),
        "epoch": (f"{LOGGED}:",),
        "validated": (f"{LOGGED}:",),
        "end": (f"{LOGGED}:", *OF_A_STATE),
        "tested": (f"{TEST}:",),
        "files": (f"{BEST}:", f"{TEST}:", f"{LOGGED}:"),
    }[kind]


def samples_of(kind: str, loader: int, batch: Any) -> dict[str, Entry]:
    """The entries of a batch's samples: each tensor by its rows."""
    found = {}
    held = HeldValues()
    whole = held.of({kind: batch}, [])
    tensors = dict(_tensors_in(kind, batch))
    for name, entry in whole.items():
        tensor = tensors.get(name)
        found[f"{SAMPLES}:{kind}:{loader}:{name}"] = (
            entry if tensor is None else of_tensor(tensor, with_rows=True)
        )
    return found


def _tensors_in(name: str, batch: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, list | tuple):
        for place, each in enumerate(batch):
            yield from _tensors_in(f"{name}[{place}]", each)
    elif isinstance(batch, dict):
        for key, each in batch.items():
            yield from _tensors_in(f"{name}[{key!r}]", each)


def generators(trainer: Trainer) -> dict[str, Entry]:
    """The states of the generators that everybody draws from; shown: the place in a block."""
    _, words, gauss = random.getstate()
    _, keys, place, *rest = np.random.get_state()
    torchs = torch.get_rng_state().numpy()
    found = {
        f"{RANDOM}:Python's": _generator((words[:-1], gauss), words[-1]),
        f"{RANDOM}:NumPy's": _generator((np.asarray(keys).tobytes(), rest), place),
        f"{RANDOM}:torch's": _generator(torchs[24:].tobytes(), int(torchs[16:24].view("<u8")[0])),
    }
    device = trainer.strategy.root_device
    if device.type in ("cuda", "mps"):
        state = torch.get_device_module(device).get_rng_state().numpy()
        found[f"{RANDOM}:torch's on {device.type}"] = _generator(state.tobytes(), 0)
    return found


def _generator(block: Any, place: Any) -> Entry:
    of_block = digest_of(repr(block).encode())
    return Entry(digest_of(of_block.encode(), repr(place).encode()), f"{of_block[:6]} {place}")


def logged(trainer: Trainer) -> dict[str, Entry]:
    """What was logged, without what measures the machine."""
    found = {}
    for name, value in trainer.callback_metrics.items():
        if not name.startswith(MEASURED):
            found[f"{LOGGED}:{name}"] = of_tensor(value)
    return found


def weights_of(module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, also those that a state dict leaves out."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def unwrapped(optimizer: Any) -> Any:
    """The user's optimizer, where Lightning has wrapped it."""
    return getattr(optimizer, "optimizer", optimizer)


def entries_of_optimizer(
    number: int, optimizer: Optimizer, names: dict[int, str]
) -> dict[str, Entry]:
    """An optimizer's class, its rates and settings, and its state for each weight."""
    own = f"{OPTIMIZER}:optimizer {number}:"
    found = {f"{own} class": of_plain(type(optimizer).__qualname__)}
    for place, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                kind = RATE if key in ("lr", "momentum", "betas") else OPTIMIZER
                entry = of_tensor(value) if isinstance(value, Tensor) else of_plain(value)
                found[f"{kind}:{key} of optimizer {number}, group {place}"] = entry
        found[f"{own} weights in group {place}"] = of_plain(len(group["params"]))
    held = HeldValues()
    for weight, state in optimizer.state.items():
        name = names.get(id(weight), "a weight of no layer")
        # A part of the state may be kept under a name of the optimizer's own.
        label = name if isinstance(weight, Tensor) else str(weight)
        for key, entry in held.of({label: state}, []).items():
            found[f"{own} {key}"] = entry
    return found


def roots_of(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, Any]]:
    """The user's objects, by the names under which their values are told."""
    yield "module", module
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None:
        yield "data", data
    yield from _callbacks(trainer)
    yield from _optimizers_and_schedules(trainer)
    yield from _loaders("training", trainer.train_dataloader)
    yield from _loaders("validation", trainer.val_dataloaders)


def _callbacks(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    of_class: Counter[str] = Counter()
    for callback in everyone:
        place = type(callback).__module__
        name = f"callback {type(callback).__name__}"
        of_class[name] += 1
        if of_class[name] > 1:
            name += f" {of_class[name]}"
        if place.startswith("lightning."):
            yield f"{name}.state_dict()", callback.state_dict()
        elif not place.startswith("unbroken."):
            yield name, callback


def _optimizers_and_schedules(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    for number, optimizer in enumerate(trainer.optimizers):
        for name, value in vars(unwrapped(optimizer)).items():
            # What an optimizer of the user's own holds beside state and groups
            if name not in OF_EVERY_OPTIMIZER:
                yield f"optimizers[{number}].{name}", value
    for number, config in enumerate(trainer.lr_scheduler_configs):
        schedule = config.scheduler
        for name, value in vars(schedule).items():
            if name != "optimizer":
                yield f"schedules[{number}] {type(schedule).__name__}.{name}", value


def _loaders(kind: str, loaders: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    if not isinstance(loaders, list | tuple):
        loaders = [loaders]
    for number, loader in enumerate(loaders):
        for name in OF_A_LOADER:
            value = getattr(loader, name, None)
            if value is not None:
                yield f"{kind} data[{number}].{name}", value
