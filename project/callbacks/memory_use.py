"""What a training run uses memory for, and how much of it could be saved."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from project.engine.lightning_internals import record_memory_history, write_memory_snapshot
from project.errors import UserError
from project.hardware import GIB

ACTIVATIONS = "activations and the rest"
HEADLINE = "Out of memory"
# What cuBLAS, cuDNN and MPS say when memory is used up, besides what Lightning's is_oom_error knows of CUDA and the CPU


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
    """Three things to try, the cheapest first; only flags that the run's module and data module have."""
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
