"""The entries of a file of ``torch.save``, which is a zip archive of stored entries.

There is one way to read such a file: its directory stands at the very end, and the entries that the
directory names fill the file from its first byte on, one after the other. An archive that another
program could read otherwise (two directories, something before, between or behind the entries, one
name twice, a compressed entry) is refused.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import BinaryIO

# The records of a zip archive, as its specification (APPNOTE.TXT) lists their fields
LOCAL = struct.Struct("<4s5H3L2H")
ENTRY = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
END_OF_64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
# An entry whose size was not known when its head was written has a record behind it: a sum and two
# sizes, of four or eight bytes, with or without a mark.
BEHIND = (0, 12, 16, 20, 24)
HAS_RECORD_BEHIND = 0x8
IS_UTF8 = 0x800
STORED = 0
# In the place of a number that has eight bytes and stands elsewhere
ELSEWHERE = 0xFFFFFFFF
SIZES_OF_64 = 1
READ_AT_ONCE = 4 * 2**20


class NoArchive(ValueError):
    """The bytes are no archive of ``torch.save``: damaged, or made by another program."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the bytes of an entry stand, and their sum."""

    start: int
    size: int
    sum: int


def entries_of(data: memoryview) -> dict[str, Entry]:
    """Name → entry. Raises NoArchive, or struct.error where the bytes end too early."""
    first, end = _directory_of(data)
    found: dict[str, Entry] = {}
    place = first
    filled = 0
    while place < end:
        fields = ENTRY.unpack_from(data, place)
        mark, flags, method = fields[0], fields[3], fields[4]
        lengths = fields[10:13]
        name = bytes(data[place + ENTRY.size : place + ENTRY.size + lengths[0]])
        extra = bytes(data[place + ENTRY.size + lengths[0] :][: lengths[1]])
        packed, size, offset = _wide(fields[8], fields[9], fields[16], extra)
        place += ENTRY.size + sum(lengths)
        if mark != b"PK\x01\x02" or flags & ~(HAS_RECORD_BEHIND | IS_UTF8):
            raise NoArchive("its directory is damaged")
        if method != STORED or packed != size:
            raise NoArchive("it is compressed")
        head = LOCAL.unpack_from(data, offset)
        start = offset + LOCAL.size + head[9] + head[10]
        is_same = bytes(data[offset + LOCAL.size :][: head[9]]) == name
        if head[0] != b"PK\x03\x04" or head[3] != STORED or not is_same:
            raise NoArchive("an entry is not where its directory says")
        _refuse_gap(offset - filled)
        filled = start + size
        if filled > first or name.decode() in found:
            raise NoArchive("its entries overlap, or one stands there twice")
        found[name.decode()] = Entry(start, size, fields[7])
    _refuse_gap(first - filled)
    if place != end or not found:
        raise NoArchive("its directory is damaged")
    return found


def _refuse_gap(gap: int) -> None:
    if gap not in BEHIND:
        raise NoArchive("something stands between its entries")


def _directory_of(data: memoryview) -> tuple[int, int]:
    """Where the directory begins and ends."""
    last = len(data) - END.size
    if last < 0:
        raise NoArchive("it is too short")
    mark, *_, size, first, comment = END.unpack_from(data, last)
    if mark != b"PK\x05\x06" or comment:
        raise NoArchive("it does not end as an archive does")
    end = last
    at_locator = last - LOCATOR.size
    if at_locator >= 0 and bytes(data[at_locator : at_locator + 4]) == b"PK\x06\x07":
        end = at_locator - END_OF_64.size
        place = LOCATOR.unpack_from(data, at_locator)[2]
        if place != end or place < 0:
            raise NoArchive("its directory is not at its end")
        mark, *_, size, first = END_OF_64.unpack_from(data, place)
        if mark != b"PK\x06\x06":
            raise NoArchive("its directory is not at its end")
    if first + size != end:
        raise NoArchive("its directory is not at its end")
    return first, end


def _wide(packed: int, size: int, offset: int, extra: bytes) -> tuple[int, int, int]:
    """The numbers of an entry. Those that four bytes cannot hold stand in ``extra``, in this
    order: size, packed size, offset.
    """
    wide: list[int] = []
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        place += 4
        if kind == SIZES_OF_64:
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, place))
        place += length
    if size == ELSEWHERE:
        size = wide.pop(0)
    if packed == ELSEWHERE:
        packed = wide.pop(0)
    if offset == ELSEWHERE:
        offset = wide.pop(0)
    return packed, size, offset


def refuse_wrong_sums(file: BinaryIO, entries: dict[str, Entry]) -> None:
    """Raise NoArchive where bytes were flipped. It reads the whole file.

    torch compares no sums: flipped bits would become weights. The bytes are read, and not looked at
    in mapped pages: where a disk fails, that is an error, and no signal that ends the process.
    """
    for name, entry in entries.items():
        file.seek(entry.start)
        left = entry.size
        found = 0
        while left > 0:
            data = file.read(min(left, READ_AT_ONCE))
            if not data:
                raise NoArchive("it has become shorter")
            found = zlib.crc32(data, found)
            left -= len(data)
        if found != entry.sum:
            raise NoArchive(f"checksum of {name}")
