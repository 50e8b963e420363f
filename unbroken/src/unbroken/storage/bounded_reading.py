"""Reads a file of ``torch.save`` in time and memory that are a small multiple of the file's size.

Nothing in a file is trusted. Before anything is unpacked, the parts of the archive are compared
with the size of the file. The pickle in it is looked through, without being run, for keys that
would take long to hash. torch then reads with ``weights_only=True``, which runs no code. At last
the contents are counted: neither the values nor a tensor may claim more than the bytes can hold, so
that whoever walks through them takes at most a step a byte.
"""

from __future__ import annotations

import io
import math
import pickletools
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

COO = torch.sparse_coo
BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
# Where torch.save puts everything but the tensors' values
PICKLE = "data.pkl"
# Steps of hashing that are allowed for each byte of the pickle, and for a pickle of any size
STEPS_PER_BYTE = 10
FREE_STEPS = 100_000
# How deeply lists and dictionaries may lie in each other. Python follows them by recursion.
DEEPEST = 200
# A network may take this many times the bytes of its file: it may be saved in half precision, and
# have buffers that
# are not saved. For a small one, some memory is free.
MOST_TIMES = 3
FREE_BYTES = 64 * 2**20
# A tensor counts for this many bytes at least: its bookkeeping takes memory and time, however few
# values it has.
LEAST_BYTES = 4096
# What makes tensors of a given size. Layers make their weights by these.
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full, torch.eye)
# What makes a row of numbers. Metrics make their thresholds by these.
ROWS = (torch.linspace, torch.logspace)
RANGES = (torch.arange, torch.range)
# Opcodes of pickle that take something out of its memory, or put it there
GETS = ("GET", "BINGET", "LONG_BINGET")
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


class TooMuch(ValueError):
    """A file claims to hold more than its bytes can."""


def unpack(file: Path | io.BytesIO, size: int) -> Any:
    """What a file of ``size`` bytes holds. Raises where it is damaged, or claims more than that."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        # torch.save compresses nothing. A compressed entry may unpack to a thousand times its size.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise TooMuch("it is compressed")
        # Entries may overlap, so that each is smaller than the file and all together are not.
        if sum(entry.file_size for entry in entries) > size:
            raise TooMuch("its parts are larger than the file")
        # torch.load checks no sums: flipped bits would become weights.
        broken = archive.testzip()
        if broken is not None:
            raise zipfile.BadZipFile(f"checksum of {broken}")
        pickled = b"".join(
            archive.read(entry) for entry in entries if entry.filename.endswith(PICKLE)
        )
    refuse_long_hashing(pickled)
    if isinstance(file, io.BytesIO):
        file.seek(0)
    # Without the argument, an environment variable would decide.
    with warnings.catch_warnings():
        # torch says that it checks sparse tensors. It shall.
        warnings.filterwarnings("ignore", "Validating sparse tensor")
        contents = torch.load(file, map_location="cpu", weights_only=True)
    refuse_too_much(contents, len(pickled), size)
    return contents


def refuse_long_hashing(pickled: bytes) -> None:
    """Raise where making the contents of a pickle would take long. Nothing of it is made.

    A tuple may hold another tuple twice, and a third one that one twice. It takes few bytes, but as
    a key it is hashed, and that visits every place. So the sizes of tuples are added up whenever
    one is taken out of the pickle's memory.
    """
    most = FREE_STEPS + STEPS_PER_BYTE * len(pickled)
    steps = 0
    # The sizes of what lies on the pickle's stack. None is a mark.
    stack: list[int | None] = []
    memory: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in PUTS:
            memory[argument] = stack[-1] or 1
            continue
        if opcode.name == "MEMOIZE":
            memory[len(memory)] = stack[-1] or 1
            continue
        if opcode.name == "MARK":
            stack.append(None)
            continue
        size = 1
        if opcode.name in GETS:
            size = memory.get(argument, 1)
            steps += size
        elif opcode.name == "DUP":
            size = stack[-1] or 1
            steps += size
            stack.append(size)
            continue
        taken = _take(stack, opcode)
        if opcode.name.startswith(("TUPLE", "LIST", "FROZENSET")):
            size += sum(taken)
        stack.extend([size] * len(opcode.stack_after))
        if steps > most:
            raise TooMuch("it holds one thing inside another very often")


def _take(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Remove what an opcode takes from the stack; returns the sizes."""
    taken: list[int] = []
    wanted = list(opcode.stack_before)
    if pickletools.markobject in wanted:
        # Everything down to the mark, and what stands below it
        item = stack.pop()
        while item is not None:
            taken.append(item)
            item = stack.pop()
        wanted = wanted[: wanted.index(pickletools.markobject)]
    below = [stack.pop() or 1 for _ in wanted]
    return taken + below


def refuse_too_much(contents: Any, pickled_bytes: int, file_bytes: int) -> None:
    """Raise where contents have more values than their pickle has bytes, or a tensor larger than
    the file.

    A list may hold one other list many times, and that a third one: few bytes become billions of
    values.
    """
    steps = 0
    # Values that are still to be looked at, each with how deeply it lies
    waiting: list[tuple[Any, int]] = [(contents, 0)]
    while waiting:
        value, depth = waiting.pop()
        steps += 1
        if depth > DEEPEST:
            raise TooMuch("it is nested too deeply")
        if steps > pickled_bytes:
            raise TooMuch("it has more values than bytes")
        attributes = getattr(value, "__dict__", {})
        refuse_hidden_methods(value, attributes)
        waiting.extend((item, depth + 1) for item in attributes.values())
        if isinstance(value, dict):
            waiting.extend((key, depth + 1) for key in value)
            waiting.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, (list, tuple, set)):
            waiting.extend((item, depth + 1) for item in value)
        elif isinstance(value, Tensor) and claimed_bytes(value) > file_bytes:
            raise TooMuch("a tensor is larger than the file")


def refuse_hidden_methods(value: Any, attributes: dict[str, Any]) -> None:
    """Raise where an attribute of a value stands in place of a method of its class.

    torch gives an OrderedDict the attributes that the file holds. With an attribute ``values``,
    whoever walks through the dictionary would see what that one returns, and not what is in it.
    """
    if any(hasattr(type(value), name) for name in attributes):
        raise TooMuch("an attribute hides a method")


def claimed_bytes(tensor: Tensor) -> int:
    """The bytes that a tensor's values take when they are copied, by its layout. A few bytes can
    claim any shape.
    """
    if tensor.layout == COO:
        # To coalesce it here could take any memory. Runs save coalesced tensors.
        if not tensor.is_coalesced():
            raise TooMuch("a sparse tensor is not coalesced")
        return tensor.indices().nbytes + tensor.values().nbytes
    if tensor.layout in BY_ROW:
        indices = tensor.crow_indices().nbytes + tensor.col_indices().nbytes
        return indices + tensor.values().nbytes
    if tensor.layout in BY_COLUMN:
        indices = tensor.ccol_indices().nbytes + tensor.row_indices().nbytes
        return indices + tensor.values().nbytes
    return tensor.numel() * tensor.element_size()


class BoundedMaking(TorchFunctionMode):
    """Inside, layers are made whose weights a file of ``file_bytes`` bytes can hold, and no larger
    ones.

    A configuration can name a layer of any size in few bytes, and any number of small ones.
    ``refusal`` is raised before the memory of a large one is taken, and once all that was made
    together is too much.
    """

    def __init__(self, file_bytes: int, refusal: BaseException) -> None:
        super().__init__()
        self.refusal = refusal
        self.most_bytes = MOST_TIMES * file_bytes + FREE_BYTES
        self.bytes_left = self.most_bytes

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = kwargs or {}
        if bytes_of_new_tensor(function, args, arguments) > self.bytes_left:
            raise self.refusal
        for argument in args:
            # Made in another way: its memory is taken as something is written into it.
            if isinstance(argument, Tensor) and claimed_bytes(argument) > self.most_bytes:
                raise self.refusal
        result = function(*args, **arguments)
        given = [*args, *arguments.values()]
        if isinstance(result, Tensor) and not shares_memory(result, given):
            # What compares weights, as a truncated normal start does, is thrown away at once.
            is_mask = result.dtype == torch.bool and function not in FACTORIES
            self.bytes_left -= LEAST_BYTES if is_mask else max(LEAST_BYTES, claimed_bytes(result))
            if self.bytes_left < 0:
                raise self.refusal
        return result


def shares_memory(result: Tensor, given: Iterable[Any]) -> bool:
    """Whether a function has returned one of the tensors that it was given, or a view of one."""
    if result.layout != torch.strided:
        return False
    place = result.untyped_storage().data_ptr()
    for item in given:
        is_dense = isinstance(item, Tensor) and item.layout == torch.strided
        if is_dense and item.untyped_storage().data_ptr() == place:
            return True
    return False


def bytes_of_new_tensor(function: Any, args: tuple[Any, ...], arguments: dict[str, Any]) -> int:
    """The bytes of a tensor that a factory is asked for; 0 for any other function."""
    kind = arguments.get("dtype") or torch.get_default_dtype()
    if function in ROWS:
        steps = arguments.get("steps", args[2] if len(args) > 2 else 0)
        return int(steps) * int(kind.itemsize)
    if function in RANGES:
        return length_of_range(*args, **arguments) * int(kind.itemsize)
    if function not in FACTORIES:
        return 0
    # A size is a list, or each number of the call.
    size = arguments.get("size", args)
    if len(args) > 0 and isinstance(args[0], (list, tuple)):
        size = args[0]
    numbers = [number for number in size if isinstance(number, int)]
    if function is torch.eye and len(numbers) == 1:
        numbers *= 2
    return math.prod(numbers) * int(kind.itemsize)


def length_of_range(start: float, end: float | None = None, step: float = 1, **_: Any) -> int:
    """How many numbers ``torch.arange`` makes. With one number, that is the end."""
    first = 0 if end is None else start
    last = start if end is None else end
    return math.ceil(abs(last - first) / abs(step))
