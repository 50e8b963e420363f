"""Files of a run, written completely or not at all, and read as plain data or refused.

* :mod:`~unbroken.storage.run_files`: ``last.ckpt`` and ``best.ckpt``, and when they are written.
* :mod:`~unbroken.storage.usable`: which of them can be used.
* :mod:`~unbroken.storage.checkpoint_files`: how one checkpoint is written and read.
* :mod:`~unbroken.storage.savable`: which values it can hold.
* :mod:`~unbroken.storage.seals`: whose it is, and whether it was changed.
* :mod:`~unbroken.storage.weights`: how a module gets its weights.
* :mod:`~unbroken.storage.staging` and :mod:`~unbroken.storage.writing_thread`: a copy in memory,
  and the thread that writes it.
* :mod:`~unbroken.storage.reading`: the small files of a run's folder, which may be a stranger's.
"""
