"""What to say, and to try, when a device has run out of memory."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.memory import is_oom_error

from project.callbacks.memory_breakdown import GIB, add_activations, memory_breakdown, table

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
