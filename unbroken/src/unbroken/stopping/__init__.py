"""Signals, what ranks agree on, schedulers: how a run ends when it is asked to, with its state
saved, on all ranks after the same step.

What happens, in order:

1. A signal reaches any rank at any moment. In training its handler (signals.py) only notes it. A
   second signal changes nothing until the run is saved; signals.py has the table.
2. When a batch has ended an optimizer step, ``Hooks.on_train_batch_end`` (checkpoint/hooks.py)
   calls ``Saving.batch_ends`` (checkpoint/saving.py), which calls :meth:`Agreement.agree`
   (agreement.py) with what this rank asks for: to stop, to save, or nothing. All ranks get the
   largest request. A run of one rank has it at once; several ranks have it after their next step.
   (Ranks that read streams ask each other before each batch whether all have one. Their requests
   travel with that question, and are read when the batch is done.)
3. When Lightning hands the next batch to the step, our patch of ``Precision.convert_input``
   (seams.py) calls ``Saving.before_batch`` first: it saves the run, and rank zero writes
   ``last.ckpt``. After an epoch's last batch the next epoch's start does so, or the training's end.
   Where training cannot start inside an epoch, that file stays the one of the last epoch's end.
4. ``Ending.stop`` (checkpoint/ending.py) raises :class:`unbroken.stopping.signals.Stopped` on every
   rank, which ends the process with 143 or 130. At SIGTERM it is :class:`agreement.Terminated`. At
   SLURM's signal the job is queued again first, and the process ends as at SIGTERM. What a script's
   own handler has raised comes in the place of both.

Inside a validation the ranks agree after each of its batches, where all of them are known to have
equally many; elsewhere the stop waits for its end. A validation that is cut is given up: the state
at its start is saved (checkpoint/validation.py), and a resumed run begins it again.

After the last save of a run, a signal ends a script by ``Ending.stop_if_asked_late``. A command
stops in the batches of its test; later it has nothing left to do but to write its report, and what
a signal does then is in the table of signals.py.
"""
