"""Predicts the batches of a ``predict_dataloader`` with Lightning's own ``Trainer.predict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from unbroken.cli.read_checkpoint import Loaded
from unbroken.cli.refusals import refusals_as_errors
from unbroken.cli.trainer_flags import bar_for_a_terminal, build_trainer, trainer_flags
from unbroken.commands.predict.answers import is_of_tensors, to_rows
from unbroken.errors import UserError
from unbroken.tables import Row


def predict_loaders(loaded: Loaded) -> list[Row]:
    """One row per sample that the ``predict_dataloader`` of the data module or module gives.

    With several loaders a column ``loader`` tells which. Where ``predict_step`` returns nothing,
    because it writes its answers itself, there is no row.

    Raises:
        UserError: There is no ``predict_dataloader``, or ``predict_step`` returns what has no entry
            for each sample.
    """
    module = loaded.module
    data = loaded.datamodule
    is_there = is_overridden("predict_dataloader", module) or (
        data is not None and is_overridden("predict_dataloader", data)
    )
    if not is_there:
        owners = type(module).__name__ if data is None else type(data).__name__
        raise UserError(
            f"there is nothing to predict: name files, or give {owners} a predict_dataloader, for"
            " example of the rows of a table."
        )
    flags = trainer_flags(loaded.config)
    flags["logger"] = False
    flags["enable_model_summary"] = False
    flags["enable_progress_bar"] = bar_for_a_terminal(flags)
    flags["devices"] = 1
    flags["precision"] = loaded.precision(flags["precision"])
    trainer = build_trainer(flags)
    with refusals_as_errors(loaded.path), loaded.as_judged(trainer):
        # The weights once more: layers may be made in setup, which the Trainer calls again.
        found: Any = trainer.predict(module, data, ckpt_path=loaded.path, weights_only=True)
    answers_by_loader = [found or []]
    # Only then Lightning gives a list for each; a list may also be what predict_step returns.
    if found and trainer.predict_loop.num_dataloaders > 1:
        answers_by_loader = found
    rows: list[Row] = []
    for number, answers in enumerate(answers_by_loader):
        told = [(answer, entries_in(answer)) for answer in answers if answer is not None]
        where = {"loader": number} if len(answers_by_loader) > 1 else {}
        rows += [{**where, **row} for row in to_rows(loaded, told)]
    if not rows:
        print("predict_step returned nothing to write.")
    return rows


def entries_in(answer: Any) -> int:
    """For how many samples ``predict_step`` has answered a batch."""
    values = answer
    if isinstance(answer, Mapping):
        values = next(iter(answer.values()), ())
    elif is_of_tensors(answer):
        values = answer[0]
    try:
        return len(values)
    except TypeError:
        # A number that stands for the batch.
        return 1
