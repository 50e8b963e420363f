"""What a training run uses memory for, and how much of it could be saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from project.engine.lightning_internals import record_memory_history, write_memory_snapshot
from project.errors import UserError
from project.hardware import GIB

ACTIVATIONS = "activations and the rest"


def memory_breakdown(trainer: Trainer) -> dict[str, float]:
    """GiB of this rank's ``weights`` (with buffers), ``gradients`` and ``optimizer state``: exact, from the tensors.

    Call it right after an optimizer step: Lightning clears gradients in the next step, and some optimizers make their
    state in the first one.
    """
    module = trainer.lightning_module
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return {
        "weights": size_gib([*module.parameters(), *module.buffers()]),
        "gradients": size_gib(gradients),
        "optimizer state": size_gib(value for state in states for value in state.values() if isinstance(value, Tensor)),
    }


def add_activations(parts: dict[str, float], peak_bytes: int | None) -> dict[str, float]:
    """The parts with ``activations and the rest``: the training peak minus the parts, if it is known."""
    if peak_bytes is None or not parts:
        return dict(parts)
    return {**parts, ACTIVATIONS: max(0.0, peak_bytes / GIB - sum(parts.values()))}


def size_gib(tensors: Iterable[Tensor]) -> float:
    """GiB that tensors take on this rank; of a sharded tensor its own shard."""
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local) / GIB


def possible_savings(breakdown: dict[str, float], precision: str) -> dict[str, float]:
    """GiB that each measure would save at most under a Trainer's ``precision``, empty where activations are unknown."""
    if ACTIVATIONS not in breakdown:
        return {}
    total, activations = sum(breakdown.values()), breakdown[ACTIVATIONS]
    saved = {
        "half the batch size, --accumulate_grad_batches doubled": activations / 2,
        "activation checkpointing": activations,  # how much remains depends on the network
    }
    if precision.startswith("32"):
        saved["--precision bf16-mixed"] = activations / 2  # 16-bit activations; weights stay float32
        saved["--precision bf16-true"] = total / 2
    elif precision.endswith("mixed"):
        saved["--precision bf16-true"] = (total - activations) / 2
    return saved


def table(breakdown: dict[str, float]) -> str:
    """The breakdown in one line, largest first, in MiB below one GiB."""
    parts = sorted(breakdown.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib:.2f} GiB" if gib >= 1 else f"{name} {1024 * gib:.1f} MiB" for name, gib in parts)


HEADLINE = "Out of memory"


def explain(trainer: Trainer, peak_gib: float, total_bytes: int | None) -> str:
    """The advice after an out-of-memory error: batch size, peak, breakdown, and three things to try in order.

    ``peak_gib`` is 0 and ``total_bytes`` None where the device does not report them.
    """
    evaluating = trainer.validating or trainer.testing or trainer.sanity_checking
    flag = "eval_batch_size" if evaluating else "batch_size"
    size = getattr(getattr(trainer, "datamodule", None), flag, None)
    facts = [f"{HEADLINE} in {'evaluation' if evaluating else 'training'}"]
    if size:
        facts.append(f"--data.{flag} is {size}")
    if peak_gib:
        of = f" of {total_bytes / GIB:.2f} GiB" if total_bytes else ""
        facts.append(f"the peak was {peak_gib:.2f} GiB{of}")
    parts = add_activations(memory_breakdown(trainer), int(peak_gib * GIB) or None)
    lines = ["; ".join(facts) + ".", f"Memory by use: {table(parts)}.", "Try, in this order:"]
    lines += [f"  {number}. {line}" for number, line in enumerate(flags_to_try(trainer, flag, size), 1)]
    lines.append("The last checkpoint is whole: go on from it with --ckpt_path last and one of these.")
    return "\n".join(lines)


def flags_to_try(trainer: Trainer, flag: str, size: int | None) -> list[str]:
    """Three things to try, the cheapest first; only flags that the run's module and data module have."""
    precision, evaluating = str(trainer.precision), flag == "eval_batch_size"
    smaller = f"--data.{flag} {max(1, size // 2)}" if size else "half the batch size in your DataLoader"
    if evaluating:
        tries = [f"{smaller}   (metrics do not change)"]
    else:
        accumulate = f"--accumulate_grad_batches {2 * trainer.accumulate_grad_batches}"
        tries = [f"{smaller} {accumulate}   (the same optimizer steps in smaller portions)"]
    if precision.startswith("32") and trainer.strategy.root_device.type != "cpu":
        tries.insert(evaluating, "--precision bf16-mixed   (16-bit activations; 16-mixed before Ampere)")
    elif precision.endswith("mixed"):
        tries.append("--precision bf16-true   (16-bit weights, gradients and optimizer state)")
    if "activation_checkpointing" in trainer.lightning_module.hparams and not evaluating:
        tries.append("--model.activation_checkpointing true   (activations computed again instead of kept)")
    return [*tries, "a smaller network", "SGD as the optimizer   (no or less optimizer state)"][:3]


# Allocations and frees kept in a snapshot, the newest: enough for a few hundred steps in some ten megabytes.
MAX_ENTRIES = 100_000
VIEWER = "https://pytorch.org/memory_viz"


class MemorySnapshot(Callback):
    """Records every allocation and free with its stack, and writes them when training ends or fails.

    The last 100,000 events are kept, so that after an out-of-memory error the file shows what led to it.

    Args:
        path: The file; every further rank adds its number to the name.
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
        self._write(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not self._recording:
            return
        self._recording = False
        rank = trainer.global_rank
        path = self.path if rank == 0 else self.path.with_stem(f"{self.path.stem}.rank{rank}")
        write_memory_snapshot(path)
        record_memory_history(None)
        if rank == 0:
            print(f"memory snapshot: {path} (open it at {VIEWER}; the file stays in your browser)", flush=True)
