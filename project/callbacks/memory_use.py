"""What the memory of a training run is used for, and what could be saved of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project.engine.lightning_internals import record_memory_history, write_memory_snapshot
from project.errors import UserError
from project.hardware import GIB

ACTIVATIONS = "activations and the rest"
HEADLINE = "Out of memory"
# Allocations and frees kept in a snapshot, the newest: enough for a few hundred steps in some ten megabytes.
MAX_ENTRIES = 100_000


def memory_breakdown(trainer: Trainer) -> dict[str, float]:
    """GiB of this rank's ``weights`` (with buffers), ``gradients`` and ``optimizer state``: exact, from the tensors.

    And ``data``, where a data module keeps them on a device that is not the CPU.

    Taken right after an optimizer step: Lightning clears gradients in the next one, and some optimizers make their
    state in the first.
    """

    def size_gib(tensors: Iterable[object]) -> float:
        own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]  # a rank's own shard
        return sum(tensor.numel() * tensor.element_size() for tensor in own if isinstance(tensor, Tensor)) / GIB

    module = trainer.lightning_module
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    parts = {
        "weights": size_gib([*module.parameters(), *module.buffers()]),
        "gradients": size_gib(parameter.grad for parameter in module.parameters()),
        "optimizer state": size_gib(value for state in states for value in state.values()),
    }
    data = sum(getattr(getattr(trainer, "datamodule", None), "bytes_on_device", {}).values()) / GIB
    return parts | {"data": data} if data and trainer.strategy.root_device.type != "cpu" else parts


def add_activations(parts: dict[str, float], peak_bytes: int | None) -> dict[str, float]:
    """The parts with ``activations and the rest``: the training peak less those, where it is known."""
    if peak_bytes is None or not parts:
        return dict(parts)
    return {**parts, ACTIVATIONS: max(0.0, peak_bytes / GIB - sum(parts.values()))}


def possible_savings(breakdown: dict[str, float], precision: str) -> dict[str, float]:
    """Share of the peak (0-100) that each measure would save at most under a Trainer's ``precision``.

    Empty where activations are unknown.
    """
    activations, total = breakdown.get(ACTIVATIONS), sum(breakdown.values())
    if activations is None or not total:
        return {}
    saved = {
        "half the batch size, --accumulate_grad_batches doubled": activations / 2,
        "activation checkpointing": activations,  # what it leaves depends on the network
    }
    if precision.startswith("32"):
        saved["--precision bf16-mixed"] = activations / 2  # 16-bit activations; weights stay float32
        saved["--precision bf16-true"] = total / 2
    elif precision.endswith("mixed"):
        saved["--precision bf16-true"] = (total - activations) / 2
    return {measure: 100 * gib / total for measure, gib in saved.items()}


def explain(trainer: Trainer, peak_gib: float, total_bytes: int | None) -> str:
    """The advice after an out-of-memory error: batch size, peak, memory by use, and three things to try in order.

    ``peak_gib`` is 0 where the device does not tell how much was allocated, ``total_bytes`` None where it is unknown.
    """
    evaluating = trainer.validating or trainer.testing or trainer.sanity_checking
    flag = "eval_batch_size" if evaluating else "batch_size"
    size = getattr(getattr(trainer, "datamodule", None), flag, None)
    facts = f"{HEADLINE} in {'evaluation' if evaluating else 'training'}"
    facts += f"; --data.{flag} is {size}" if size else ""
    facts += f"; the peak was {peak_gib:.2f} GiB" if peak_gib else ""
    facts += f" of {total_bytes / GIB:.2f} GiB" if peak_gib and total_bytes else ""
    parts = add_activations(memory_breakdown(trainer), int(peak_gib * GIB) or None)
    lines = [f"{facts}.", f"Memory by use: {table(parts)}.", "Try, in this order:"]
    lines += [f"  {number}. {line}" for number, line in enumerate(flags_to_try(trainer, flag, size), 1)]
    lines.append("The last checkpoint is whole: go on from it with --ckpt_path last and one of these.")
    return "\n".join(lines)


def table(breakdown: dict[str, float]) -> str:
    """The breakdown in one line, largest first, in MiB below one GiB."""
    parts = sorted(breakdown.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib:.2f} GiB" if gib >= 1 else f"{name} {1024 * gib:.1f} MiB" for name, gib in parts)


def flags_to_try(trainer: Trainer, flag: str, size: int | None) -> list[str]:
    """Three things to try, the one that costs least first; only flags that the run's module and data module have."""
    precision, evaluating = str(trainer.precision), flag == "eval_batch_size"
    smaller = f"--data.{flag} {max(1, size // 2)}" if size else "half the batch size in your DataLoader"
    accumulate = f"--accumulate_grad_batches {2 * trainer.accumulate_grad_batches}"
    tries = [f"{smaller} {accumulate}   (the same optimizer steps in smaller portions)"]
    if evaluating:
        tries = [f"{smaller}   (metrics do not change)"]
    if precision.startswith("32") and trainer.strategy.root_device.type != "cpu":
        tries.insert(evaluating, "--precision bf16-mixed   (16-bit activations; 16-mixed before Ampere)")
    elif precision.endswith("mixed"):
        tries.append("--precision bf16-true   (16-bit weights, gradients and optimizer state)")
    if "activation_checkpointing" in trainer.lightning_module.hparams and not evaluating:
        tries.append("--model.activation_checkpointing true   (activations computed again instead of kept)")
    return [*tries, "a smaller network", "SGD as the optimizer   (no or less optimizer state)"][:3]


class MemorySnapshot(Callback):
    """Records every allocation and free with its stack, and writes them when training ends or fails.

    The last 100,000 events are kept, so that after an out-of-memory error the file at ``path`` shows what led to it.
    Every further rank adds its number to the file's name.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._recording = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device.type
        if stage == "fit" and device != "cuda":
            raise UserError(f"--memory_snapshot needs a CUDA device, got {device}. Leave it away.")
        if stage == "fit" and not self.path.parent.is_dir():
            raise UserError(f"--memory_snapshot {self.path}: there is no folder {self.path.parent}. Make it first.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record_memory_history(MAX_ENTRIES)
        self._recording = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._recording:
            return
        self._recording = False
        rank = trainer.global_rank
        path = self.path if rank == 0 else self.path.with_stem(f"{self.path.stem}.rank{rank}")
        write_memory_snapshot(path)
        record_memory_history(None)
        if rank == 0:
            viewer = "https://pytorch.org/memory_viz"
            print(f"memory snapshot: {path} (open it at {viewer}; the file stays in your browser)", flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
