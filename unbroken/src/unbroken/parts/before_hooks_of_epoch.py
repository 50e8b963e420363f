"""What hooks of an epoch's start find: noted, because a resumed run calls them again."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from unbroken.parts.part import Note, Part
from unbroken.parts.users_objects import UsersObjects, are_made_again

# Moments of an epoch's start
LOADERS = "loaders"
HOOKS = "hooks"
# That of an epoch which comes after the save
NEXT_LOADERS = "next_loaders"


class MakersOfLoaders(Part):
    """What the data module, or a module that makes loaders itself, holds. It is noted before it
    makes them.

    Args:
        objects: Who finds it.
    """

    name = "makers"

    def __init__(self, objects: UsersObjects) -> None:
        self._objects = objects

    def take(self, trainer: Trainer) -> dict[str, Any]:
        return self._objects.take_of_makers(trainer)

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        self._objects.give_back_to_makers(trainer, value)


class BeforeHooksOfEpoch(Note):
    """What two hooks found: ``train_dataloader`` all generators and what it makes loaders of,
    ``on_train_epoch_start`` all generators.

    A resumed run calls both again. They may draw: which samples the epoch has, or which negatives.
    And to make loaders may change what they are made of: a list of files is shuffled, or loses some
    of them, or the calls are counted. So both find the same again.

    Args:
        makers: What loaders are made of.
        generators: The parts that keep generators.
    """

    # As checkpoints name it.
    name = "before_hooks_of_epoch"
    changes_in_validation = False

    def __init__(self, makers: MakersOfLoaders, generators: Sequence[Part]) -> None:
        # To give back what makes loaders may draw.
        self._parts = {LOADERS: [makers, *generators], HOOKS: generators}
        self._noted: dict[str, dict[str, Any]] = {}
        self._epoch_of_loaders: int | None = None

    def before_loaders(self, trainer: Trainer) -> None:
        """Note what the user's ``train_dataloader`` will find."""
        self._epoch_of_loaders = trainer.current_epoch
        self._note(trainer, LOADERS)

    def before_hooks(self, trainer: Trainer) -> None:
        """Note what the user's ``on_train_epoch_start`` will find."""
        self._note(trainer, HOOKS)

    def _note(self, trainer: Trainer, moment: str) -> None:
        self._noted[moment] = self._taken(trainer, moment)

    def _taken(self, trainer: Trainer, moment: str) -> dict[str, Any]:
        return {part.name: part.take(trainer) for part in self._parts[moment]}

    def take(self, trainer: Trainer) -> dict[str, dict[str, Any]]:
        noted = dict(self._noted)
        if are_made_again(trainer) and self._epoch_of_loaders != trainer.current_epoch:
            # The training has ended. A longer one makes loaders of what there is now.
            noted.pop(LOADERS, None)
            noted[NEXT_LOADERS] = self._taken(trainer, LOADERS)
        return noted

    def return_to_before_loaders(
        self, trainer: Trainer, saved: Mapping[str, Any], epoch: int
    ) -> None:
        """Let a resumed run make the loaders of this epoch as the one before did, or would have."""
        self._epoch_of_loaders = epoch
        found = saved.get(LOADERS, saved.get(NEXT_LOADERS))
        if found is not None:
            self._return(trainer, {LOADERS: found}, LOADERS)

    def return_to_before_hooks(self, trainer: Trainer, saved: Mapping[str, Any]) -> None:
        """Let the hooks of the epoch's start act as they did before."""
        self._return(trainer, saved, HOOKS)

    def _return(self, trainer: Trainer, saved: Mapping[str, Any], moment: str) -> None:
        if moment in saved:
            self._noted[moment] = saved[moment]
            for part in self._parts[moment]:
                part.give_back(trainer, saved[moment][part.name])
