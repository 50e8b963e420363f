"""A state between two batches: every kept part, and how Lightning's own entries were at that
moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.memory import recursive_detach
from torch.nn.parameter import is_lazy
from unbroken.checkpoint.before_hooks import OwnEntries, extra_states
from unbroken.parts.loops import SavePoint
from unbroken.parts.part import Part
from unbroken.storage.savable import plain_entries
from unbroken.tensors.same_values import deep_copy


@dataclass
class Snapshot:
    """The state at one place in the loops. A save writes it, at once or a little later."""

    place: SavePoint
    # By name of the part: this rank's own, and those of which rank zero's counts.
    mine: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    # Lightning's own entries as they are now. Empty where the save follows at once.
    entries: dict[str, Any] = field(default_factory=dict)

    def add(self, trainer: Trainer, parts: Sequence[Part]) -> None:
        """Take parts. They are copied, because the training changes sums in place later."""
        for part in parts:
            value = part.take(trainer)
            if not part.takes_copies:
                value = deep_copy(value)
            if part.of_each_rank:
                self.mine[part.name] = value
            else:
                self.shared[part.name] = value

    def add_entries(self, trainer: Trainer) -> None:
        """Take what hooks may change before the save, of what Lightning saves itself.

        Those are the states of callbacks and of the data module, and the buffers and extra states
        of the module.
        """
        states = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            state = callback.state_dict()
            if state:
                states[callback.state_key] = state
        entries: dict[str, Any] = {"callbacks": states}
        module = trainer.lightning_module
        buffers = {name: each for name, each in module.named_buffers() if not is_lazy(each)}
        entries["state_dict"] = {**buffers, **extra_states(module)}
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None:
            entries[type(data).__qualname__] = data.state_dict()
        self.entries = deep_copy(recursive_detach(entries))

    def put_entries_into(self, checkpoint: dict[str, Any]) -> None:
        """Let Lightning's own entries in a checkpoint be those of this moment."""
        for key, before in self.entries.items():
            if key == "state_dict":
                # It has all weights, and not all buffers.
                saved = checkpoint.get(key, {})
                saved.update((name, value) for name, value in before.items() if name in saved)
            elif before:
                checkpoint[key] = before
            else:
                # Lightning saves no empty state, and no None of a data module.
                checkpoint.pop(key, None)


def entries_of_users(trainer: Trainer) -> dict[str, Any]:
    """What the user's own ``on_save_checkpoint`` adds, as far as a checkpoint can hold it."""
    entries: dict[str, Any] = {}
    for _, added in OwnEntries(trainer).added:
        entries |= plain_entries(added or {})
    return entries
