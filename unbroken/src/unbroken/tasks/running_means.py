"""Exact means over all samples and all ranks, for a module that writes its steps itself."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from unbroken.tasks.running_sums import exact
from unbroken.tasks.waiting_batches import WaitingBatches

# Gives a value (batch,) for outputs and targets, (batch, ...) each.
Measure = Callable[[Tensor, Tensor], Tensor]


class RunningMeans:
    """The means of what you measure of each sample, to be logged when they are wanted.

        def __init__(self):
            self.train_means = RunningMeans(self, accuracy=is_right)

        def training_step(self, batch, batch_idx):
            ...
            self.train_means.add(logits, labels)

        def on_train_epoch_end(self):
            self.log_dict(self.train_means.of_epoch("train/"))  # train/accuracy

    A mean of batch means is not the mean of all samples, because the last batch may be smaller.
    Here values and samples are added up in float64, and divided once, over all ranks. Nothing waits
    for the device before a mean is asked for. Batches wait until there are 64 of them, and are then
    measured together, which takes as long as one batch alone. A run that is resumed inside an epoch
    continues its sums, with the batches that waited.

    Args:
        module: Whose samples these are. Its Trainer knows the other ranks.
        measures: By name, a function of outputs and targets, (batch, ...) each, that gives a value
            for each sample, (batch,).
    """

    def __init__(self, module: LightningModule, **measures: Measure) -> None:
        self.module = module
        self.measures = measures
        self.waiting = WaitingBatches(self.measure_all)
        # What was added since the last log step, and in this epoch: (1 + measures,), the number of
        # samples and the sum of each measure.
        self.sums: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Forget everything. Call it in ``setup``: an earlier training may have been broken off."""
        self.waiting.forget()
        self.sums = {}

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch: outputs of the network, and targets, (batch, ...) each."""
        self.waiting.add(outputs.detach(), targets=targets)

    def since_log_step(self, prefix: str, *names: str) -> dict[str, Tensor]:
        """The means of these measures since the last log step, by their names after ``prefix``.

        Every rank has to call it.
        """
        means = self._means("recent", prefix)
        return {f"{prefix}{name}": means[f"{prefix}{name}"] for name in names if means}

    def of_epoch(self, prefix: str) -> dict[str, Tensor]:
        """The means of all measures in this epoch, by their names after ``prefix``. The next epoch
        begins.

        Every rank has to call it. Where no rank has added a batch there are none.
        """
        means = self._means("epoch", prefix)
        self.reset()
        return means

    # What a checkpoint holds

    def metric_state(self) -> dict[str, Tensor]:
        """The sums so far, and the batches that wait, on the CPU."""
        sums = {name: total.cpu() for name, total in self.sums.items()}
        return sums | self.waiting.state()

    def load_metric_state(self, state: dict[str, Tensor]) -> None:
        """Continue from what :meth:`metric_state` returned."""
        device = self.module.device
        sums = self.waiting.load_state(state, device)
        self.sums = {name: total.to(device) for name, total in sums.items()}

    # How it is counted

    def measure_all(self, outputs: Tensor, targets: Tensor) -> None:
        """Measure samples, (samples, ...) each, and add them to the sums."""
        values = [exact(measure(outputs, targets)).sum() for measure in self.measures.values()]
        added = torch.stack([torch.full_like(values[0], len(targets)), *values])
        for name in ("recent", "epoch"):
            # A new tensor and not ``+=``: a state that was taken before must not change.
            self.sums[name] = self.sums.get(name, 0) + added

    def _means(self, name: str, prefix: str) -> dict[str, Tensor]:
        self.waiting.count()
        nothing = exact(torch.zeros(1 + len(self.measures), device=self.module.device))
        mine = self.sums.pop(name, nothing)
        # Every rank takes part, also one that has no sample: the others would wait for it for ever.
        strategy = self.module.trainer.strategy
        samples, *totals = strategy.reduce(mine, reduce_op="sum").unbind()
        if not samples:
            return {}
        pairs = zip(self.measures, totals, strict=True)
        return {f"{prefix}{measure}": (total / samples).float() for measure, total in pairs}


def is_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest logit of each sample is its label's, bool (batch,).

    Args:
        logits: (batch, classes).
        labels: Class numbers (batch,). Of mixed labels (batch, classes), as MixUp makes them, the
            largest counts.
    """
    if labels.is_floating_point():
        labels = labels.argmax(dim=1)
    return logits.argmax(dim=1) == labels


def at_least_float32(tensor: Tensor) -> Tensor:
    """A tensor of half precision as float32: a loss would be coarse. Others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
