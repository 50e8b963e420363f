"""Signals, what ranks agree on, schedulers: how a run ends when it is asked to, with its state
saved, on all ranks after the same step.

What happens, in order:

1. A signal reaches any rank at any moment. In training its handler (signals.py) only notes it.
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

What a second Ctrl-C does, by when it comes (the first and the second may each be any of the stop
signals of signals.py, which has the phases, too):

| it comes | a command of one rank | a command of several ranks | a script |
| --- | --- | --- | --- |
| in the imports (IMPORTS) | the first has ended it | the first has ended it | - |
| in the start (STARTS) | is ignored: the first is ending it | the same | the same |
| in training or test (RUNS) | is ignored | is ignored | is ignored |
| while the report is written | report and summary are given up (SAVED) | is ignored (RUNS) | - |
| when all is done (ENDS) | ends it at once | ends that rank at once | is its own |

"Ignored" is: it shortens nothing, and what hangs still hangs; SIGKILL alone ends such a run.
(torchrun sends that itself, 30 s after it was asked to stop; ``--shutdown-timeout`` makes it more.)
A handler that a script had set itself is called at every signal.

A script's handlers are its own again in ``Hooks.on_exception``, at an error or behind the save of a
stop, else in the callback's ``teardown``. What a signal does from there is no matter of ours, such
as to raise KeyboardInterrupt in the place of Stopped. In the start of a script no thread ends what
hangs.

A *first* signal that comes late: while a command of one rank writes its report, it gives up the
rest and ends with 130 or 143. With several ranks, and between the last batch of the test and the
report, nothing is left to stop: the command ends with 0. In a script it is noted until
``teardown``, which ends it (``Ending.stop_if_asked_late``).
"""
