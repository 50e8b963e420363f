"""Yours: callbacks that are always on."""

from lightning.pytorch import Callback


def always_on() -> list[Callback]:
    """Callbacks of your own that take part in every run, without a flag.

    Write a class in a file of yours, import it above and put an object of it into the list::

        return [PrintsTheWeather()]

    ``project.fit`` adds them in front of those of ``--trainer.callbacks``.
    """
    return []
