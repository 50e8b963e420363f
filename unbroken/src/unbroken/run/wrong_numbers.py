"""Says when a result looks well and is not: numbers that are not finite, a best checkpoint that is
only the last.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy
from unbroken.results.run_result import RunResult
from unbroken.stopping.ranks import say

NOTHING_TRAINED = (
    "nothing was trained: no training_step has returned a loss. Does it end in `return loss`?"
)


class WrongNumbers(Callback):
    """Looks at metrics and weights at the end of each epoch and validation.

    It prints a line when one is not finite any more, and adds to the closing lines and to ``notes``
    in ``summary.json`` what is wrong with the result. A training whose first epoch has had no loss
    ends with that epoch.

    Args:
        monitor: The metric that the user wants best.ckpt to follow; None: it is chosen by the
            module.
    """

    def __init__(self, monitor: str | None = None) -> None:
        self.monitor = monitor
        # Metrics whose last value is not finite → the epoch since which it is so.
        self.bad_metrics: dict[str, int] = {}
        # The epoch since which weights are not finite.
        self.bad_weights_since: int | None = None
        self._has_validated = False
        self._is_test = False
        # Whether a training step of this start has returned a loss, or none was expected
        self._has_loss = False
        self._steps_seen = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_test = stage != "fit"

    def state_dict(self) -> dict[str, Any]:
        return {
            "metrics": dict(self.bad_metrics),
            "weights": self.bad_weights_since,
            "has_validated": self._has_validated,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The test at a run's end loads best.ckpt, which does not know what came after it.
        if self._is_test:
            return
        self.bad_metrics = dict(state_dict["metrics"])
        self.bad_weights_since = state_dict["weights"]
        self._has_validated = state_dict.get("has_validated", False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        if not self._has_loss:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            self._has_loss = loss is not None or not pl_module.automatic_optimization
            self._steps_seen += 1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._has_validated = True
            self._look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)
        # A module that collects statistics has no optimizer, and needs no loss.
        should_train = any(optimizer.param_groups for optimizer in trainer.optimizers)
        if self._steps_seen and not self._has_loss and should_train:
            trainer.should_stop = True

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Add a note for each thing that is wrong. Then nobody needs advice how to be faster."""
        summary = result.summary
        if self.bad_metrics or self.bad_weights_since is not None:
            summary.advice = None
        if result.stopped_by is None and trainer.limit_test_batches == 0:
            summary.notes.append("not tested: --limit_test_batches is 0.")
        if self._steps_seen and not self._has_loss:
            summary.notes.append(NOTHING_TRAINED)
        for name, value in summary.metrics.items():
            if name.startswith("test") and not math.isfinite(value):
                summary.notes.append(f"{name} is not a number ({value}).")
        for name, epoch in self.bad_metrics.items():
            summary.notes.append(f"{name} is not a finite number since epoch {epoch + 1}.")
        bad_since = self.bad_weights_since
        if bad_since is not None:
            summary.notes.append(f"weights are not finite numbers since epoch {bad_since + 1}.")
            may_be_bad = summary.best_epoch is not None and summary.best_epoch >= bad_since
            if may_be_bad and not holds_finite_weights(result.folder):
                summary.best_is_sound = False
                summary.notes.append("best.ckpt holds such weights: it predicts nothing.")
        if result.stopped_by is None and summary.best_score is None:
            self._note_best_that_is_last(result)

    def _note_best_that_is_last(self, result: RunResult) -> None:
        if result.folder is None or not (result.folder / "best.ckpt").exists():
            return
        if self.monitor is not None:
            reason = f"{self.monitor} never had a value"
        else:
            reason = "there was no metric to follow"
        if not self._has_validated:
            reason += ", for no validation ran"
        result.summary.notes.append(f"best.ckpt is only the last: {reason}.")

    def _look(self, trainer: Trainer, module: LightningModule) -> None:
        epoch = trainer.current_epoch
        for name, value in trainer.callback_metrics.items():
            if math.isfinite(float(value)):
                self.bad_metrics.pop(name, None)
            elif name not in self.bad_metrics:
                self.bad_metrics[name] = epoch
                say(f"{name} is not a finite number ({float(value)}) in epoch {epoch + 1}.")
        if self.bad_weights_since is None and not _are_finite(module):
            self.bad_weights_since = epoch
            say(f"weights are not finite numbers any more in epoch {epoch + 1}.")


def holds_finite_weights(folder: Path | None) -> bool:
    """Whether the weights in a run's ``best.ckpt`` are finite numbers. Also True where there is
    none.
    """
    path = None if folder is None else folder / "best.ckpt"
    if path is None or not path.exists():
        return True
    weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    return all(
        bool(torch.isfinite(each).all())
        for each in weights.values()
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())
    )


def _are_finite(module: LightningModule) -> bool:
    """Whether every weight is a finite number. One wait for each device that has weights."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in module.parameters():
        if is_lazy(parameter) or parameter.layout is not torch.strided:
            continue
        has_fractions = parameter.is_floating_point() or parameter.is_complex()
        if parameter.numel() > 0 and has_fractions:
            found = by_device.setdefault(parameter.device, [])
            found.append(parameter.detach().isfinite().all())
    return all(bool(torch.stack(found).all()) for found in by_device.values())
