"""Small modules, data, schedules, callbacks and loggers, each in a plain Trainer with
ExactCheckpoint.

:mod:`tests.test_situations` kills each of them at random moments. A file here holds the situations
of one subject. :mod:`tests.situations.run` trains one of them.
"""
