"""The main job: train, keep the best checkpoint, test it once, say what came out."""

from unbroken.run.job import Job as Job
from unbroken.run.job import Run as Run
from unbroken.run.progress import RunTimer as RunTimer
from unbroken.run.wrong_numbers import WrongNumbers as WrongNumbers
