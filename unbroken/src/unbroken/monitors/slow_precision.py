"""Says in a run's first lines what half precision costs on this CPU."""

from lightning.pytorch import Callback, LightningModule, Trainer
from unbroken.machine import hardware
from unbroken.results.run_result import RunResult
from unbroken.stopping.ranks import say

# A step that takes less than this many times as long is not worth a word: other processes change
# more.
WORTH_A_WORD = 1.3


class SlowPrecision(Callback):
    """Measures half precision on a CPU when training begins, and says what it costs and what to
    type.

    A CPU without instructions for a precision converts to float32 and back. A run takes several
    times as long then, and nothing else would say so. What was typed still wins. The line also
    stands in the ``notes`` of ``summary.json``. Logged metrics: none.
    """

    def __init__(self) -> None:
        # What it says; None where half precision costs nothing here.
        self.line: str | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # This is the precision that is used: on a CPU, Lightning replaces 16-mixed by bf16-mixed.
        precision = str(trainer.precision)
        is_half = precision.startswith(("16", "bf16"))
        on_cpu = trainer.strategy.root_device.type == "cpu"
        # One rank is enough: the others run on the same kind of CPU, and wait meanwhile.
        if not (is_half and on_cpu and trainer.is_global_zero):
            return
        cost = hardware.cost_on_cpu(precision)
        if cost > WORTH_A_WORD:
            self.line = slow_line(precision, cost)
            say(self.line)

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Leave the line in the run's summary."""
        if self.line is not None:
            result.summary.notes.append(self.line)  # type: ignore[attr-defined, unused-ignore]


def slow_line(precision: str, cost: float) -> str:
    """What half precision costs, why, and which flag to type."""
    reason = ""
    if not hardware.cpu_computes(precision):
        reason = ", which has no instructions for it"
    measured = f"a step in {precision} takes {cost:.1f} times as long as in 32-true on this CPU"
    return f"{measured}{reason}. To train faster: --precision 32-true"
