"""Metrics of the configuration: gathered, and tried on the first batch before an epoch is spent."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from unbroken.errors import UserError, require


def gather_metrics(metrics: dict[str, Metric]) -> MetricCollection:
    """Copies of the metrics, as one module.

    Raises:
        UserError: A name cannot be used, because a module already has an attribute of this name.
    """
    try:
        # Compute groups would share one metric's sums, and a checkpoint would miss the others'.
        return MetricCollection(dict(metrics), compute_groups=False).clone()
    except (KeyError, ValueError) as error:
        told = " ".join(str(error.args[0]).split())
        raise UserError(f"--model.metrics: {told}. Choose another name.") from None


def check_metrics(metrics: MetricCollection, predictions: Tensor, targets: Tensor) -> None:
    """Try metrics on a batch. Neither their sums nor any random generator change.

    torchmetrics updates a metric in every step, but computes it only when the epoch is over. A
    metric that gives a matrix, or that was made for another number of classes, would end the run
    so late.

    Args:
        metrics: By the names that they have in ``--model.metrics``.
        predictions: Of the batch, as the metrics will get them, (batch, ...).
        targets: Of the batch, as the metrics will get them, (batch, ...).

    Raises:
        UserError: A metric refuses such a batch, or gives something else than a number.
    """
    copies = metrics.clone()
    with isolate_rng(), warnings.catch_warnings(), torch.no_grad():
        # The run itself will repeat what torchmetrics says of its data.
        warnings.simplefilter("ignore")
        for name, metric in copies.items():
            check_metric(f"--model.metrics.{name}", metric, predictions, targets)


def check_metric(option: str, metric: Metric, predictions: Tensor, targets: Tensor) -> None:
    """The same for one metric, which is changed."""
    option = f"{option} {type(metric).__name__}"
    metric.reset()
    compute_on_this_rank_alone(metric)
    try:
        metric.update(predictions, targets)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if not is_refusal(metric, error):
            raise
        shapes = f"{tuple(predictions.shape)} and {tuple(targets.shape)}"
        told = " ".join(str(error).split())
        raise UserError(
            f"{option} refuses predictions and targets of shapes {shapes}: {told[:300]}"
        ) from None
    try:
        value = metric.compute()
    except Exception:
        # Some metrics need more samples than one batch may have. Of a whole epoch this tells
        # nothing.
        return
    hint = " Choose an average, or torchmetrics.ClasswiseWrapper for a number of each class."
    require(is_number(value), option, "give a number", what_it_is(value), hint)


def is_refusal(metric: Metric, error: Exception) -> bool:
    """Whether a metric of torchmetrics says that it was not made for such a batch.

    An error in a metric of the user's own keeps its traceback, which shows him the place. So does
    a lack of memory.
    """
    is_theirs = type(metric).__module__.startswith("torchmetrics.")
    return is_theirs and not isinstance(error, torch.OutOfMemoryError)


def compute_on_this_rank_alone(metric: Metric) -> None:
    """Let a metric, and those inside it, be computed without the other ranks."""
    for part in metric.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = never


def never() -> bool:
    """No ranks to share sums with."""
    return False


def is_number(value: Any) -> bool:
    """Whether a metric's value can be logged: a number, or several by name."""
    if isinstance(value, Mapping):
        return all(is_number(part) for part in value.values())
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))


def what_it_is(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
