"""When the windows of a training end, and what is digested then."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from unbroken.checkpoint.kept import KeptParts
from unbroken.parts.chain import STEPS_OF_A_WINDOW, digests_of_now, is_large
from unbroken.stopping.agreement import Agreement
from unbroken.stopping.ranks import gather_from_ranks


class Windows:
    """Adds the batches of a training to its open window, and a link to its chain where one ends.

    See :mod:`unbroken.parts.chain`. All ranks end a window with the same step, and each has the
    digests of all of them.

    Args:
        kept: Has the chain and the window.
        agreement: Has the ranks' group.
    """

    def __init__(self, kept: KeptParts, agreement: Agreement) -> None:
        self._chain = kept.chain
        self._window = kept.open_window
        self._agreement = agreement
        # Optimizer steps at the end of the last batch
        self._steps = 0

    def training_starts(self, trainer: Trainer) -> None:
        """Count the steps from here: a resumed run has some behind it."""
        self._steps = trainer.global_step

    def batch_ends(self, trainer: Trainer, batch: Any) -> None:
        """Take note of a batch that was trained on.

        A ``training_step`` that reads its batches itself has told Lightning only now which it was.
        Its batches are counted from the start of the process by the hook's own number, so the
        loop's number is taken.
        """
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        number = current.processed - 1
        self._window.add(batch, number)
        # A batch may have several steps.
        before = self._steps
        self._steps = trainer.global_step
        passes_a_hundredth = before // STEPS_OF_A_WINDOW < self._steps // STEPS_OF_A_WINDOW
        if passes_a_hundredth and not is_large(trainer):
            self._end(trainer)

    def epoch_ends(self, trainer: Trainer) -> None:
        """End the window: what the hooks of an epoch's end do comes into the next one."""
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        mine = digests_of_now(trainer, self._window)
        of_ranks = gather_from_ranks(mine, self._agreement.group)
        self._chain.add(trainer.current_epoch, trainer.global_step, of_ranks)
