"""Settings of the Trainer that training changes: a callback may accumulate more batches once the
loss stalls, clip harder, or let a run take one epoch more.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, Self

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from unbroken.parts.part import Part

# What Lightning asks the Trainer for at each batch, at each epoch, where it makes loaders again, or
# in a test after the training
OF_THE_TRAINER = (
    *("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("check_val_every_n_epoch", "val_check_batch", "val_check_interval"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches"),
    *("log_every_n_steps", "reload_dataloaders_every_n_epochs"),
)
# How long a training may be: the Trainer's names for them cannot be written.
OF_EPOCHS = ("max_epochs", "min_epochs")
OF_STEPS = ("max_steps", "min_steps")
LIMITS = (*OF_EPOCHS, *OF_STEPS)
# How Lightning steps a schedule
OF_SCHEDULES = ("interval", "frequency", "monitor", "strict", "reduce_on_plateau")


class ForAMoment(int):
    """A setting that whoever has set it puts back soon. A checkpoint holds what is put back.

    Args:
        value: What the Trainer reads for the moment.
        instead_of: What is put back.
    """

    instead_of: int

    def __new__(cls, value: int, instead_of: int) -> Self:
        made = super().__new__(cls, value)
        made.instead_of = instead_of
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.instead_of)


def lasting(setting: Any) -> Any:
    """What is put back where a setting is :class:`ForAMoment`, and any other as it is."""
    return setting.instead_of if isinstance(setting, ForAMoment) else setting


class Change(NamedTuple):
    """A setting that training has changed.

    Attributes:
        typed: As the Trainer was made.
        begun: As the start-up hooks have left it.
        now: As it is now.
    """

    typed: Any
    begun: Any
    now: Any


class TrainerSettings(Part):
    """Settings of the Trainer that have changed since training began.

    What the user types now, or a hook of the start sets now, wins: a setting is given back only
    where this start has found what the other one had.

    Attributes:
        steps_more: By how many ``max_steps`` is more than the user's at the moment.
    """

    name = "trainer"
    of_each_rank = False

    def __init__(self) -> None:
        self.steps_more = 0
        self._typed: dict[str, Any] = {}
        self._begun: dict[str, Any] = {}
        # The limits that were given back before loops ask for them.
        self._early: dict[str, Any] = {}

    def fit_starts(self, trainer: Trainer) -> None:
        """Note the settings before the start-up hooks."""
        self._typed = self._settings(trainer)

    def add_step(self, trainer: Trainer) -> None:
        """Let Lightning enter an epoch, though ``max_steps`` is reached."""
        self.steps_more = 1
        trainer.fit_loop.epoch_loop.max_steps += 1

    def take_step_off(self, trainer: Trainer) -> None:
        """Let ``max_steps`` be the user's again."""
        trainer.fit_loop.epoch_loop.max_steps -= self.steps_more
        self.steps_more = 0

    def _settings(self, trainer: Trainer) -> dict[str, Any]:
        settings = settings_of(trainer)
        settings["max_steps"] -= self.steps_more
        return settings

    def give_back_early(self, trainer: Trainer, value: dict[str, Any]) -> None:
        """Give back how long the training may be: a loop asks before training starts whether
        anything is left.
        """
        for name, change in changes_in(value, trainer).items():
            is_untouched = change.typed == change.begun == self._typed.get(name)
            if name in LIMITS and is_untouched:
                self._set(trainer, name, change.now)
                self._early[name] = change.now

    def begin(self, trainer: Trainer) -> None:
        """Note the settings after the start-up hooks."""
        self._begun = self._settings(trainer)
        for name, given in self._early.items():
            if self._begun[name] == given:
                self._begun[name] = self._typed[name]

    def loaders_are_made(self, trainer: Trainer) -> None:
        """Lightning has made the loaders of an epoch anew, and has computed from their length when
        to validate. That is no change of the user's.
        """
        self._begun["val_check_batch"] = trainer.val_check_batch

    def take(self, trainer: Trainer) -> dict[str, list[Any]]:
        changed: dict[str, list[Any]] = {}
        for name, now in self._settings(trainer).items():
            begun = self._begun.get(name, now)
            if now != begun:
                changed[name] = list(Change(self._typed.get(name), begun, now))
        return changed

    def give_back(self, trainer: Trainer, value: dict[str, Any]) -> None:
        for name, change in changes_in(value, trainer).items():
            if self._begun.get(name) == change.begun:
                self._set(trainer, name, change.now)

    def _set(self, trainer: Trainer, name: str, value: Any) -> None:
        if name == "max_steps":
            value += self.steps_more
        owner, attribute = places_of(trainer)[name]
        setattr(owner, attribute, value)


def changes_in(value: dict[str, Any], trainer: Trainer) -> dict[str, Change]:
    """What a checkpoint holds, of the settings that there are."""
    known = places_of(trainer)
    return {name: Change(*each) for name, each in value.items() if name in known}


def settings_of(trainer: Trainer) -> dict[str, Any]:
    """The settings as they are now, as plain values."""
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    places = places_of(trainer)
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in everyone):
        # It is a function of the epoch.
        del places["accumulate_grad_batches"]
    return {
        name: plain(getattr(owner, attribute, None)) for name, (owner, attribute) in places.items()
    }


def places_of(trainer: Trainer) -> dict[str, tuple[Any, str]]:
    """Who keeps each setting, and in which attribute."""
    places: dict[str, tuple[Any, str]] = {name: (trainer, name) for name in OF_THE_TRAINER}
    places |= {name: (trainer.fit_loop, name) for name in OF_EPOCHS}
    places |= {name: (trainer.fit_loop.epoch_loop, name) for name in OF_STEPS}
    for number, config in enumerate(trainer.lr_scheduler_configs):
        for name in OF_SCHEDULES:
            places[f"schedules.{number}.{name}"] = (config, name)
    everyone: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    stopping = [callback for callback in everyone if isinstance(callback, EarlyStopping)]
    for number, callback in enumerate(stopping):
        places[f"early_stopping.{number}.patience"] = (callback, "patience")
    return places


def plain(value: Any) -> Any:
    """The :func:`lasting` setting; of a choice that Lightning keeps as an Enum, its text."""
    value = lasting(value)
    return value.value if isinstance(value, Enum) else value
