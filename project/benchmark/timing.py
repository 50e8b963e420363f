"""How everything here is timed, and what real runs are compared with: training loops written by hand."""

import copy
import gc
import io
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
from tqdm import tqdm  # type: ignore[import-untyped]

from project import fit, hardware, threads
from project.callbacks.memory import MemoryMonitor  # feature: memory
from project.engine import signals
from project.engine.cli import Configuration, configure
from project.engine.exact_loading import ExactLoading
from project.engine.log_steps import synchronize
from project.engine.restore import Run
from project.engine.summary import (
    command_line,
    device_name,
    git_state,
    network_of,
    samples_of,
    versions,
)
from project.engine.trainer import build_trainer, trainer_flags
from project.errors import UserError, require
from project.tables import Row, format_cell
from project.waiting import waiting  # feature: waiting

K = TypeVar("K")
T = TypeVar("T")
GREY = [0.5]  # mean and standard deviation of images whose data module names none
LOOPS = FLOOR, PLAIN, FULL, BARE = (
    "hand-written floor",
    "plain PyTorch loop",
    "all features",
    "Lightning, nothing on",
)


def alternate(table: str, variants: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Results of every variant (name → one measurement), measured ``rounds`` times in turn."""
    results: dict[K, list[T]] = {name: [] for name in variants}
    # every other round backwards, so that a machine that grows slower or busier affects all variants alike
    order = [name for turn in range(rounds) for name in list(variants)[:: -1 if turn % 2 else 1]]
    bar = tqdm(order, desc=table, leave=False, disable=None)  # on stderr; none in a log file
    for name in bar:
        bar.set_postfix_str(format_cell(name))
        results[name].append(variants[name]())
    return results


def median_and_spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name``: the median; ``n``; ``spread_pct``: (largest − smallest) / median, 0 or more; left out for one value."""
    row: dict[str, float] = {name: statistics.median(values), "n": len(values)}
    if len(values) > 1:
        row["spread_pct"] = 100 * (max(values) - min(values)) / row[name]
    return row


def wanted_devices(config: Configuration) -> list[str]:
    """The CPU and this machine's kind of accelerator, as far as ``--accelerator`` names them; the best comes last."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = [
        "cpu",
        *(
            [accelerator.type]
            if accelerator is not None and accelerator.type in ("cuda", "mps")
            else []
        ),
    ]
    asked = config.trainer["accelerator"]
    wanted = [
        name for name in found if asked in ("auto", name) or (asked == "gpu" and name != "cpu")
    ]
    require(
        bool(wanted),
        "--accelerator",
        f"be auto or what this machine has ({', '.join(found)})",
        asked,
    )
    return wanted


class Epoch(NamedTuple):
    """One epoch's seconds."""

    train_s: float  # training steps
    epoch_s: float  # training, validation and saving


class RunClock(Callback):
    """Times whole epochs. Comes last among the callbacks, so that the time of the others counts."""

    def __init__(self, turn: Connection | None = None) -> None:
        self.turn = (
            turn  # an epoch waits for a message on it and sends its seconds; None: it does neither
        )
        self.epochs: list[Epoch] = []
        self.peak_allocated_gib: float | None = (
            None  # None where the device's allocator does not tell
        )
        self.memory: dict[str, float] = {}  # GiB by use, of a training step
        self.names: dict[str, str] = {}  # of device and network
        self._began = self._train_s = 0.0  # of this epoch's training steps

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)  # an epoch's checkpoint is saved when the next one begins
        if self.turn is not None:
            self.turn.recv()
        self._began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == trainer.num_training_batches:
            synchronize(trainer.strategy.root_device)
            self._train_s = time.perf_counter() - self._began

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch(trainer)  # after on_train_end, which saves the last checkpoint
        self.names = {
            "device": device_name(trainer),
            "network": type(network_of(pl_module)).__name__,
        }
        self.batches = int(trainer.num_training_batches)  # per epoch
        self.train_samples = samples_of(
            trainer.train_dataloader
        )  # None where its loader does not tell
        self.accuracy = trainer.callback_metrics.get(
            "val/accuracy"
        )  # 0-1, of the last validation, if it was logged

    def _end_epoch(self, trainer: Trainer) -> None:
        if self._began:
            synchronize(trainer.strategy.root_device)
            self.epochs.append(Epoch(self._train_s, time.perf_counter() - self._began))
            if self.turn is not None:
                self.turn.send(self.epochs[-1])


def run_epochs(
    config: Configuration, epochs: int, *, bare: bool = False, turn: Connection | None = None
) -> RunClock:
    """Train a new module as ``fit`` does, in a folder that is deleted; ``bare``: without this project's callbacks."""
    unused = copy.deepcopy(config.trainer["callbacks"])  # the originals are never run
    asked = config.trainer | {
        "max_epochs": epochs,
        "max_steps": -1,
        "max_time": None,
        "callbacks": unused,
    }
    config = replace(config, module=config.fresh_module(), trainer=asked)
    clock, terminal = RunClock(turn), io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]  # the progress bar is part of a run's cost
    torch.cuda.empty_cache()  # of the run before
    folder = tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True)
    with folder as root, redirect_stdout(terminal), redirect_stderr(terminal), ExitStack() as ends:
        ends.callback(
            setattr, signals.state, "deferring", False
        )  # between two runs there is no step to wait for
        if bare:
            flags = trainer_flags(config) | {
                "logger": False,
                "enable_progress_bar": False,
                "default_root_dir": root,
            }
            trainer = build_trainer(flags | {"callbacks": [*flags["callbacks"], clock]})
            ExactLoading().install(trainer)  # the loaders that all the others train with
        else:
            trainer = fit.build(config, Run(Path(tempfile.mkdtemp(dir=root))), extra=[clock])
        trainer.fit(config.module, datamodule=config.datamodule)
    if not all(epoch.train_s for epoch in clock.epochs):
        raise UserError(
            "the benchmark times whole epochs, and --data has no end. Set --limit_train_batches 100."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # feature: memory
        if isinstance(callback, MemoryMonitor):
            clock.memory = callback.breakdown
            clock.peak_allocated_gib = callback.peaks.get("memory/peak_allocated_gib")
    return clock


def epochs_in_turn(
    table: str, loops: Sequence[str], fit_flags: Sequence[str], n: int
) -> dict[str, list[Epoch]]:
    """``n`` epochs of each loop, in a process of its own, in turn: a machine's speed may change within seconds."""

    def epoch_of(turn: Connection) -> Epoch:
        turn.send(None)
        answer = turn.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    spawn, turns = multiprocessing.get_context("spawn"), {}
    with ExitStack() as ends:
        for loop in loops:
            connection, its = spawn.Pipe()
            process = spawn.Process(target=take_turns, args=(its, loop, fit_flags, n + 1))
            process.start()
            its.close()  # else the end of its process would not be seen
            ends.callback(process.kill)
            ends.callback(process.join, 60)
            ends.callback(connection.close)  # comes first: the process ends before its next epoch
            turns[loop] = partial(epoch_of, connection)
        return {
            loop: epochs[1:] for loop, epochs in alternate(table, turns, n + 1).items()
        }  # the first warms up


def take_turns(turn: Connection, loop: str, fit_flags: Sequence[str], epochs: int) -> None:
    """The process of a loop: train an epoch for each message of the connection, and send its seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes the connection
    with suppress(EOFError, ConnectionError):
        try:
            config = configure(list(fit_flags), "project.benchmark")
            if loop in (
                FULL,
                BARE,
            ):  # as a command starts; the others wait and allocate as PyTorch does
                threads.configure()
                waiting.start()  # feature: waiting
                gc.freeze()
                run_epochs(config, epochs, bare=loop == BARE, turn=turn)
            else:
                epoch = loops_by_hand(config)[loop]
                for _ in range(epochs):
                    turn.recv()
                    turn.send(epoch())
        except UserError as error:
            turn.send(error)


def conditions() -> Row:
    """What must be known to judge a result, of this moment and this process; what cannot be known is left out."""
    cpu, gpus, (commit, dirty) = hardware.cpu(), hardware.accelerators(), git_state()
    machine = {
        "cpu": cpu["name"],
        "cpu_cores": cpu["cores"],
        "memory_gib": round(hardware.memory()["total_gib"], 1),
    }
    if gpus:
        machine |= {
            "gpus": [gpu["name"] for gpu in gpus],
            "cuda": torch.version.cuda,
            "driver": gpus[0].get("driver"),
        }
    load = round(os.getloadavg()[0], 2)  # of others: nothing has begun here
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line().replace(".__main__", "", 1),
        "git_commit": commit,
        "git_dirty": dirty,
        "hardware": {name: fact for name, fact in machine.items() if fact is not None},
        "versions": versions(),
        "cpu_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "omp_spin_count": os.environ.get("GOMP_SPINCOUNT", "default"),
        "load_average": load,
        "quiet": load < 0.5,  # whether nothing else was running
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def line_of(facts: Row) -> str:
    """The conditions for a person, above the tables."""
    machine = facts["hardware"]
    parts = [f"{machine['cpu']}, {machine['cpu_cores']} cores", *machine.get("gpus", [])]
    parts += [f"{name} {facts['versions'][name]}" for name in ("torch", "lightning")]
    line = " | ".join([*parts, f"commit {facts.get('git_commit', 'unknown')[:7]}", facts["date"]])
    return (
        line
        if facts["quiet"]
        else f"{line}\nthe machine was busy (load {facts['load_average']}): compare ratios"
    )


def in_memory(config: Configuration, split: str) -> Any:
    """The dataset of a split ("train" or "val"). Its ``images`` are uint8 in 0-255 or float in 0-1, (count, channels,
    height, width), its ``labels`` int64 (count,). A UserError where the configured data are not of this kind.
    """
    data, dataset = cast(Any, config.datamodule), None
    with suppress(MisconfigurationException, AttributeError):  # no loader, or one without a dataset
        data.prepare_data()
        data.setup("fit")
        dataset = getattr(data, f"{split}_dataloader")().dataset
    images, labels = getattr(dataset, "images", None), getattr(dataset, "labels", None)
    if isinstance(images, Tensor) and isinstance(labels, Tensor) and images.ndim == 4:
        return dataset
    raise UserError(
        f"--data: loops written by hand need TensorImages, {type(data).__name__} has none for {split}."
    )


def normalizer(data: Any, images: Tensor, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function: a batch of ``images`` on ``device`` → float32 with mean 0 and standard deviation 1."""
    whole = 1.0 if images.is_floating_point() else 255.0
    # once, because copying tensors to the device at every step takes time
    shift, width = (
        whole * torch.tensor(getattr(data, name, GREY), device=device) for name in ("mean", "std")
    )
    shift, scale = shift.view(1, -1, 1, 1), 1 / width.view(1, -1, 1, 1)
    return lambda images: images.to(torch.float32, copy=True).sub_(shift).mul_(scale)


class PerSampleImages(TensorDataset):
    """Single images as torchvision's MNIST gives them with the usual transforms: tensor, Pillow, tensor, normalised."""

    def __init__(self, data: Any, samples: Any) -> None:
        pixels = transforms.functional.convert_image_dtype(samples.images, torch.uint8)
        super().__init__(pixels.permute(0, 2, 3, 1).squeeze(-1), samples.labels)
        normalize = transforms.Normalize(getattr(data, "mean", GREY), getattr(data, "std", GREY))
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        image, label = super().__getitem__(index)
        return self.transform(Image.fromarray(image.numpy())), int(label)


def loops_by_hand(config: Configuration) -> dict[str, Callable[[], Epoch]]:
    """The floor and the plain PyTorch loop: name → function that trains one epoch, on copies of the module's network.
    The floor is the least a training loop can do: gather a batch by index from data on the device, forward, backward, a
    fused step of Adam, and after every epoch a validation, batched as ours; no metric, logging, progress or checkpoint.
    """
    module, data = cast(Any, config.module), cast(Any, config.datamodule)
    if not isinstance(getattr(module, "network", None), nn.Module):
        raise UserError(
            f"--model: loops written by hand train module.network, {type(module).__name__} has none."
        )
    device = torch.device(wanted_devices(config)[-1])
    train, val = in_memory(config, "train"), in_memory(config, "val")
    (images, labels), (val_images, val_labels) = [
        (x.images.to(device), x.labels.to(device)) for x in (train, val)
    ]
    normalize = normalizer(data, images, device)
    memory_format = getattr(module, "memory_format", torch.contiguous_format)
    network: nn.Module = copy.deepcopy(module.network).to(device).to(memory_format=memory_format)
    fused = optim.Adam(network.parameters(), lr=1e-3, fused=True)
    size, eval_size = (
        min(data.batch_size, len(labels)),
        getattr(data, "eval_batch_size", data.batch_size),
    )
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(
        str(config.trainer["precision"])
    )
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(labels), device=device).split(size)[: len(labels) // size]:
            # index_select copies whole images; images[chosen] goes byte by byte
            some = normalize(images.index_select(0, chosen)).contiguous(memory_format=memory_format)
            yield some, labels.index_select(0, chosen)

    def floor_epoch() -> Epoch:
        began = time.perf_counter()
        trained = train_epoch(network, fused, batches(), autocast)
        network.eval()
        correct = torch.zeros((), device=device, dtype=torch.int64)
        for some, truth in zip(
            val_images.split(eval_size), val_labels.split(eval_size), strict=True
        ):
            with torch.no_grad(), autocast:
                logits = network(normalize(some).contiguous(memory_format=memory_format))
                correct += (logits.argmax(dim=1) == truth).sum()
        correct.item()
        return Epoch(trained.train_s, time.perf_counter() - began)

    copied = copy.deepcopy(network)
    plain = optim.Adam(copied.parameters(), lr=1e-3)
    loader: DataLoader[Any] = DataLoader(
        PerSampleImages(data, train), data.batch_size, shuffle=True
    )
    return {FLOOR: floor_epoch, PLAIN: partial(train_epoch, copied, plain, loader, None)}


def train_epoch(
    network: nn.Module, adam: optim.Adam, batches: Iterable[Any], floor: torch.autocast | None
) -> Epoch:
    """Train one epoch: the floor's in its precision, or (None) as most tutorials do, reading the loss at every step."""
    began, running_loss, device = time.perf_counter(), 0.0, next(network.parameters()).device
    network.train()
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        with floor or nullcontext():
            loss = nn.functional.cross_entropy(network(images), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        running_loss += 0.0 if floor else loss.item()
    synchronize(device)
    seconds = time.perf_counter() - began
    return Epoch(seconds, seconds)
