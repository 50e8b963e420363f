"""Reads a file of ``torch.save``: the only reader of checkpoints, of the user's own and of
strangers' alike.

The bytes that are checked are the bytes that are read: one archive (:mod:`unbroken.trust.archive`),
one pickle in it, parsed once, by this file and by no other reader. The pickle is a small language
that builds values on a stack. Of it, this file knows what ``torch.save`` writes for plain values
and tensors, and nothing else: a name leads to what stands in a table below, and no module is
imported and nothing of a file is called.

Time and memory are bounded while the values are built: each counts for the bytes that it takes, and
all together for a small multiple of the pickle. At last the contents are counted as those see them
who walk through them: one list may stand in another many times.

Tensors are not read. They lie on the file's pages, which the system brings in as they are needed.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from unbroken.trust.archive import Entry, NoArchive, entries_of, refuse_wrong_sums

# The values of a pickle may take this many bytes of memory for each of its own, and this much in
# any case. A number takes 36 bytes, and 3 to 9 in the pickle.
MOST_TIMES = 8
FREE_BYTES = 64 * 2**20
# Whoever walks through the values may meet so many, and so many for each byte of the pickle: one
# that stands in several places is written once.
FREE_STEPS = 2**20
MOST_STEPS_PER_BYTE = 3
# A file of a stranger may have this many steps that build its values: a number is one, a text two.
# A tensor takes about thirty.
MOST_STEPS = 200_000
STEPS_OF_STORAGE = 64
# More than a file has. Entries that nobody uses would allow any number of steps.
MOST_STORAGES = 50_000
# The most bytes that these steps take on average. A text may be long.
BYTES_OF_STEP = 50
MANY_VALUES = (
    "it has very many values beside its tensors, and no seal of yours: a run with a key of yours"
    " (UNBROKEN_KEY) may have them"
)
# No value of a file is this object.
END = object()
# What a value takes, in bytes
NUMBER = 36
REFERENCE = 8
CONTAINER = 120
TENSOR = 1000
# How deeply lists and dictionaries may lie in each other. Python follows them by recursion.
DEEPEST = 200
# Keys with the same hash make a dictionary slow. Tuples can be chosen so that they have.
MOST_COLLISIONS = 1000
LARGEST_KEY = 2**60
LONGEST_KEY = 1000
SCALARS = (type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device)
# More than any tensor has. What torch does with the sizes of one takes their square in steps.
MOST_DIMENSIONS = 64
# No size, place or stride is larger: torch counts with 64 bits.
LARGEST_SIZE = 2**62
LONGEST_DEVICE = 40
# A storage of torch.save, and the type of what is in it
STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
UNTYPED = torch.uint8
LAYOUTS = {
    str(layout): layout
    for layout in (
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    )
}


class TooMuch(ValueError):
    """A file claims to hold more than its bytes can."""


class Foreign(ValueError):
    """A pickle names something that no checkpoint of ours holds. Another reader might run it."""


class Name(NamedTuple):
    """A function that a pickle may name. It is called by this file alone."""

    text: str


class Storage(NamedTuple):
    """The bytes of one or more tensors, and their type."""

    bytes: torch.UntypedStorage
    dtype: torch.dtype


def read_file(path: Path, check_sums: bool = False) -> Any:
    """What a file of ``torch.save`` holds, on the CPU. See :func:`opened`."""
    return opened(path, check_sums).read()


def opened(path: Path, check_sums: bool = False) -> Reader:
    """The reader of a file of ``torch.save``, which is opened once.

    Tensors stay on the file's pages. They outlive the file, as long as it is replaced and not
    written into.

    Args:
        path: The file.
        check_sums: Whether each byte is compared with the file's own sums. This reads all of it.

    Raises:
        NoArchive: It is damaged, or nothing that ``torch.save`` has written.
        Foreign: It holds something else than plain values. This and what follows the reader raises.
        TooMuch: It claims to hold more than it can.
        ValueError, TypeError, ...: Its pickle makes no sense.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise NoArchive("it is empty")
        data = _pages(file)
        entries = entries_of(data)
        if check_sums:
            refuse_wrong_sums(file, entries)
    # Windows replaces no file that is mapped.
    return Reader(data, entries, copied=os.name == "nt")


def _pages(file: BinaryIO) -> memoryview:
    try:
        # Private pages: what is written into a tensor changes no file.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        # A file system without mapped files
        return memoryview(bytearray(file.read()))


def read_bytes(data: memoryview) -> Any:
    """As :func:`read_file`, of a file that is in memory."""
    return Reader(data, entries_of(data), copied=False).read()


class Reader:
    """Builds the values of one file.

    Attributes:
        pickle: The bytes that describe the values.
        steps: How many steps it took to build them.
        usual_steps: How many a stranger's file may take.
    """

    def __init__(self, data: memoryview, entries: dict[str, Entry], copied: bool) -> None:
        root = next(iter(entries)).partition("/")[0]
        self._data = data
        self._entries = entries
        self._root = root
        self._copied = copied
        entry = entries.get(f"{root}/data.pkl")
        if entry is None or any(not name.startswith(f"{root}/") for name in entries):
            raise NoArchive("it has no data.pkl")
        order = entries.get(f"{root}/byteorder")
        if order is not None and bytes(self._slice(order)) != b"little":
            raise NoArchive("it was saved on a machine with another order of bytes")
        self.pickle = bytes(self._slice(entry))
        self._left = FREE_BYTES + len(data) + MOST_TIMES * len(self.pickle)
        self._at = 0
        self.steps = 0
        self.usual_steps = MOST_STEPS + STEPS_OF_STORAGE * min(len(entries), MOST_STORAGES)
        self.stack: list[Any] = []
        # What stood below a mark
        self._below: list[list[Any]] = []
        self._memory: list[Any] = []
        self._storages: dict[str, Storage] = {}
        self._hashes: dict[int, Any] = {}
        self._collisions = 0

    def _slice(self, entry: Entry) -> memoryview:
        return self._data[entry.start : entry.start + entry.size]

    def read(self, most_steps: int | None = None) -> Any:
        """The value that the pickle describes.

        Args:
            most_steps: TooMuch where it takes more.
        """
        if most_steps is not None and len(self.pickle) > BYTES_OF_STEP * most_steps:
            raise TooMuch(MANY_VALUES)
        for step in range(len(self.pickle) if most_steps is None else most_steps):
            code = self.pickle[self._at]
            self._at += 1
            if code == STOP:
                self.steps = step
                break
            act = OPCODES.get(code)
            if act is None:
                raise Foreign(f"opcode {code}")
            act(self)
        else:
            raise TooMuch(MANY_VALUES)
        (value,) = self.stack
        refuse_what_is_no_data(value, FREE_STEPS + MOST_STEPS_PER_BYTE * len(self.pickle))
        return value

    # Small steps of the opcodes below

    def spend(self, size: int) -> None:
        """Count bytes of memory."""
        self._left -= size
        if self._left < 0:
            raise TooMuch("its values are larger than the file")

    def take(self, count: int) -> bytes:
        """The next bytes of the pickle."""
        found = self.pickle[self._at : self._at + count]
        if len(found) != count:
            raise NoArchive("its data.pkl ends too early")
        self._at += count
        return found

    def number(self, form: str) -> Any:
        """The next number of the pickle."""
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def line(self) -> str:
        """The next line of the pickle."""
        end = self.pickle.index(b"\n", self._at)
        text = self.pickle[self._at : end].decode()
        self._at = end + 1
        return text

    def push(self, value: Any, size: int = 0) -> None:
        """Put a value on the stack."""
        self.spend(REFERENCE + size)
        self.stack.append(value)

    def push_number(self, form: str) -> None:
        """Read a number, and put it on the stack."""
        self.push(self.number(form), NUMBER)

    def mark(self) -> None:
        self.spend(CONTAINER)
        self._below.append(self.stack)
        self.stack = []

    def above_mark(self) -> list[Any]:
        """What was put on the stack since the last mark."""
        found = self.stack
        self.stack = self._below.pop()
        return found

    def long_number(self) -> None:
        data = self.take(self.number("<B"))
        self.push(int.from_bytes(data, "little", signed=True), NUMBER + len(data))

    def text(self) -> None:
        value = self.take(self.number("<I")).decode("utf-8", "surrogatepass")
        self.push(value, sys.getsizeof(value))

    def tuple_of(self, items: list[Any]) -> None:
        self.push(tuple(items), CONTAINER + REFERENCE * len(items))

    def last_as_tuple(self, count: int) -> None:
        items = self.stack[-count:]
        if len(items) != count:
            raise NoArchive("its data.pkl is damaged")
        del self.stack[-count:]
        self.tuple_of(items)

    def remember(self, place: int) -> None:
        # A pickle numbers what it remembers.
        if place != len(self._memory):
            raise Foreign("a memory with gaps")
        self.spend(REFERENCE)
        self._memory.append(self.stack[-1])

    def recall(self, place: int) -> None:
        self.push(self._memory[place])

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise Foreign(f"an element of a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict, Counter) or len(items) % 2:
            raise Foreign(f"an entry of a {type(target).__name__}")
        self.spend(CONTAINER * len(items) // 2)
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.refuse_slow_key(key)
            target[key] = value

    def refuse_slow_key(self, key: Any) -> None:
        """Raise where a key takes long to hash, or many have the same hash."""
        kind = type(key)
        if kind is str:
            return
        if kind is tuple:
            self.refuse_slow_tuple(key)
        elif kind not in SCALARS or kind is complex or (kind is int and abs(key) > LARGEST_KEY):
            raise Foreign(f"such a {kind.__name__} as a key")

    def refuse_slow_tuple(self, key: tuple[Any, ...]) -> None:
        """As :meth:`refuse_slow_key`. A tuple may hold another one twice, and so on: it is hashed
        place by place.
        """
        parts: list[tuple[Any, int]] = [(key, 0)]
        while parts:
            part, depth = parts.pop()
            self.spend(CONTAINER)
            if depth > DEEPEST or len(parts) > LONGEST_KEY:
                raise TooMuch("a key holds very much")
            if type(part) in (tuple, torch.Size):
                parts.extend((item, depth + 1) for item in part)
            elif type(part) not in SCALARS:
                raise Foreign(f"a {type(part).__name__} in a key")
        if self._hashes.setdefault(hash(key), key) != key:
            self._collisions += 1
        if self._collisions > MOST_COLLISIONS:
            raise TooMuch("its keys take long to find")

    def name(self) -> None:
        """``torch FloatStorage`` and the like: what a name of the tables stands for."""
        module = self.line()
        last = self.line()
        text = f"{module}.{last}"
        if text in FUNCTIONS:
            self.push(Name(text), CONTAINER)
        elif module == "torch" and last in STORAGES:
            self.push(STORAGES[last])
        elif text == "torch.storage.UntypedStorage":
            self.push(UNTYPED)
        elif module == "torch" and isinstance(vars(torch).get(last), torch.dtype):
            self.push(vars(torch)[last])
        else:
            raise Foreign(text)

    def call(self) -> None:
        """Make what a function of the table makes."""
        arguments = self.stack.pop()
        name = self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise Foreign("a call")
        function = FUNCTIONS[name.text]
        if not function.takes(arguments):
            raise Foreign(f"such arguments of {name.text}")
        self.push(function.make(self, *arguments), CONTAINER)

    def set_attributes(self) -> None:
        """A state dict knows the versions of its module's parts by an attribute."""
        attributes = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not OrderedDict or type(attributes) is not dict:
            raise Foreign(f"attributes of a {type(target).__name__}")
        for key, value in attributes.items():
            # Whoever walks through the dictionary would see what that one returns.
            if type(key) is not str or hasattr(OrderedDict, key):
                raise TooMuch("an attribute hides a method")
            self.spend(CONTAINER)
            setattr(target, key, value)

    def storage(self) -> None:
        """The bytes of tensors: ``("storage", type, name, device, count)``."""
        parts = self.stack.pop()
        if not IS_STORAGE.takes(parts):
            raise Foreign("a storage")
        _, dtype, name, _, count = parts
        if name not in self._storages:
            self._storages[name] = Storage(self._bytes(name), dtype)
        found = self._storages[name]
        if found.bytes.nbytes() != count * dtype.itemsize:
            raise TooMuch("a storage has another size than its entry")
        self.push(found._replace(dtype=dtype), CONTAINER)

    def _bytes(self, name: str) -> torch.UntypedStorage:
        entry = self._entries[f"{self._root}/data/{name}"]
        if entry.size == 0:
            return torch.UntypedStorage(0)
        data: Any = self._slice(entry)
        if self._copied or entry.start % 16:
            # Another program's zip does not put numbers where a processor reads them best.
            data = bytearray(data)
        return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()

    # What is made by the functions of the table. Their arguments have the types that stand there.

    def tensor(
        self,
        storage: Storage,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        needs_grad: bool,
        hooks: Any,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A tensor on a storage, as ``torch._utils._rebuild_tensor_v2`` and ``v3`` have it.

        It lies inside its storage: torch would let one grow that is too small, by whatever is in
        memory. ``hooks`` are nobody's.
        """
        dtype = dtype or storage.dtype
        self.spend(TENSOR)
        count = math.prod(size)
        if len(size) != len(stride):
            raise Foreign("a tensor with other strides than sizes")
        if count * dtype.itemsize > len(self._data):
            raise TooMuch("a tensor is larger than the file")
        if count == 0:
            # It needs no bytes, and may begin behind the last one.
            made = torch.empty(0, dtype=dtype).as_strided(size, stride)
            return made.requires_grad_() if needs_grad else made
        steps = zip(size, stride, strict=True)
        end = offset + sum((length - 1) * step for length, step in steps) + 1
        if end * dtype.itemsize > storage.bytes.nbytes():
            raise TooMuch("a tensor is larger than its storage")
        made = torch.empty(0, dtype=dtype).set_(storage.bytes, offset, size, stride)
        return made.requires_grad_() if needs_grad else made

    def parameter(self, data: Tensor, needs_grad: bool, hooks: Any) -> Tensor:
        """As ``torch._utils._rebuild_parameter``."""
        self.spend(TENSOR)
        return torch.nn.Parameter(data, requires_grad=needs_grad)

    def sparse_tensor(self, layout: torch.layout, parts: tuple[Any, ...]) -> Tensor:
        """As ``torch._utils._rebuild_sparse_tensor``. Its places are compared with its size."""
        takes = IS_COO if layout == torch.sparse_coo else IS_COMPRESSED
        if not takes.takes(parts):
            raise Foreign("a sparse tensor")
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if any(part.layout != torch.strided for part in tensors):
            raise Foreign("a sparse tensor")
        self.spend(TENSOR + sum(part.nbytes for part in tensors))
        if layout == torch.sparse_coo:
            indices, values, size, is_coalesced = parts
            # To coalesce it here could take any memory. Runs save coalesced tensors.
            if not is_coalesced:
                raise TooMuch("a sparse tensor is not coalesced")
            return torch.sparse_coo_tensor(
                indices, values, size, is_coalesced=True, check_invariants=True
            )
        first, second, values, size = parts
        return torch.sparse_compressed_tensor(
            first, second, values, size, layout=layout, check_invariants=True
        )

    def copied_items(self, items: Any) -> Any:
        """What a set, a size or a counter is made from."""
        self.spend(CONTAINER * len(items))
        if type(items) is not dict:
            for item in items:
                self.refuse_slow_key(item)
        return items

    def encoded(self, text: str, encoding: str) -> bytes:
        """How the second protocol of pickle writes bytes: as text, a letter for each byte."""
        if encoding != "latin1":
            raise Foreign("an encoding")
        self.spend(len(text))
        return text.encode("latin1")


def refuse_what_is_no_data(contents: Any, most_steps: int) -> None:
    """Raise where contents hold something else than plain values, or have more of them than
    ``most_steps``, as they see it who walk through them. A letter counts as well.
    """
    steps = 0
    # The containers that are open, one in the other. They are not copied: a file may be large.
    waiting: list[Iterator[Any]] = [iter([contents])]
    while waiting:
        value: Any = next(waiting[-1], END)
        if value is END:
            waiting.pop()
            continue
        kind = type(value)
        steps += len(value) + 1 if kind is str or kind is bytes else 1
        if len(waiting) > DEEPEST + 1:
            raise TooMuch("it is nested too deeply")
        if steps > most_steps:
            raise TooMuch("it has more values than bytes")
        if kind in (dict, OrderedDict, Counter):
            attributes = getattr(value, "__dict__", {})
            waiting.append(chain(value, value.values(), attributes.values()))
        elif kind in (list, tuple, set, torch.Size):
            waiting.append(iter(value))
        elif kind not in SCALARS and not isinstance(value, Tensor):
            raise Foreign(f"a {kind.__name__}")


class Takes:
    """The arguments of a function: a rule for each, of which the last ones may be absent.

    They are looked at before anything is done with them: an operator would multiply a text.
    """

    def __init__(self, *rules: Callable[[Any], bool], optional: int = 0) -> None:
        self._rules = rules
        self._fewest = len(rules) - optional

    def takes(self, arguments: Any) -> bool:
        """Whether these are arguments that the rules allow."""
        if type(arguments) is not tuple:
            return False
        if not self._fewest <= len(arguments) <= len(self._rules):
            return False
        rules = self._rules[: len(arguments)]
        return all(rule(value) for rule, value in zip(rules, arguments, strict=True))


def _exactly(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_SIZE


def _is_shape(value: Any) -> bool:
    is_short = type(value) in (tuple, torch.Size) and len(value) <= MOST_DIMENSIONS
    return is_short and all(_is_count(each) for each in value)


def _is_size(value: Any) -> bool:
    is_short = type(value) is tuple and len(value) <= LONGEST_KEY
    return is_short and all(type(each) is int and abs(each) <= LARGEST_SIZE for each in value)


def _is_device(value: Any) -> bool:
    return type(value) is str and len(value) <= LONGEST_DEVICE


def _is_layout(value: Any) -> bool:
    return type(value) is str and value in LAYOUTS


_is_bool = _exactly(bool)
_is_text = _exactly(str)
_is_number = _exactly(float)
_is_tensor = _exactly(Tensor)
_is_dtype = _exactly(torch.dtype)
_are_hooks = _exactly(OrderedDict, type(None))
_OF_A_TENSOR = (_exactly(Storage), _is_count, _is_shape, _is_shape, _is_bool, _are_hooks)
IS_STORAGE = Takes(_is_text, _is_dtype, _is_text, _is_text, _is_count)
IS_COO = Takes(_is_tensor, _is_tensor, _is_shape, _is_bool)
IS_COMPRESSED = Takes(_is_tensor, _is_tensor, _is_tensor, _is_shape)


class Function(NamedTuple):
    """What is made where a pickle names a function, and from which arguments."""

    make: Callable[..., Any]
    arguments: Takes

    def takes(self, arguments: Any) -> bool:
        """Whether it is called with these arguments."""
        return self.arguments.takes(arguments)


# What may be named in a pickle
FUNCTIONS: dict[str, Function] = {
    "torch._utils._rebuild_tensor_v2": Function(Reader.tensor, Takes(*_OF_A_TENSOR)),
    "torch._utils._rebuild_tensor_v3": Function(Reader.tensor, Takes(*_OF_A_TENSOR, _is_dtype)),
    "torch._utils._rebuild_parameter": Function(
        Reader.parameter, Takes(_is_tensor, _is_bool, _are_hooks)
    ),
    "torch._utils._rebuild_sparse_tensor": Function(
        Reader.sparse_tensor, Takes(_exactly(torch.layout), _exactly(tuple))
    ),
    "torch.serialization._get_layout": Function(
        lambda reader, text: LAYOUTS[text], Takes(_is_layout)
    ),
    "torch.Size": Function(
        lambda reader, items: torch.Size(reader.copied_items(items)), Takes(_is_size)
    ),
    "torch.device": Function(
        lambda reader, *parts: torch.device(*parts), Takes(_is_device, _is_count, optional=1)
    ),
    "collections.OrderedDict": Function(lambda reader: OrderedDict(), Takes()),
    "collections.Counter": Function(
        lambda reader, items: Counter(reader.copied_items(items)), Takes(_exactly(dict))
    ),
    "__builtin__.set": Function(
        lambda reader, items: set(reader.copied_items(items)), Takes(_exactly(list))
    ),
    "__builtin__.complex": Function(
        lambda reader, real, imaginary: complex(real, imaginary), Takes(_is_number, _is_number)
    ),
    "__builtin__.bytes": Function(lambda reader: b"", Takes()),
    "_codecs.encode": Function(Reader.encoded, Takes(_is_text, _is_text)),
}
STOP = ord(".")
# The opcodes that torch.save writes, by the second protocol of pickle
OPCODES: dict[int, Callable[[Reader], None]] = {
    0x80: lambda reader: refuse_other_protocol(reader.number("<B")),
    ord("}"): lambda reader: reader.push({}, CONTAINER),
    ord("]"): lambda reader: reader.push([], CONTAINER),
    ord(")"): lambda reader: reader.push(()),
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("J"): lambda reader: reader.push_number("<i"),
    ord("K"): lambda reader: reader.push_number("<B"),
    ord("M"): lambda reader: reader.push_number("<H"),
    ord("G"): lambda reader: reader.push_number(">d"),
    0x8A: Reader.long_number,
    ord("X"): Reader.text,
    ord("("): Reader.mark,
    ord("t"): lambda reader: reader.tuple_of(reader.above_mark()),
    0x85: lambda reader: reader.last_as_tuple(1),
    0x86: lambda reader: reader.last_as_tuple(2),
    0x87: lambda reader: reader.last_as_tuple(3),
    ord("q"): lambda reader: reader.remember(reader.number("<B")),
    ord("r"): lambda reader: reader.remember(reader.number("<I")),
    ord("h"): lambda reader: reader.recall(reader.number("<B")),
    ord("j"): lambda reader: reader.recall(reader.number("<I")),
    ord("a"): lambda reader: reader.append([reader.stack.pop()]),
    ord("e"): lambda reader: reader.append(reader.above_mark()),
    ord("s"): lambda reader: reader.set_items([reader.stack.pop(-2), reader.stack.pop()]),
    ord("u"): lambda reader: reader.set_items(reader.above_mark()),
    ord("c"): Reader.name,
    ord("R"): Reader.call,
    ord("b"): Reader.set_attributes,
    ord("Q"): Reader.storage,
}


def refuse_other_protocol(number: int) -> None:
    """Raise unless a pickle is of the protocol that torch.save uses."""
    if number != 2:
        raise Foreign(f"protocol {number}")
