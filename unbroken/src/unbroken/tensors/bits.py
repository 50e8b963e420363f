"""One number for the bits of tensors, computed where they lie, without a wait for the device.

The bits are read as words of 64, each word is multiplied by an odd number of its own place, and the
products are added up modulo 2**64. An odd number can be divided by again, so that one changed word
always changes the sum. A word in another place is multiplied by another number: a picture that is
mirrored, or two samples that have changed places, change the sum as well. Whole numbers give the
same sum in any order of adding, so that it is the same on every device and with any threads.

``torch.hash_tensor`` is not used. It is the exclusive or of the elements: a mirrored picture has
the same hash, and equal elements cancel each other. On a CPU it starts a team of threads, which
took 12 ms for 100,000 elements beside a busy neighbour, where this sum took 0.04 ms.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from unbroken.tensors.same_values import (
    AS_WHOLE_NUMBERS,
    computes_itself,
    is_ordinary,
    tensors_inside,
)

WORD_BYTES = 8
# Words that are summed up at once. Their multipliers take 1 MiB.
CHUNK_WORDS = 2**17
# Chunks that another device multiplies in one operation, so that it has few to start for a large
# tensor. Their products take 64 MiB.
CHUNKS_AT_ONCE = 64
# Tensors of fewer bytes are joined first, because each call costs as much as a few kilobytes.
JOINED_BELOW_BYTES = 2**13
# Containers in containers of a batch
DEEPEST = 8
# Types that NumPy has, and by their bytes those that take the place of others, such as bfloat16
NUMPYS = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def sums_of_bits(tensors: Iterable[Tensor]) -> list[Any]:
    """Numbers for the bits of tensors, in their order.

    Args:
        tensors: On any device, of any layout and type. Lazy parameters have no bits yet, and those
            of a class that computes its numbers itself are not known.

    Returns:
        A number for each tensor that is not small, or for each MiB of it, and one for all small
        ones together. On a CPU it is an int. Elsewhere it is an int64 tensor without dimensions,
        which the device has yet to compute: :func:`settled` waits for it.
    """
    sums: list[Any] = []
    on_cpu: list[Any] = []
    elsewhere: list[Tensor] = []
    for tensor in tensors:
        for dense in _dense(tensor):
            is_small = dense.nbytes < JOINED_BELOW_BYTES
            if dense.is_cpu:
                content = _array_of(dense)
                if is_small:
                    on_cpu.append(content)
                else:
                    sums += _sums_on_cpu(content)
            elif is_small:
                elsewhere.append(_bytes_of(dense))
            else:
                sums += _sums_elsewhere(_bytes_of(dense))
    if on_cpu:
        joined = on_cpu[0] if len(on_cpu) == 1 else np.concatenate(on_cpu)
        sums += _sums_on_cpu(joined)
    if elsewhere:
        sums += _sums_elsewhere(torch.cat(elsewhere))
    return sums


def settled(sums: Sequence[Any]) -> list[int]:
    """Sums as whole numbers. It waits for each device, once."""
    numbers = list(sums)
    waiting: dict[torch.device, list[int]] = {}
    for place, each in enumerate(numbers):
        if isinstance(each, Tensor):
            waiting.setdefault(each.device, []).append(place)
    for places in waiting.values():
        computed = torch.stack([numbers[place] for place in places]).tolist()
        for place, number in zip(places, computed, strict=True):
            numbers[place] = number
    return numbers


def _dense(tensor: Tensor) -> Sequence[Tensor]:
    """The dense tensors that a tensor consists of: itself, where it is one."""
    if hasattr(tensor, "__tensor_flatten__"):
        # A tensor that is made of others, such as a shard or quantized weights. A shard names its
        # ranks, too, which are no tensor.
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return [dense for part in parts if isinstance(part, Tensor) for dense in _dense(part)]
    if is_lazy(tensor) or computes_itself(tensor):
        return ()
    if tensor.layout != torch.strided or not is_ordinary(tensor):
        return tensors_inside(tensor.detach())
    return (tensor,)


# On a CPU NumPy starts no threads, and its calls cost a fifth of torch's.


def _array_of(dense: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in CPU memory, in the order of its elements; uint8 (bytes,)."""
    if dense.dtype not in NUMPYS:
        dense = dense.view(AS_WHOLE_NUMBERS[dense.itemsize])
    # By force: what is conjugated is copied, and what has a gradient is detached.
    array = np.ascontiguousarray(dense.numpy(force=True))
    return array.reshape(-1).view(np.uint8)


def _sums_on_cpu(content: np.ndarray[Any, Any]) -> list[int]:
    """Sums of bytes (bytes,), which are filled up with zeros to whole words."""
    rest = content.size % WORD_BYTES
    if rest:
        content = np.concatenate([content, np.zeros(WORD_BYTES - rest, np.uint8)])
    words = content.view(np.int64)
    multipliers = _multipliers_on_cpu()
    sums = []
    for start in range(0, words.size, CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        sums.append(int(np.dot(chunk, multipliers[: chunk.size])))
    return sums


@functools.cache
def _multipliers_on_cpu() -> np.ndarray[Any, Any]:
    """The odd numbers of all places in a chunk; int64 (CHUNK_WORDS,)."""
    largest = np.iinfo(np.int64).max
    drawn = np.random.default_rng(20).integers(-largest, largest, CHUNK_WORDS, np.int64)
    return drawn | 1


def _bytes_of(dense: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of its elements; uint8 (bytes,)."""
    return dense.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _sums_elsewhere(content: Tensor) -> list[Tensor]:
    """As :func:`_sums_on_cpu`, on another device."""
    rest = len(content) % WORD_BYTES
    if rest:
        content = nn.functional.pad(content, (0, WORD_BYTES - rest))
    elif content.storage_offset() % WORD_BYTES:
        # A view of words must begin at one.
        content = content.clone()
    words = content.view(torch.int64)
    multipliers = _multipliers_on(words.device)
    in_whole_chunks = len(words) // CHUNK_WORDS * CHUNK_WORDS
    chunks = words[:in_whole_chunks].view(-1, CHUNK_WORDS)
    sums: list[Tensor] = []
    for some in chunks.split(CHUNKS_AT_ONCE):
        sums += (some * multipliers).sum(dim=1).unbind()
    last = words[in_whole_chunks:]
    if len(last):
        sums.append((last * multipliers[: len(last)]).sum())
    return sums


@functools.cache
def _multipliers_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_multipliers_on_cpu()).to(device)


def tensors_and_plain(value: Any) -> tuple[list[Tensor], int]:
    """The tensors in a value, and one number for the rest of it.

    Containers and dataclasses are opened, and objects that Lightning can move to a device, because
    they have a ``to``. Of another object its class counts alone.

    Returns:
        The tensors, in their order; and the CRC-32 of the plain values, of NumPy's arrays, and of
        the tensors' types and shapes.
    """
    tensors: list[Tensor] = []
    plain: list[Any] = []
    _collect(value, tensors, plain, 0)
    return tensors, zlib.crc32(repr(plain).encode())


def _collect(value: Any, tensors: list[Tensor], plain: list[Any], depth: int) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
        plain.append((value.dtype, _shape_of(value)))
        return
    if isinstance(value, np.number):
        # A checkpoint holds it as Python's number.
        value = value.item()
    if isinstance(value, PLAIN):
        plain.append(value)
        return
    if isinstance(value, (set, frozenset)):
        # Its order is another one in each process.
        plain.append(sorted(map(repr, value)))
        return
    if isinstance(value, (np.ndarray, np.generic)):
        # The elements of other arrays are objects, of which the bytes are addresses.
        content = None if value.dtype.hasobject else zlib.crc32(value.tobytes())
        plain.append((str(value.dtype), value.shape, content))
        return
    inside = _opened(value) if depth < DEEPEST else None
    if inside is None:
        plain.append(type(value).__qualname__)
        return
    for each in inside:
        _collect(each, tensors, plain, depth + 1)


def _shape_of(tensor: Tensor) -> Any:
    """A tensor's shape, or those of tensors that are nested in it; None for a lazy parameter."""
    if is_lazy(tensor):
        return None
    if tensor.is_nested and tensor.layout == torch.strided:
        return [tuple(part.shape) for part in tensor.unbind()]
    return tuple(tensor.shape)


def _opened(value: Any) -> Iterable[Any] | None:
    """What a value holds; None where it is not opened."""
    if isinstance(value, Mapping):
        return [each for pair in value.items() for each in pair]
    if isinstance(value, (list, tuple)):
        return value
    is_moved = hasattr(value, "to") and not isinstance(value, nn.Module)
    if dataclasses.is_dataclass(value) or is_moved:
        return [each for pair in getattr(value, "__dict__", {}).items() for each in pair]
    return None
