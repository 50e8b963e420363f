"""A data module's batch sizes: attributes of it, or values of its ``hparams``.

Lightning's own batch-size scaler looks in both places as well. A data module that calls
``save_hyperparameters()`` needs no attribute. Lightning's ``lightning_getattr`` is not called: it
takes the module, and gives a size of the module's before one of its data.
"""

from typing import Any

from unbroken import contract


def batch_size_of(data: Any) -> int | None:
    """Training samples per batch; None where the data module has no such number."""
    for holder in holders(data, contract.HasBatchSize):
        if isinstance(holder.batch_size, int):
            return holder.batch_size
    return None


def eval_batch_size_of(data: Any) -> int | None:
    """Validation samples per batch; None where the data module has no number of its own for it."""
    for holder in holders(data, contract.HasEvalBatchSize):
        if isinstance(holder.eval_batch_size, int):
            return holder.eval_batch_size
    return None


def set_batch_size(data: Any, size: int) -> None:
    """Change it wherever the data module has it: which of them the loader follows is not known."""
    # The attribute comes last: a property that follows hparams has changed by then.
    for holder in reversed(holders(data, contract.HasBatchSize)):
        if holder.batch_size != size:
            holder.batch_size = size


def holders(data: Any, has_size: type) -> list[Any]:
    """The data module and its ``hparams``, as far as they have the size."""
    return [
        holder for holder in (data, getattr(data, "hparams", None)) if isinstance(holder, has_size)
    ]
