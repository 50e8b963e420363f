"""How a run ends when it is asked to stop: with its state saved, on all ranks after the same step.

A stop signal is Ctrl-C (SIGINT), SIGTERM or SIGHUP; SLURM's signal asks for the same, and for a new
place in the queue. Lightning's own handlers of SIGTERM and of SLURM's signal are never set
(``leave_signals_alone`` in lightning_internals.py). In training, in this order:

1. A signal reaches any rank at any moment. Our handler (signals.py) only notes it. A script's own
   handler of that signal is called as well; the run stops even if that one only sets a flag.
2. After each optimizer step ``Hooks.on_train_batch_end`` (checkpoint/hooks.py) calls
   ``Saving.batch_ends`` (checkpoint/saving.py), which calls :meth:`Agreement.agree` (agreement.py)
   with what this rank asks for. All ranks get the request that counts most: SLURM's signal, then
   SIGTERM, Ctrl-C, a save that is due, nothing. A run of one rank has it at once, several ranks
   after their next step. What comes at the last step is asked for once more as training ends.
   (Ranks that read streams ask each other before each batch whether all have one. Their requests
   travel with that question, and are read when the batch is done.) A signal that comes while a save
   is made is no exception: one more step follows, and a save of its own before the stop.
3. When Lightning hands the next batch to the step, our patch of ``Precision.convert_input``
   (seams.py) calls ``Saving.before_batch`` first: it saves the run, and rank zero writes
   ``last.ckpt``. (For a step that takes ``dataloader_iter``, ``on_train_batch_start`` calls it.)
   After an epoch's last batch the next epoch's start does so, or the training's end. With a loader
   that cannot start inside an epoch, which a line tells before training, that file stays the one
   that an epoch's end has written last (of short epochs with a large state not each one is saved),
   and a line tells its step; in the first epoch there is none.
4. ``Ending.stop`` (checkpoint/ending.py) raises on every rank. Nobody needs to catch that: it is a
   SystemExit with the exit code.

   - Ctrl-C: :class:`unbroken.stopping.signals.Stopped`, 130.
   - SIGTERM, SIGHUP: :class:`agreement.Terminated`, 143. It is a Stopped and Lightning's
     SIGTERMException, so code that catches either one works. (In the start, and in the report, it
     is a plain Stopped.)
   - SLURM's signal: the job is queued again, then the same as at SIGTERM.
   - On a rank whose script's own handler has raised an exception, that one is raised instead.
   - If the disk has not taken the last save, the save has raised NotSaved before: 1.

5. Lightning tears down, and the ranks of a script end in any order. Lightning's observer thread
   would kill rank zero where another rank has ended with an error, so it is made to forget them
   (``release_child_processes``). In a command rank zero ends last, because it still writes the
   report, which asks no other rank, and waits for the mirror. torchrun itself ends with 1, whatever
   its ranks end with.

Inside a validation or a test the ranks agree after each batch, where all of them are known to have
equally many; elsewhere the stop waits for its end. What is cut is given up. Of a validation, the
state at its start is saved, unless it has changed weights (checkpoint/validation.py) or a loader
cannot start inside an epoch, and a resumed run begins it again. Before a test everything is saved
already.

What a second signal does (the first and the second may each be any stop signal): nothing, as long
as the run lasts (RUNS, see below). It prints nothing, shortens nothing, and what hangs still hangs.
SIGQUIT (Ctrl and backslash on the keyboard) or SIGKILL end such a run, and nothing more is saved
then. (torchrun sends SIGKILL itself, 30 s after it was asked to stop; ``--shutdown-timeout`` makes
it more.) At other moments (signals.py has the phases), where a third does the same as a second:

| the second comes | in a command | in a script |
| --- | --- | --- |
| in the imports (IMPORTS) | the first has ended the process (a child: rank zero is ending it) | - |
| in the start (STARTS) | nothing: the first is ending it | the same |
| in the report, or its mirror's wait | one rank (REPORTS): gives up what is left | - |
| while a script waits for its mirror (RUNS) | - | nothing |
| while ``Stopped`` is on its way to whoever catches it | nothing | is the script's |
| when all is done (ENDS) | ends that rank at once | is the script's |

A run lasts (RUNS) from ``Hooks.on_train_start`` (checkpoint/hooks.py), or from a validation or
test, until

- in a command, unbroken/run/main_job.py calls ``raise_from_now_on`` (one rank) or
  ``command_is_done`` (signals.py);
- in a script, its handlers are given back. Where anything is raised, ``Hooks.on_exception`` does
  it: it first waits for the save that is under way, and then at most 8 s for the mirror. (In the
  start there is neither.) Where nothing is raised, the callback's ``teardown`` does it, when the
  mirror is complete, or nothing more arrives in the store. The 8 s begin with this rank's signal,
  also with a first one that comes in ``teardown``.

A signal that comes when a script has its handlers back is not ours: Ctrl-C raises
KeyboardInterrupt, even while ``Stopped`` is on its way, and SIGTERM ends the process. Before the
callback's ``setup``, and in ``Trainer.predict``, a signal is not ours either, and in the start of a
script no thread ends what hangs. All this holds for each rank of a script. A signal is ours in a
script only if ``fit`` runs in the main thread, and if it was not ignored when the script started
(nohup, a job in the background).

The handlers that a script has set before ``fit`` are called at each signal, in every phase. (One
that it sets while ``fit`` runs takes the place of ours, and is lost when the others are given
back.) What the last of them raises in RUNS ends the run in the place of ``Stopped``, if that is not
on its way yet; in the start it is raised at once, also at a second signal.

In the start the first signal ends nothing if it is SLURM's, or where the user's code swallows
``Stopped``, as a bare ``except`` does: then the run stops at its first step (a command is ended
after 1.5 s where training has not begun). In imports and start a rank that rank zero has started
passes each signal on to it, and rank zero ends all. A run that is done and whose report is given up
lacks its summary, too.

A *first* signal after the last step finds nothing left to save:

- A command of one rank that writes its report gives up the rest and ends with 130 or 143. With
  several ranks, and between the last batch of the test and the report, the command ends with 0, and
  waits for its mirror for 8 s at most.
- In a script ``teardown`` gives the handlers back, and then raises ``Stopped`` if a signal came
  until then (``Ending.stop_if_asked_late``). At SLURM's signal the job is queued again then, too,
  because the rest of the script has not run.
- Where an error has ended the run before the stop, the error is what the script gets. One that
  catches it trains on; a line says that it is not asked to stop any more.
"""
