"""What ExactCheckpoint cannot work with: refused in a line, before it does harm."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from unbroken import lightning_internals
from unbroken.errors import UserError
from unbroken.parts.hyperparameters import kinds_of
from unbroken.stopping.ranks import gather_from_ranks
from unbroken.storage.run_files import RunFiles


def refuse_another_lightning(trainer: Any) -> None:
    """A UserError for a Trainer of ``pytorch_lightning`` whose classes are not ``lightning``'s.

    It would train, and a resume would fail or not be exact.
    """
    if not isinstance(trainer, Trainer):
        package = type(trainer).__module__.partition(".")[0]
        raise UserError(
            f"ExactCheckpoint cannot resume a Trainer of {package}, which was imported before"
            " unbroken. Import unbroken first: then it is lightning.pytorch's."
        )


def refuse_what_is_not_found(trainer: Trainer, files: RunFiles) -> None:
    """A UserError for ``ckpt_path="last"`` where Lightning has found no checkpoint for it.

    It looks for those of a ModelCheckpoint alone. It would train anew, and replace what is in the
    folder, or test random weights. But the first start of a script with a ModelCheckpoint, which
    says "last" at every start, trains anew as it would without ExactCheckpoint.
    """
    asked = lightning_internals.asked_checkpoint(trainer)
    if asked != "last" or lightning_internals.found_checkpoint(trainer) is not None:
        return
    theirs = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    is_first_start = trainer.state.fn == "fit" and not (files.last.exists() or files.best.exists())
    if not theirs or not is_first_start:
        raise UserError(
            'ckpt_path="last" finds checkpoints of a ModelCheckpoint alone. Write'
            " ckpt_path=keep.resume_from, where keep is the ExactCheckpoint: it is None the first"
            " time."
        )


def refuse_ranks_of_functions(trainer: Trainer) -> None:
    """A UserError for ranks that the Trainer starts in functions, and not as processes of their
    own: what the callback reaches there does not come back.
    """
    how = lightning_internals.start_method_of_ranks(trainer)
    if how is not None:
        raise UserError(
            f"ExactCheckpoint does not work where ranks are functions (ddp_{how}, ddp_notebook):"
            ' what they reach is lost. Use strategy="ddp" in a script, or one device.'
        )


def refuse_checkpoints_in_parts(trainer: Trainer) -> None:
    """A UserError for a strategy whose ranks each write their part of a checkpoint: a kill would
    leave some of the parts, and nothing of the library's would be in them.
    """
    if lightning_internals.saves_in_parts(trainer.strategy):
        raise UserError(
            "ExactCheckpoint saves whole files, and this strategy writes a folder of parts. Use"
            ' FSDPStrategy(state_dict_type="full") or'
            " ModelParallelStrategy(save_distributed_checkpoint=False)."
        )


def refuse_other_optimizers(trainer: Trainer, saved: list[list[Any]]) -> None:
    """A UserError for an optimizer of another class, with other options, than the one whose state a
    checkpoint holds. It would take that state, and fail as it makes its first step.

    Args:
        trainer: It has made its optimizers, and loaded no state into them.
        saved: What :func:`kinds_of` has found at the save.
    """
    for (kind, options), (before, options_before) in zip(kinds_of(trainer), saved, strict=False):
        if kind != before and options != options_before:
            raise UserError(
                f"the checkpoint holds the state of {before}, and {kind} cannot take it. Make the"
                " optimizer that the run had, or start a new run from its weights alone:"
                " --init_weights, or in a script module.load_state_dict and another folder."
            )


def compare_sizes(trainer: Trainer, tensor: torch.Tensor, group: Any) -> None:
    """A UserError on every rank, where a step of an evaluation gathers tensors of other sizes.

    Each sample is evaluated once, so one rank may have a sample more than another. Gloo would abort
    the process, and NCCL would wait or gather something else. In training the ranks' batches are of
    one size, and nothing is asked.
    """
    if trainer.training:
        return
    sizes = gather_from_ranks(list(tensor.shape), group)
    if all(size == sizes[0] for size in sizes):
        return
    told = " and ".join(map(str, sizes))
    raise UserError(
        f"--devices {trainer.world_size}: a step of the evaluation gathers tensors of the sizes"
        f" {told}, because each sample is evaluated once. Write"
        " torch.cat(torchmetrics.utilities.distributed.gather_all_tensors(tensor)) there."
    )
