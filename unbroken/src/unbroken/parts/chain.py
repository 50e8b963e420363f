"""The proof that a run carries: a chain of digests of what it trained on and what it became.

A training is cut into windows. A window ends with each hundredth optimizer step and with each
epoch, whenever the run is saved or stopped. Of a large module (:data:`LARGE_BYTES`) it ends with an
epoch alone, because to look at all weights takes as long as to copy them. As it ends, a link of the
chain is made, which has four digests:

- batches: each tenth batch of an epoch that was trained on in the window, as ``training_step`` left
  it
- generators: the states of Python's, NumPy's, torch's and the device's generator
- weights: the parameters and buffers of the module
- optimizer: the states of the optimizers, and their rates and other settings

Each digest is chained with the one before it. So the ends of two chains tell whether two trainings
were the same all the way, and their links tell in which window they part, and by what. What a stop
finds of an open window is in the checkpoint, and a resumed run goes on with it.

Each tenth batch is enough. A stream that repeats a sample or leaves one out gives other samples in
all batches after it, and a batch that is another one alone makes other weights.

Measured with batches of 128 pictures and three epochs of 70 steps, on two cores with much other
work: all of it took 0.5 % of the training of an MLP of 235,146 parameters (0.3 to 0.6 %, n = 7),
and 0.3 % of that of the default network (0.2 to 0.4 %, n = 5). With every batch it took 1.0 and
2.2 % of the MLP's (n = 2). In turn with runs without it, the median processor time of a whole run
of the MLP was 14.1 s (13.4 to 14.8 s, n = 7), and 14.1 s (12.8 to 14.3 s) without.

See :mod:`unbroken.tensors.bits` for the number that stands for a tensor.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy
from unbroken.parts.generators import random_state
from unbroken.parts.part import Note, Part
from unbroken.tensors.bits import settled, sums_of_bits, tensors_and_plain

# Optimizer steps
STEPS_OF_A_WINDOW = 100
# Of so many batches of an epoch one is digested.
BATCHES_PER_DIGEST = 10
DIGEST_BYTES = 8
# Of the parameters and buffers of a module. To look at so much takes some ten milliseconds.
LARGE_BYTES = 64 * 2**20
KINDS = ("batches", "generators", "weights", "optimizer")


class Link(NamedTuple):
    """The end of a window. The digests are whole numbers of 64 bits, with a sign.

    Attributes:
        epoch: From 0.
        step: Optimizer steps until its end.
    """

    epoch: int
    step: int
    batches: int
    generators: int
    weights: int
    optimizer: int


class OpenWindow(Part):
    """What was digested of this rank's batches since the last window ended."""

    name = "open_window"
    changes_in_validation = False

    def __init__(self) -> None:
        # Of each batch: its tensors, and one number for the rest.
        self._sums: list[Any] = []

    def add(self, batch: Any, number: int) -> None:
        """Add a batch, if it is among those that are digested. The device is not waited for.

        Args:
            batch: It was trained on.
            number: Its place in the epoch, from 0.
        """
        if number % BATCHES_PER_DIGEST:
            return
        tensors, rest = tensors_and_plain(batch)
        self._sums += sums_of_bits(tensors)
        self._sums.append(rest)

    def close(self) -> int:
        """The digest of the window. The next one begins."""
        digest = digest_of(settled(self._sums))
        self._sums = []
        return digest

    def take(self, trainer: Trainer) -> Tensor:
        self._sums = settled(self._sums)
        return torch.tensor(self._sums, dtype=torch.int64)

    def give_back(self, trainer: Trainer, value: Tensor) -> None:
        self._sums = value.tolist()


class Chain(Part):
    """The links of all windows that have ended, of all ranks together.

    Attributes:
        links: In their order.
        resumed_at: The optimizer steps at which a resumed run has gone on with the chain. They are
            no part of its state, because the state of a resumed run is that of an undisturbed one.
    """

    name = "chain"
    of_each_rank = False
    changes_in_validation = False
    is_read_after_training = True

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.resumed_at: list[int] = []

    def add(self, epoch: int, step: int, of_ranks: Iterable[tuple[int, ...]]) -> None:
        """Add a link.

        Args:
            epoch: See :class:`Link`.
            step: See :class:`Link`.
            of_ranks: Of each rank the digests of :data:`KINDS`, of this window alone.
        """
        before = self.links[-1] if self.links else Link(0, 0, 0, 0, 0, 0)
        chained = []
        for kind, values in zip(KINDS, zip(*of_ranks, strict=True), strict=True):
            chained.append(digest_of([getattr(before, kind), epoch, step, *values]))
        self.links.append(Link(epoch, step, *chained))

    @property
    def end(self) -> str | None:
        """The digest of the whole chain, in hexadecimal digits; None where no window has ended."""
        if not self.links:
            return None
        return in_hexadecimal(digest_of(self.links[-1]))

    def take(self, trainer: Trainer) -> Tensor:
        # A tensor is saved in microseconds, a list of numbers in milliseconds.
        return torch.tensor(self.links, dtype=torch.int64).reshape(-1, len(Link._fields))

    def give_back(self, trainer: Trainer, value: Tensor) -> None:
        self.links = [Link(*each) for each in value.tolist()]


class BitsInMemory(Note):
    """What the bits of weights and optimizers are at a save, in the memory of each rank.

    A resumed run compares them when it has everything back (see
    :class:`unbroken.checkpoint.restoring.Restoring`). The sums of a file find what has changed in
    the file; this finds also what has changed before it was written, or since it was read.
    Buffers are left out, because a validation may change them. So are the bits of a large module: a
    save would stop the training for twice as long.
    """

    name = "bits_in_memory"
    changes_in_validation = False

    def take(self, trainer: Trainer) -> dict[str, Any]:
        if is_large(trainer):
            return {}
        parameters = sums_of_bits(trainer.lightning_module.parameters())
        tensors, rest = optimizer_content(trainer)
        optimizer = [*sums_of_bits(tensors), rest]
        return {
            "weights": digest_of(settled(parameters)),
            "optimizer": digest_of(settled(optimizer)),
            "device": trainer.strategy.root_device.type,
            "places": dict(Counter(tensor.device.type for tensor in tensors)),
        }

    def differences(self, trainer: Trainer, saved: dict[str, Any]) -> list[str]:
        """Which of weights and optimizer are not what :meth:`take` found. On a device of another
        type there is nothing to compare, nor where an optimizer's states lie elsewhere now: torch
        moves what NAdam keeps in CPU memory to the GPU as it loads it.
        """
        now = self.take(trainer)
        if any(saved.get(name) != now.get(name) for name in ("device", "places")):
            return []
        return [name for name in ("weights", "optimizer") if saved.get(name) != now.get(name)]


def is_large(trainer: Trainer) -> bool:
    """Whether to look at all weights takes too long for every hundred steps, and for a save."""
    module = trainer.lightning_module
    size = 0
    # A large module's first tensors are enough to tell.
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not is_lazy(tensor):
            # A sparse tensor has no bytes of its own to ask for.
            size += tensor.numel() * tensor.element_size()
        if size > LARGE_BYTES:
            return True
    return False


def digests_of_now(trainer: Trainer, window: OpenWindow) -> tuple[int, ...]:
    """The digests of :data:`KINDS` on this rank. They end its window."""
    module = trainer.lightning_module
    # The device computes all of it before it is waited for.
    weights = sums_of_bits([*module.parameters(), *module.buffers()])
    optimizer = optimizer_sums(trainer)
    states, rest = tensors_and_plain(random_state(trainer.strategy.root_device))
    generators = [*sums_of_bits(states), rest]
    return (
        window.close(),
        *(digest_of(settled(each)) for each in (generators, weights, optimizer)),
    )


def optimizer_sums(trainer: Trainer) -> list[Any]:
    """Numbers for the states of optimizers and for their settings, such as rates."""
    tensors, rest = optimizer_content(trainer)
    return [*sums_of_bits(tensors), rest]


def optimizer_content(trainer: Trainer) -> tuple[list[Tensor], int]:
    """The tensors in the states of optimizers and in their settings, and one number for the rest of
    them.
    """
    states: list[Any] = []
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            settings = {name: value for name, value in group.items() if name != "params"}
            states += in_order(settings)
            for parameter in group["params"]:
                states += in_order(optimizer.state.get(parameter, {}))
    return tensors_and_plain(states)


def in_order(values: dict[str, Any]) -> list[Any]:
    """The values of a dictionary, by their names: a checkpoint may have them in another order."""
    return [value for _, value in sorted(values.items(), key=lambda pair: str(pair[0]))]


def digest_of(numbers: Iterable[int]) -> int:
    """The first 64 bits, with a sign, of the SHA-256 of whole numbers."""
    text = ",".join(map(str, numbers))
    found = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(found[:DIGEST_BYTES], "big", signed=True)


def in_hexadecimal(digest: int) -> str:
    """A digest as a person reads it: 16 digits."""
    return f"{digest % 2**64:016x}"
