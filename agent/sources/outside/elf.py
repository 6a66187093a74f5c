"""Where in a shared library's file an exported function begins.

The file is another process's: every offset and count in it is checked, and
only as much of it is read as the look-up in its hash table needs.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_GNU_HASH, _LOAD, _EXECUTABLE, _FUNCTION = 0x6FFFFFF6, 1, 1, 2
_MOST_SECTIONS = 4096
_MOST_CHAIN = 100_000
_MOST_NAME_BYTES = 512
_ENDBR64 = b"\xf3\x0f\x1e\xfa"


class BadElf(Exception):  # noqa: N818 - what it is
    """Not a library that can be read, or not honestly made."""


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


class Library:
    """An open file, which the caller closes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size
        head = self._read(0, 64)
        if head[:6] != _ELF64_LITTLE:
            raise BadElf("not a 64-bit little-endian ELF file")
        program_at, section_at = struct.unpack_from("<QQ", head, 32)
        program_bytes, programs, section_bytes, sections = struct.unpack_from("<HHHH", head, 54)
        if program_bytes != _PROGRAM.size or section_bytes != _SECTION.size:
            raise BadElf("headers of an unknown size")
        if sections > _MOST_SECTIONS or programs > _MOST_SECTIONS:
            raise BadElf("too many sections")
        self._programs = list(
            _PROGRAM.iter_unpack(self._read(program_at, programs * _PROGRAM.size))
        )
        self._sections = [
            _Section(kind, offset, size, link)
            for _, kind, _, _, offset, size, link, _, _, _ in _SECTION.iter_unpack(
                self._read(section_at, sections * _SECTION.size)
            )
        ]

    def _read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise BadElf("something points beyond the end of the file")
        found = os.pread(self._fd, length, offset)
        if len(found) != length:
            raise BadElf("the file ended early")
        return found

    def _section(self, number: int) -> _Section:
        if number >= len(self._sections):
            raise BadElf("no such section")
        return self._sections[number]

    def function(self, name: str) -> int | None:
        """The file offset of an exported function's first instruction that may be probed cheaply;
        None where there is none of this name. Raises BadElf, OSError."""
        table = next((each for each in self._sections if each.kind == _GNU_HASH), None)
        if table is None:
            return None
        symbols = self._section(table.link)
        address = self._look_up(table, symbols, self._section(symbols.link), name.encode())
        if address is None:
            return None
        for kind, flags, offset, start, _, in_file, _, _ in self._programs:
            if kind == _LOAD and flags & _EXECUTABLE and start <= address < start + in_file:
                at = int(offset + address - start)
                # On endbr64 a probe is single-stepped, at ten times the cost; behind it, it is not.
                return at + 4 if self._read(at, 4) == _ENDBR64 else at
        raise BadElf("a function outside the code")

    def _look_up(
        self, table: _Section, symbols: _Section, names: _Section, name: bytes
    ) -> int | None:
        """The function's address, by the GNU hash table."""
        buckets, first, bloom_words, shift = struct.unpack("<IIII", self._read(table.offset, 16))
        if not buckets or not bloom_words:
            raise BadElf("an empty hash table")
        hashed = gnu_hash(name)
        bloom_at = table.offset + 16 + 8 * (hashed // 64 % bloom_words)
        (word,) = struct.unpack("<Q", self._read(bloom_at, 8))
        if not (word >> (hashed % 64) & 1 and word >> ((hashed >> (shift % 32)) % 64) & 1):
            return None
        buckets_at = table.offset + 16 + 8 * bloom_words
        (number,) = struct.unpack("<I", self._read(buckets_at + 4 * (hashed % buckets), 4))
        if number < first:
            return None
        chain_at = buckets_at + 4 * buckets
        for each in range(number, number + _MOST_CHAIN):
            (value,) = struct.unpack("<I", self._read(chain_at + 4 * (each - first), 4))
            if value | 1 == hashed | 1:
                found = self._symbol(symbols, each)
                if self._name(names, found[0]) == name and found[1] & 15 == _FUNCTION and found[3]:
                    return int(found[4])
            if value & 1:
                return None
        raise BadElf("an endless hash chain")

    def _symbol(self, symbols: _Section, number: int) -> tuple[int, int, int, int, int, int]:
        found: tuple[int, int, int, int, int, int] = _SYMBOL.unpack(
            self._read(symbols.offset + _SYMBOL.size * number, _SYMBOL.size)
        )
        return found

    def _name(self, names: _Section, at: int) -> bytes:
        length = min(_MOST_NAME_BYTES, names.size - at)
        return self._read(names.offset + at, length).partition(b"\0")[0]


def gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value
