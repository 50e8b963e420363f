"""What the memory of a training run is used for, and what could be saved of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor

from project.engine.log_steps import skip_idle_hooks
from project.errors import UserError

GIB = 1024**3
ACTIVATIONS = "activations and the rest"


def memory_breakdown(trainer: Trainer) -> dict[str, float]:
    """GiB of this rank's ``weights`` (with buffers), ``gradients`` and ``optimizer state``: exact, from the tensors.

    Taken right after an optimizer step: Lightning clears gradients in the next one, and some optimizers make their
    state in the first.
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
    """The parts with ``activations and the rest``: the training peak less those, where it is known."""
    if peak_bytes is None or not parts:
        return dict(parts)
    return {**parts, ACTIVATIONS: max(0.0, peak_bytes / GIB - sum(parts.values()))}


def size_gib(tensors: Iterable[Tensor]) -> float:
    """GiB that tensors take on this rank; of a sharded tensor its own shard."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.numel() * local.element_size()
    return total / GIB


def possible_savings(breakdown: dict[str, float], precision: str, dtype: torch.dtype) -> dict[str, float]:
    """Share of the whole (0-100) that each flag would save at most, where that can be computed.

    Args:
        breakdown: Of :func:`memory_breakdown`.
        precision: The Trainer's, such as ``32-true``.
        dtype: The weights' data type.
    """
    total = sum(breakdown.values())
    if not total:
        return {}
    activations = breakdown.get(ACTIVATIONS)
    full = precision.startswith("32")
    saved: dict[str, float] = {}
    if activations is not None:
        if full:
            saved["--precision bf16-mixed"] = activations / 2  # 16-bit activations; weights stay float32
        saved["--data.batch_size halved, --accumulate_grad_batches doubled"] = activations / 2
        saved["--model.activation_checkpointing true"] = activations  # what it leaves depends on the network
    if dtype is torch.float32:
        kept = total - (activations or 0.0)
        saved["--precision bf16-true"] = (total if full else kept) / 2
    return {flag: 100 * gib / total for flag, gib in saved.items()}


def table(breakdown: dict[str, float]) -> str:
    """The breakdown in one line, largest first, in MiB below one GiB."""
    parts = sorted(breakdown.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_readable(gib)}" for name, gib in parts)


def _readable(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"


# What to say, and to try, when a device has run out of memory.


HEADLINE = "Out of memory"


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether an exception says that a device's or the host's memory is used up.

    Lightning's ``is_oom_error`` knows messages of CUDA and of the CPU's allocator only.
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return (isinstance(exception, RuntimeError) and "MPS backend out of memory" in str(exception)) or (
        len(exception.args) == 1 and isinstance(exception.args[0], str) and is_oom_error(exception)
    )


def explain(exception: BaseException, trainer: Trainer, peak_bytes: int | None, total_bytes: int | None) -> str:
    """The advice: batch size, peak, breakdown, and three flags to try in order.

    Args:
        exception: The error.
        trainer: As it was when the error came.
        peak_bytes: Most memory allocated so far, None where the device does not tell.
        total_bytes: What the device has, None where unknown.
    """
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    evaluating = trainer.validating or trainer.testing or trainer.sanity_checking
    flag = "eval_batch_size" if evaluating else "batch_size"
    size = getattr(datamodule, flag, None)
    facts = [f"{HEADLINE} in {'evaluation' if evaluating else 'training'}"]
    if size:
        facts.append(f"--data.{flag} is {size}")
    if peak_bytes:
        of = f" of {total_bytes / GIB:.2f} GiB" if total_bytes else ""
        facts.append(f"the peak was {peak_bytes / GIB:.2f} GiB{of}")
    lines = [
        "; ".join(facts) + ".",
        f"Memory by use: {table(add_activations(memory_breakdown(trainer), peak_bytes))}.",
        "Try, in this order:",
    ]
    device = trainer.strategy.root_device.type
    tries = flags_to_try(size, flag, str(trainer.precision), trainer.accumulate_grad_batches, device)
    lines += [f"  {number}. {line}" for number, line in enumerate(tries, 1)]
    lines.append("The last checkpoint is whole: go on from it with --ckpt_path last and one of these.")
    return "\n".join(lines)


def flags_to_try(size: int | None, flag: str, precision: str, accumulate: int, device: str) -> list[str]:
    """Three flags, the one that costs least first."""
    half = max(1, size // 2) if size else None
    if flag == "eval_batch_size":
        smaller = f"--data.eval_batch_size {half}   (metrics do not change)"
        tries = [smaller]
    else:
        batch = f"--data.batch_size {half}" if half else "half the --data.batch_size"
        tries = [f"{batch} --accumulate_grad_batches {2 * accumulate}   (the same optimizer steps in smaller portions)"]
    if precision.startswith("32") and device != "cpu":
        tries.insert(flag == "eval_batch_size", "--precision bf16-mixed   (16-bit activations; 16-mixed before Ampere)")
    elif precision.endswith("mixed"):
        tries.append("--precision bf16-true   (16-bit weights, gradients and optimizer state)")
    tries += [
        "--model.activation_checkpointing true   (activations computed again instead of kept)",
        "--model.optimizer SGD   (no or less optimizer state)",
        "a smaller network",
    ]
    return tries[:3]


# The CUDA allocator's history in a file, for PyTorch's memory viewer.


# Allocations and frees kept, the newest: enough for a few hundred steps in a file of some ten megabytes.
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
        skip_idle_hooks(self)
        device = trainer.strategy.root_device.type
        if stage == "fit" and device != "cuda":
            raise UserError(
                f"--memory_snapshot needs a CUDA device, got {device}. Leave it away or add --accelerator gpu."
            )
        if stage == "fit" and not self.path.parent.is_dir():
            raise UserError(f"--memory_snapshot {self.path}: there is no folder {self.path.parent}. Make it first.")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
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
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        if rank == 0:
            print(f"memory snapshot: {path} (open it at {VIEWER}; the file stays in your browser)", flush=True)
