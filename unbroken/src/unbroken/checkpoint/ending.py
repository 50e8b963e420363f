"""How a run ends when it is asked to stop: see :mod:`unbroken.stopping` for the whole of it."""

from __future__ import annotations

import signal
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from unbroken import lightning_internals
from unbroken.checkpoint.own_folder import OwnFolder
from unbroken.stopping import signals
from unbroken.stopping.agreement import Terminated
from unbroken.stopping.ranks import say
from unbroken.stopping.slurm import requeue_job, requeue_signal_of
from unbroken.storage.files import NotWritten, copy_atomically


class Ending:
    """The signals of a run, and its end when it is asked to stop.

    Args:
        own_folder: The folder of the run.
        requeue_signal: SLURM's signal, at which the job is queued again. None: that which the
            Trainer would take.
    """

    def __init__(self, own_folder: OwnFolder, requeue_signal: int | None) -> None:
        self._own_folder = own_folder
        self._requeue_signal = requeue_signal
        self._signals = signals.ScriptSignals()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has taken over no signals."""
        return vars(self) | {"_signals": signals.ScriptSignals()}

    def take_over_signals(self, trainer: Trainer) -> None:
        """Let our own handler get the signals: before training begins it raises Stopped (but at
        SLURM's signal), and then it only notes them.
        """
        lightning_internals.leave_signals_alone(trainer)
        if self._requeue_signal is None:
            environment = lightning_internals.cluster_environment(trainer)
            self._requeue_signal = requeue_signal_of(environment)
        self._signals.begin(self._requeue_signal)

    def give_signals_back(self, trainer: Trainer) -> signals.Asked:
        """Let the script and Lightning handle signals again; returns what the script was asked
        until then. A command keeps its own handlers.
        """
        lightning_internals.let_lightning_handle_signals(trainer)
        return self._signals.end()

    def give_signals_back_at(self, error: BaseException, trainer: Trainer) -> None:
        """The same where an error or a stop ends the run. A script may catch an error and train on:
        it is told of a signal that has come before.
        """
        asked = self.give_signals_back(trainer)
        is_the_stop = isinstance(error, signals.Stopped) or error is asked.raised
        if asked.requested and not is_the_stop:
            name = signal.Signals(asked.requested).name
            say(f"{name}: an error ends the run, and it is not asked to stop any more.")

    def stop_if_asked_late(self, trainer: Trainer, asked: signals.Asked) -> None:
        """Stop a script whose signal came after the ranks have agreed for the last time, as
        training ends. Everything is saved already. A command sees to it itself.
        """
        if asked.requested:
            self.stop(trainer, asked.requested, asked.raised)

    def stop(
        self, trainer: Trainer, signum: int, raised_late: BaseException | None = None
    ) -> NoReturn:
        """End the run as the signal asks. At SLURM's, the job is queued again first.

        ``raised_late``: what the script's own handler of it has raised, where the handlers have
        been given back since.
        """
        if signum == self._requeue_signal:
            if trainer.is_global_zero:
                self._leave_for_requeue(trainer)
                requeue_job()
            signum = signal.SIGTERM
        lightning_internals.release_child_processes()
        if signum == signal.SIGTERM:
            lightning_internals.note_sigterm(trainer)
        raised = raised_late or signals.state.raised
        if raised is not None:
            # The script's own handler has said how the run ends.
            raise raised
        raise Terminated if signum == signal.SIGTERM else signals.Stopped(signum)

    def _leave_for_requeue(self, trainer: Trainer) -> None:
        """Put a copy of ``last.ckpt`` where Lightning looks as a queued script starts again. Where
        it is of an earlier training, the script starts anew again.

        A command finds its own checkpoint.
        """
        folder = self._own_folder
        last = folder.files.last
        is_mine = folder.saves and folder.last_is_of_this_training and last.exists()
        if folder.is_managed_by_caller or not is_mine:
            return
        target = lightning_internals.next_requeue_checkpoint(trainer)
        try:
            copy_atomically(last, target)
        except NotWritten as error:
            say(f"{error} A queued script resumes with ckpt_path=keep.resume_from alone.")
