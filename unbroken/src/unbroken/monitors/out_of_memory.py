"""What to try after an out-of-memory error."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from unbroken.loading.batch_size import batch_size_of, eval_batch_size_of
from unbroken.machine.hardware import GIB

HEADLINE = "Out of memory"
MOST_TRIES = 3


def explain(
    trainer: Trainer, parts: dict[str, float], peak_bytes: int | None, total_bytes: int | None
) -> str:
    """The advice after an out-of-memory error: batch size, peak, memory by use (GiB), three things
    to try.
    """
    is_evaluating = trainer.validating or trainer.testing or trainer.sanity_checking
    flag, size = batch_size(trainer, is_evaluating)
    facts = f"{HEADLINE} in {'evaluation' if is_evaluating else 'training'}"
    if size:
        facts += f"; --data.{flag} is {size}"
    if peak_bytes:
        facts += f"; the peak was {peak_bytes / GIB:.2f} GiB"
        if total_bytes:
            facts += f" of {total_bytes / GIB:.2f} GiB"
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    used = ", ".join(f"{use} {readable(gib)}" for use, gib in largest_first)
    lines = [f"{facts}.", f"Memory by use: {used}.", "Try, in this order:"]
    for number, line in enumerate(flags_to_try(trainer, flag, size), 1):
        lines.append(f"  {number}. {line}")
    lines.append(how_to_go_on(trainer))
    return "\n".join(lines)


def how_to_go_on(trainer: Trainer) -> str:
    """What to do with one of the things to try."""
    last = getattr(trainer.checkpoint_callback, "last_model_path", "")
    if last and Path(last).exists():
        return f"The last checkpoint is whole: go on with --ckpt_path {last} and one of these."
    return "Nothing was saved yet: start again with one of these."


def batch_size(trainer: Trainer, is_evaluating: bool) -> tuple[str, int | None]:
    """The data module's option for the size of a batch, and its value; None where it has no such
    option.
    """
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if is_evaluating:
        return "eval_batch_size", eval_batch_size_of(datamodule)
    return "batch_size", batch_size_of(datamodule)


def readable(gib: float) -> str:
    """A size for a person: in GiB, or in MiB where it is less than one."""
    if gib >= 1:
        return f"{gib:.2f} GiB"
    return f"{1024 * gib:.1f} MiB"


def flags_to_try(trainer: Trainer, flag: str, size: int | None) -> list[str]:
    """Three things to try, the one that costs least first; only flags that the run's module and
    data module have.
    """
    precision = str(trainer.precision)
    is_evaluating = flag == "eval_batch_size"
    smaller = "half the batch size in your DataLoader"
    if size:
        smaller = f"--data.{flag} {max(1, size // 2)}"
    tries: list[str] = []
    if is_evaluating:
        tries.append(f"{smaller}   (metrics do not change)")
    else:
        accumulate = f"--accumulate_grad_batches {2 * trainer.accumulate_grad_batches}"
        tries.append(f"{smaller} {accumulate}   (the same optimizer steps in smaller portions)")
    if precision.startswith("32") and trainer.strategy.root_device.type != "cpu":
        half = "--precision bf16-mixed   (16-bit activations; 16-mixed before Ampere)"
        # A smaller evaluation batch changes nothing but the time, so it comes first.
        tries.insert(1 if is_evaluating else 0, half)
    elif precision.endswith("mixed"):
        tries.append("--precision bf16-true   (16-bit weights, gradients and optimizer state)")
    if "activation_checkpointing" in trainer.lightning_module.hparams and not is_evaluating:
        tries.append(
            "--model.activation_checkpointing true   (activations computed again instead of kept)"
        )
    tries.append("a smaller network")
    tries.append("SGD as the optimizer   (no or less optimizer state)")
    return tries[:MOST_TRIES]
