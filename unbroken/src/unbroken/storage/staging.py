"""Memory in which the state of a save waits for the disk: one copy, whose memory is used again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor

# Containers of a checkpoint, which holds plain values only
MAPPINGS = (dict, OrderedDict, Counter)
SEQUENCES = (list, tuple)
# Device, address and bytes of a storage
MemoryRange = tuple[str, int, int]


class Staging:
    """Copies checkpoints, each into the memory of the one before.

    A tensor is copied with its storage, as torch saves it: tensors that share memory share it in
    the copy, too. Every tensor is copied at every save, also one that is frozen: a teacher that is
    averaged through ``.data`` changes without its version, and only its values would tell.

    The copy lies in the memory of the host. From a GPU the bytes go into pinned memory; the GPU
    copies them in order with its other work, and the training thread does not wait for it.
    """

    def __init__(self) -> None:
        # By the bytes that each holds, and whether it is pinned: memory of the copy before.
        self._free: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._used: dict[tuple[int, bool], list[torch.UntypedStorage]] = {}
        self._copies: dict[MemoryRange, torch.UntypedStorage] = {}
        self._private: Collection[MemoryRange] = ()
        self._copied_on: set[torch.device] = set()

    def copy(
        self, checkpoint: dict[str, Any], private: Collection[MemoryRange] = ()
    ) -> dict[str, Any]:
        """A copy that training cannot change. The one before is overwritten.

        Args:
            checkpoint: Plain values and tensors, nested.
            private: Memory that nobody else holds, so that it need not be copied.
        """
        self._private = private
        # What the last copy did not need is let go of.
        self._free = self._used
        self._used = {}
        self._copies = {}
        self._copied_on = set()
        copied: dict[str, Any] = self._copy(checkpoint)
        return copied

    def wait(self) -> None:
        """Wait until the devices have copied everything. The thread that writes calls it."""
        for device in self._copied_on:
            torch.accelerator.synchronize(device)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        kind = type(value)
        if kind in MAPPINGS:
            copied: Any = kind()
            for key, item in value.items():
                copied[key] = self._copy(item)
            # nn.Module keeps the versions of its parts as an attribute of a state dict.
            if kind is OrderedDict:
                vars(copied).update(vars(value))
            return copied
        if kind in SEQUENCES:
            return kind(self._copy(item) for item in value)
        # Numbers and texts do not change, and of sets made_plain has made a copy.
        return value

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.detach().to("cpu", copy=True)
        place = memory_of(tensor)
        if place in self._private:
            return tensor.detach()
        storage = tensor.untyped_storage()
        copy = self._copies.get(place)
        if copy is None:
            copy = self._memory(storage)
            copy.copy_(storage, non_blocking=storage.is_cuda)
            if tensor.device.type != "cpu":
                self._copied_on.add(tensor.device)
            self._copies[place] = copy
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())
        # Views of complex numbers keep these two as bits of their own.
        if tensor.is_conj():
            made = made.conj()
        return made.neg() if tensor.is_neg() else made

    def _memory(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        kind = (storage.nbytes(), storage.is_cuda)
        free = self._free.get(kind)
        if free:
            memory = free.pop()
        else:
            size, pinned = kind
            empty = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            memory = empty.untyped_storage()
        self._used.setdefault(kind, []).append(memory)
        return memory


def memory_of(tensor: Tensor) -> MemoryRange:
    """Where a dense tensor has its memory."""
    storage = tensor.untyped_storage()
    return str(tensor.device), storage.data_ptr(), storage.nbytes()


def dense_in(value: Any) -> Iterator[Tensor]:
    """The dense tensors in nested plain values."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, (*MAPPINGS, *SEQUENCES)):
        for item in value.values() if isinstance(value, MAPPINGS) else value:
            yield from dense_in(item)


def memory_made_for(checkpoint: dict[str, Any], trainer: Trainer) -> set[MemoryRange]:
    """Where a checkpoint, as Lightning has made it, has memory that nobody else holds: FSDP has
    gathered it for this checkpoint. Of any other strategy there is none.
    """
    if not isinstance(trainer.strategy, FSDPStrategy):
        return set()
    model: Any = trainer.strategy.model
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    # Buffers and counters of steps are handed out as they are.
    theirs = [list(model.parameters()), list(model.buffers()), states]
    made = [checkpoint["state_dict"], checkpoint.get("optimizer_states", [])]
    return {memory_of(each) for each in dense_in(made)} - {
        memory_of(each) for each in dense_in(theirs)
    }


def bytes_in(value: Any) -> int:
    """The bytes of all tensors in nested plain values. Memory that is shared counts each time."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, MAPPINGS):
        return sum(bytes_in(item) for item in value.values())
    if isinstance(value, SEQUENCES):
        return sum(bytes_in(item) for item in value)
    return 0
