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

After the last save of a run, a signal is only noted in a script, and ends it in the callback's
``teardown`` (``Ending.stop_if_asked_late``). A command stops in the batches of its test; a signal
that comes later has nothing left to stop: the command ends with 0.

What a second Ctrl-C does (any signal in the place of either: signals.py has the phases, and which
line begins each):

| the first came | a command of one rank | a command of several ranks | a script |
| --- | --- | --- | --- |
| in a command's imports | has ended it | has ended it | - |
| in the start | nothing more: it ends | nothing more: it ends | nothing more: it ends |
| in training or the test | nothing until the run is saved | nothing to the end | nothing |
| ... and the run is saved | report, summary, mirror are given up | nothing to the end | see below |
| when the command is done | ends it at once | ends that rank at once | - |

A script has its own handlers again as soon as its Trainer has saved the run (in ``Hooks`` at an
error or a stop, else in ``teardown``): a second Ctrl-C is then its own, such as KeyboardInterrupt.
Before, a handler that it had set itself is called at every signal. With several ranks nothing is
given up, because all must end together; only SIGKILL ends what hangs.
"""
