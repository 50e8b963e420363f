"""How a run ends when it is asked to: see :mod:`unbroken.stopping.stop` for the whole of it."""

from __future__ import annotations

import signal
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from unbroken import lightning_internals
from unbroken.checkpoint.own_folder import OwnFolder
from unbroken.stopping import signals
from unbroken.stopping.ranks import of_all_ranks, say
from unbroken.stopping.slurm import requeue_job, requeue_signal_of
from unbroken.stopping.stop import (
    SAVE_DUE,
    Agreement,
    NextBatch,
    Terminated,
    request_of_this_rank,
    signal_of,
)
from unbroken.storage.files import NotWritten, copy_atomically


class Ending:
    """What any rank asks a run for, known to all of them at the same step; and the run's end.

    Args:
        own_folder: The folder of the run.
        requeue_signal: SLURM's signal, at which the job is queued again. None: that which the
            Trainer would take.
    """

    def __init__(self, own_folder: OwnFolder, requeue_signal: int | None) -> None:
        # What all ranks have agreed upon: to stop, SAVE_DUE, or 0 (see stop.py).
        self.request = 0
        self._own_folder = own_folder
        self._requeue_signal = requeue_signal
        self._signals = signals.TakenOver()
        self._agreement: Agreement | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has taken over no signals, and its ranks have not met."""
        nothing = {"request": 0, "_signals": signals.TakenOver(), "_agreement": None}
        return vars(self) | nothing

    def begin(self, trainer: Trainer) -> None:
        """Take over the signals, and let the ranks meet."""
        if self._agreement is None:
            self._agreement = Agreement(trainer.world_size)
        self._agreement.begin()
        lightning_internals.leave_signals_alone(trainer)
        if self._requeue_signal is None:
            environment = lightning_internals.cluster_environment(trainer)
            self._requeue_signal = requeue_signal_of(environment)
        self._signals.begin(self._requeue_signal)

    def end(self, trainer: Trainer) -> None:
        """Let the script and Lightning handle signals again."""
        lightning_internals.let_lightning_handle_signals(trainer)
        self._signals.end()

    @property
    def group(self) -> Any:
        """The ranks' group in CPU memory; None for one rank."""
        assert self._agreement is not None
        return self._agreement.group

    @property
    def is_asked_for(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self.request > SAVE_DUE

    def agree(self, mine: int) -> None:
        """Send this rank's request, and note what all have asked for: one rank now, several at the
        call before.
        """
        assert self._agreement is not None
        self.request = max(self.request, self._agreement.exchange(mine))

    def agree_at_the_end(self) -> None:
        """Note what all ranks ask for now. They wait for one another."""
        self.request = max(self.request, *of_all_ranks(request_of_this_rank(), self.group))

    def forget_request(self) -> None:
        """What was asked for is done, or cannot be done now. Every rank calls it."""
        assert self._agreement is not None
        self.request = 0
        self._agreement.forget_saves()

    def agree_on_next_batch(self, rank: int, has_one: bool, mine: int) -> NextBatch:
        """Which ranks have a further batch; this rank's request goes along."""
        assert self._agreement is not None
        return self._agreement.agree_on_next_batch(rank, has_one, mine)

    def stop_if_asked_late(self, trainer: Trainer) -> None:
        """Stop a script whose signal came after the last step at which the ranks agree. All that
        it asks for is saved. A command sees to it itself.
        """
        if self._signals.are_of_a_script:
            self.request = request_of_this_rank()
            if self.request:
                self.stop(trainer)

    def stop(self, trainer: Trainer) -> NoReturn:
        """End the run as the signal asks. At SLURM's, the job is queued again first."""
        signum = signal_of(self.request)
        self.request = 0
        if signum == self._requeue_signal:
            if trainer.is_global_zero:
                self._leave_for_requeue(trainer)
                requeue_job()
            signum = signal.SIGTERM
        lightning_internals.release_child_processes()
        if signum == signal.SIGTERM:
            lightning_internals.note_sigterm(trainer)
        if signals.state.raised is not None:
            # The script's own handler has said how the run ends.
            raise signals.state.raised
        raise Terminated if signum == signal.SIGTERM else signals.Stopped(signum)

    def _leave_for_requeue(self, trainer: Trainer) -> None:
        """Put a copy of ``last.ckpt`` where Lightning looks as a queued script starts again.

        A command finds its own checkpoint.
        """
        last = self._own_folder.files.last
        if self._own_folder.was_given or not self._own_folder.saves or not last.exists():
            return
        target = lightning_internals.next_requeue_checkpoint(trainer)
        try:
            copy_atomically(last, target)
        except NotWritten as error:
            say(f"{error} A queued script resumes with ckpt_path=keep.resume_from alone.")
