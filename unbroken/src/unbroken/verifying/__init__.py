"""Shows whether a run that was killed and resumed is the run that was never killed.

It knows nothing of how a checkpoint is made. It compares what runs did and became:

1. :class:`Recorder` (recorder.py) writes digests of batches, weights, generators and of whatever
   the user's objects hold (held_values.py), at each batch, into a file.
2. :mod:`trial` runs the same training twice undisturbed, and once killed by :class:`Killer`
   (kills.py) and started again, in processes of their own (processes.py).
3. :mod:`differences` compares the recordings, :mod:`causes` says why they differ, :mod:`mends` what
   to write, by what :mod:`facts` tells of a value, and :mod:`verdict` puts it into a text.
"""
