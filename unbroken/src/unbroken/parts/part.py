"""The base class of everything that a checkpoint keeps beyond Lightning's own."""

from typing import Any

from lightning.pytorch import Trainer


class Part:
    """One thing that a checkpoint keeps, and how a resumed run gets it back.

    All parts are taken at one moment, between two batches: the batch before is done with its
    logging and its validation, and no hook of the next one has been called. For a stop inside a
    validation that moment is the validation's start, because a resumed run begins the validation
    again.

    A subclass for state that your own code keeps:

        class Temperature(Part):
            name = "temperature"

            def take(self, trainer):
                return trainer.lightning_module.temperature

            def give_back(self, trainer, value):
                trainer.lightning_module.temperature = value

    Attributes:
        name: Its key in the checkpoint. No two parts have the same.
        of_each_rank: Whether every rank has a value of its own. Else rank zero's is kept. A value
            of each rank is given back only where a run goes on with as many ranks as before.
        changes_in_validation: Whether a validation may change it. If not, a stop inside a
            validation takes it at the stop, and the start of a validation costs nothing.
        has_a_file: Whether its state lies in a file beside the checkpoint, such as the rows of
            metrics.csv. Such parts are given back last, for what cannot be restored is refused
            before any file is changed. They are given back also where nothing is left to train.
        takes_copies: Whether :meth:`take` returns copies, which need not be copied again.
        is_read_after_training: Whether code after the training reads it: it is then given back
            also where nothing is left to train.
    """

    name: str
    of_each_rank = True
    changes_in_validation = True
    has_a_file = False
    takes_copies = False
    is_read_after_training = False

    def take(self, trainer: Trainer) -> Any:
        """The state as plain data: numbers, text, lists, dictionaries and tensors.

        The caller copies it, unless the part ``takes_copies``.
        """
        raise NotImplementedError

    def give_back(self, trainer: Trainer, value: Any) -> None:
        """Put a state that :meth:`take` returned back, after all start-up hooks have been
        called.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Called on rank zero right before a checkpoint is written.

        What the state refers to must be on the disk.

        Raises:
            NotWritten: The disk does not take it. Then the checkpoint is not written, either.
        """

    def start_anew(self) -> None:
        """Called where a run starts from the beginning. An earlier one may have left something."""


class Note(Part):
    """A part that a resumed run only reads. Its class says who does."""

    def give_back(self, trainer: Trainer, value: Any) -> None:
        """There is nothing to put back."""
