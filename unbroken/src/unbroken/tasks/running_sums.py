"""Exact means of losses and metrics: over samples of batches of any size, and over all ranks."""

from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from unbroken.tasks.waiting_batches import WaitingBatches

# A subclass may have one metric of its own in the place of the collection.
Metrics = MetricCollection | Metric


class Counted(Protocol):
    """What the sums ask of their module."""

    train_metrics: Metrics
    eval_metrics: Metrics

    @property
    def trainer(self) -> Trainer: ...

    @property
    def device(self) -> torch.device: ...

    def losses_to_log(self, losses: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """The values whose mean is ``train/loss``.

        ``losses`` are those that were trained, a mean per batch.
        """
        ...

    def counted_targets(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Which targets the loss counts, bool in their shape; None: all of them."""
        ...

    def predictions(self, outputs: Tensor) -> Tensor:
        """What metrics take for outputs."""
        ...

    def metric_targets(self, targets: Tensor) -> Tensor:
        """What metrics take for targets."""
        ...


class RunningSums:
    """What a module has counted and not logged yet.

    A mean of batch means is not the mean of all samples, as the last batch may be smaller. So
    losses and samples are added up, each in float64, and divided once, when their mean is logged.
    The sums stay on the device, because to read a number in every step would wait for the device in
    every step. There are three of them, each a tensor (2,) with the sum of the losses and the
    number of samples (of targets, where the loss may ignore some of them):

    - ``recent``: the training batches since the last log step;
    - ``epoch``: the training batches of this epoch;
    - ``eval``: the batches of the validation or test that goes on.

    Metrics of torchmetrics keep their own sums. They are updated here, at the same moments.

    Training batches first wait, and are counted together.
    """

    def __init__(self, module: Counted) -> None:
        self.module = module
        self.waiting = WaitingBatches(self.count_training)
        self.totals: dict[str, Tensor] = {}
        # Whether the metrics have seen a batch since the module's setup. It stands here because an
        # attribute of the module itself would come back when a run is resumed.
        self.are_tried = False

    # Training

    def begin_training(self) -> None:
        """Forget a training that was broken off."""
        self.waiting.forget()
        self.totals = {}
        self.module.train_metrics.reset()

    def count_later(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Let a training batch wait, to be counted with others.

        Args:
            loss: The mean loss of the batch, a scalar, without its graph.
            outputs: Outputs of the network, (batch, ...), without their graph.
            targets: (batch, ...).
        """
        self.waiting.add(outputs, losses=loss.reshape(1), targets=targets)

    def count_training(self, losses: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Count training batches.

        Args:
            losses: The mean loss of each batch, (batches,).
            outputs: Of all batches, (samples, ...).
            targets: Of all batches, (samples, ...).
        """
        losses = self.module.losses_to_log(losses, outputs, targets)
        self._add(["recent", "epoch"], losses, outputs, targets)
        self._update(self.module.train_metrics, outputs, targets)

    def means_since_log_step(self) -> dict[str, Tensor]:
        """The loss of the training samples since the last log step. They are then forgotten."""
        self.waiting.count()
        return self._means("recent", metrics=None)

    def means_of_epoch(self) -> dict[str, Tensor]:
        """The loss and metrics of the epoch's training samples. They are then forgotten."""
        self.waiting.count()
        means = self._means("epoch", self.module.train_metrics)
        self.totals = {}
        return means

    # Evaluation

    def begin_evaluation(self) -> None:
        """Forget a validation or test that was broken off."""
        self.totals.pop("eval", None)
        self.module.eval_metrics.reset()

    def count(self, losses: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch of a validation or test.

        ``losses``: their mean, or a value per sample (batch, ...).
        """
        self._add(["eval"], losses, outputs, targets)
        self._update(self.module.eval_metrics, outputs, targets)

    def means_of_evaluation(self) -> dict[str, Tensor]:
        """The loss and metrics of the evaluated samples. They are then forgotten."""
        return self._means("eval", self.module.eval_metrics)

    # What a checkpoint holds

    def state(self) -> dict[str, Tensor]:
        """The sums so far, and the batches that wait, on the CPU.

        Sums of torchmetrics are not among them: the engine saves every metric.
        """
        sums = {name: total.cpu() for name, total in self.totals.items()}
        return sums | self.waiting.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from what :meth:`state` returned."""
        device = self.module.device
        sums = self.waiting.load_state(state, device)
        self.totals = {name: total.to(device) for name, total in sums.items()}

    # How it is counted

    def as_metrics_take_them(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Predictions and targets of a batch; those of a regression in float64, as the sums are."""
        predictions = self.module.predictions(outputs)
        wanted = self.module.metric_targets(targets)
        if wanted.is_floating_point():
            return exact(predictions), exact(wanted)
        return predictions, wanted

    def _add(self, names: list[str], losses: Tensor, outputs: Tensor, targets: Tensor) -> None:
        # ``losses`` may be one mean, one mean per equally large batch, or one value per sample (or
        # more values, one per pixel, say): each is the mean of equally many targets.
        values = exact(losses.detach()).flatten()
        counted = self.module.counted_targets(outputs, targets)
        if counted is None or counted.numel() % len(values) > 0:
            # The loss ignores none, or the user's own gives values of unequally many targets.
            samples = len(targets)
            total = values.sum() * (samples / len(values))
            count = torch.full_like(total, samples)
        else:
            # The loss ignores some targets. A mean of none of them is not a number.
            counts = exact(counted.reshape(len(values), -1).sum(dim=1))
            total = (values * counts).where(counts > 0, 0).sum()
            count = counts.sum()
        sums = torch.stack([total, count])
        for name in names:
            before = self.totals.get(name, 0)
            # A new tensor and not ``+=``: a state that was taken before must not change.
            self.totals[name] = before + sums

    def _update(self, metrics: Metrics, outputs: Tensor, targets: Tensor) -> None:
        predictions, wanted = self.as_metrics_take_them(outputs, targets)
        metrics.update(predictions, wanted)

    def _means(self, name: str, metrics: Metrics | None) -> dict[str, Tensor]:
        """The means of all ranks, as float32; a loss or metrics that nobody has counted are left
        out.
        """
        nothing = exact(torch.zeros(2, device=self.module.device))
        sums = self.totals.pop(name, nothing)
        is_filled = metrics is not None and was_updated(metrics)
        # Every rank takes part, also one that has counted nothing: the others would wait for it for
        # ever. A training or validation step of the user's own may have counted no loss, or filled
        # no metric, on any rank.
        mine = torch.cat([sums, sums.new_tensor([is_filled])])
        loss, count, filled = self.module.trainer.strategy.reduce(mine, reduce_op="sum")
        means: dict[str, Any] = {}
        if count:
            means["loss"] = loss / count
        if metrics is not None and filled:
            means |= computed(metrics)
        if metrics is not None:
            metrics.reset()
        return {name: torch.as_tensor(value).float() for name, value in means.items()}


def computed(metrics: Metrics) -> dict[str, Any]:
    """Values by name. A metric alone is called after its class, as it would be in a collection."""
    value = metrics.compute()
    if isinstance(metrics, MetricCollection) or isinstance(value, dict):
        return dict(value)
    return {type(metrics).__name__: value}


def was_updated(metrics: Metrics) -> bool:
    """Whether any metric was given a batch. A wrapper may leave that to the metric inside it."""
    return any(part.update_called for part in metrics.modules() if isinstance(part, Metric))


def exact(tensor: Tensor) -> Tensor:
    """The tensor as float64, so that the order of a sum does not matter.

    On MPS, which has no float64, it is float32.
    """
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def is_log_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the batch that has just ended completes an optimizer step in which Lightning logs.

    Lightning drops what is logged between log steps, and to log in every step costs more than the
    step itself.
    """
    accumulated: Any = trainer.accumulate_grad_batches
    completes_a_step = (batch_idx + 1) % accumulated == 0 or trainer.is_last_batch
    every: Any = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return completes_a_step and every > 0 and trainer.global_step % every == 0
