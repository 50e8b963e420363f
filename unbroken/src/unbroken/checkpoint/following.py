"""The metric that a run follows: which one it is, in which direction it is good, and its best value
so far.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from unbroken import contract
from unbroken.errors import UserError, nearest, require
from unbroken.parts.metrics import logged_since
from unbroken.parts.part import Part
from unbroken.stopping.ranks import gather_from_ranks, say

NOTHING: Mapping[str, Any] = {}
Mode = Literal["min", "max"]
# Where nobody names a metric, the first of these that is logged is followed.
DEFAULTS = ("val/accuracy", "val/loss", "val_loss")
# A metric with one of these in its name is best where it is smallest. The short ones must be words
# of their own.
COSTS = re.compile(
    r"loss|error|mae|mse|mape|perplexity"
    r"|(?<![a-z])(nll|ppl|bpc|wer|cer|eer|ece|fid|kl|brier|lpips)(?![a-z])"
)


@dataclass
class Best:
    """The metric that a run follows, and its best value so far."""

    # None: it is not known yet, or nothing is logged that could be followed.
    monitor: str | None = None
    # As the command line or the module names it.
    named_mode: Mode | None = None
    # Who named the metric. It must be logged then; a module's only after a validation.
    asked: Literal["typed", "module"] | None = None
    score: float | None = None
    epoch: int | None = None
    # What its validation logged, by names that begin with ``val``.
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A module may name another one later.
        self._typed_mode = self.named_mode

    @classmethod
    def of(cls, monitor: str | None, mode: Any) -> Best:
        """The metric that the user names, and its direction; None where he leaves it open."""
        require(mode in ("min", "max", None), "--mode", "be min or max", mode)
        if monitor is None:
            return cls(None, mode)
        # As an unset variable of a shell leaves it.
        require(monitor, "--monitor", "be a metric's name", "nothing")
        return cls(monitor, mode, "typed")

    def take_names_of(self, module: LightningModule) -> None:
        """Take over what the module names, where the user has named nothing. A training before may
        have followed a metric of another module.
        """
        if self.asked != "typed":
            self.monitor = None
            self.asked = None
            self.named_mode = self._typed_mode
        if self.monitor is not None or not isinstance(module, contract.NamesMetric):
            return
        if not isinstance(module.monitor, str) or not module.monitor:
            # An attribute of that name is a thing of another kind.
            return
        self.monitor = module.monitor
        self.asked = "module"
        if self.named_mode is None and isinstance(module, contract.NamesMode):
            direction: Any = module.mode
            self.named_mode = direction if direction in ("min", "max") else None

    @property
    def mode(self) -> Mode:
        """Whether the largest or the smallest value is the best.

        Where nobody says it, the metric's name does.
        """
        if self.named_mode is not None:
            return self.named_mode
        is_cost = COSTS.search((self.monitor or "").lower()) is not None
        return "min" if is_cost else "max"

    def assumptions(self) -> list[str]:
        """A line where the direction of a metric that was named is taken from its name."""
        if not self.asked or self.named_mode is not None:
            return []
        return [f"--mode {self.mode} is taken for {self.monitor}, by its name."]

    def compare(self, logged: dict[str, Any], epoch: int) -> bool:
        """Note a value; returns whether it is the best so far. An infinite one never is.

        Of equal values the later wins, as it is trained more.
        """
        if self.monitor is None:
            self.monitor = next((name for name in DEFAULTS if name in logged), None)
        if self.monitor not in logged:
            return False
        score = float(logged[self.monitor])
        if not math.isfinite(score) or not self.is_better(score):
            return False
        self.score = score
        self.epoch = epoch
        self.metrics = {n: float(value) for n, value in logged.items() if n.startswith("val")}
        return True

    def is_better(self, score: float) -> bool:
        """Whether a value is as good as the best so far, or better."""
        if self.score is None:
            return True
        return score >= self.score if self.mode == "max" else score <= self.score

    def forget(self) -> None:
        """Look for the best anew."""
        self.score = None
        self.epoch = None
        self.metrics = {}

    def is_that_of(self, state: dict[str, Any]) -> bool:
        """Whether this best is the one whose :meth:`state_dict` was saved."""
        return bool((state["score"], state["epoch"]) == (self.score, self.epoch))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "monitor": self.monitor,
            "mode": self.mode,
            "score": self.score,
            "epoch": self.epoch,
            "metrics": self.metrics,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the best so far, unless another metric or direction is followed now."""
        if not isinstance(state["score"], float | None) or state["mode"] not in ("min", "max"):
            raise TypeError("the best value so far, or whether lower is better, cannot be read")
        kept = {name: state[name] for name in ("monitor", "score", "epoch", "metrics")}
        then = replace(self, **kept)
        is_the_same = self.monitor in (None, then.monitor) and then.mode == state["mode"]
        if is_the_same:
            for name, value in kept.items():
                setattr(self, name, value)


class Following(Part):
    """Compares what a training logs with the best so far.

    Lightning keeps the latest value of everything that was ever logged. A value counts once, for
    the weights that it was measured with: at the end of the validation, or epoch, that has logged
    it.

    Checkpoints hold whether validations log the followed metric: a metric that training logs under
    the same name is then another one.

    Args:
        best: The best so far.
    """

    name = "followed"
    of_each_rank = False

    def __init__(self, best: Best) -> None:
        self.best = best
        # Whether the best is new, and best.ckpt does not hold it yet.
        self.is_new = False
        # None before the first validation.
        self._in_validations: bool | None = None
        # What was logged before the validation that runs, and before the epoch that runs.
        self._before_validation: dict[str, Any] = {}
        self._before_epoch: dict[str, Any] = {}

    def take(self, trainer: Trainer) -> bool | None:
        return self._in_validations

    def give_back(self, trainer: Trainer, value: bool | None) -> None:
        self._in_validations = value
        # The values of the checkpoint are back.
        self._before_epoch = dict(trainer.callback_metrics)

    @property
    def is_of_a_validation(self) -> bool:
        """Whether validations log the followed metric, as far as it is known."""
        return bool(self._in_validations)

    def validation_starts(self, trainer: Trainer) -> None:
        """Note what was logged before."""
        self._before_validation = dict(trainer.callback_metrics)

    def validation_is_over(self, trainer: Trainer, group: Any) -> None:
        """Compare what the validation has logged."""
        logged = logged_by_rank_zero(trainer, group, self._before_validation)
        if self.best.compare(logged, trainer.current_epoch):
            self.is_new = True
        self._in_validations = self.is_of_a_validation or self.best.monitor in logged

    def epoch_is_over(self, trainer: Trainer, group: Any) -> None:
        """Compare what the training has logged, where no validation logs what is followed.

        Raises:
            UserError: Nobody logs it.
        """
        best = self.best
        if self._in_validations or not best.asked:
            # What is followed comes from validations, or nobody has named it.
            return
        logged = logged_by_rank_zero(trainer, group)
        is_typed_without_validation = best.asked == "typed" and not trainer.enable_validation
        must_be_there = self._in_validations is not None or is_typed_without_validation
        if must_be_there and best.monitor not in logged:
            names = ", ".join(sorted(logged))
            hint = nearest(str(best.monitor), logged)
            raise UserError(f"--monitor must be logged, got {best.monitor}.{hint} Logged: {names}.")
        in_epoch = logged_by_rank_zero(trainer, group, self._before_epoch)
        self._before_epoch = dict(trainer.callback_metrics)
        # Lightning counts the epoch that has ended already.
        if best.compare(in_epoch, trainer.current_epoch - 1):
            self.is_new = True

    def training_is_over(self, trainer: Trainer, group: Any, saves: bool) -> None:
        """Compare once more. Where no metric was followed, the last is the best."""
        self.epoch_is_over(trainer, group)
        if self.best.score is not None:
            return
        self.is_new = True
        if saves and self.best.monitor is None and trainer.callback_metrics:
            names = ", ".join(sorted(trainer.callback_metrics))
            say(
                "no metric was followed, so best.ckpt is the last."
                " Name one of those that are logged with --monitor (in a script: monitor):"
                f" {names}."
            )


def logged_by_rank_zero(
    trainer: Trainer, group: Any, before: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """What was logged since other values were the latest. All ranks get rank zero's: a value that
    is not shared differs among them, and only together can they save a new best.
    """
    mine = logged_since(before, trainer)
    if trainer.world_size == 1:
        return mine
    numbers = {name: float(value) for name, value in mine.items()}
    found: dict[str, Any] = gather_from_ranks(numbers, group)[0]
    return found
