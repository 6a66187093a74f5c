"""Symbols of a library that another process has loaded, found in that process's memory.

No file is opened: what the dynamic linker reads lies in memory, mapped with the
library. Every number in it is a stranger's; reads are bounded, and what does
not make sense is no symbol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from dsagent.agent.inject.memory import Memory, MemoryGone

_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_DYN = struct.Struct("<qQ")
_SYM = struct.Struct("<IBBHQQ")
_GNU_HASH = struct.Struct("<IIII")

_X86_64 = 62
_ET_EXEC = 2
_PT_LOAD, _PT_DYNAMIC = 1, 2
_PF_X = 1
_DT_NULL, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 0, 5, 6, 0x6FFFFEF5
_STT_OBJECT, _STT_FUNC = 1, 2
_SHN_UNDEF = 0

_MAX_SEGMENTS = 64
_MAX_DYNAMIC = 512
_MAX_CHAIN = 4096
_PAGE_BYTES = 4096
_BUCKETS_A_READ = 65_536


class NotElf(Exception):  # noqa: N818 - what was found, not what went wrong
    """There is no x86-64 ELF file with dynamic symbols at this address."""


@dataclass(frozen=True, slots=True)
class Symbol:
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What is executed of it: addresses in the process."""

    start: int
    end: int

    @property
    def page_end(self) -> int:
        return -(-self.end // _PAGE_BYTES) * _PAGE_BYTES


def _gnu_hash(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


class Image:
    """One loaded ELF file; `base` is where its first byte is mapped. Raises NotElf."""

    def __init__(self, memory: Memory, base: int) -> None:
        self._memory = memory
        try:
            self._load(base)
        except (MemoryGone, struct.error) as error:
            raise NotElf(str(error)) from error

    def _load(self, base: int) -> None:
        header = _EHDR.unpack(self._memory.read(base, _EHDR.size))
        ident, kind, machine, phoff, phentsize, phnum = (
            header[0], header[1], header[2], header[5], header[9], header[10],
        )  # fmt: skip
        if ident[:6] != b"\x7fELF\x02\x01" or machine != _X86_64:
            raise NotElf("not an x86-64 ELF file")
        if phentsize != _PHDR.size or not 0 < phnum <= _MAX_SEGMENTS:
            raise NotElf("program headers out of bounds")
        self._bias = 0 if kind == _ET_EXEC else base
        raw = self._memory.read(base + phoff, phnum * _PHDR.size)
        dynamic = None
        executable = []
        for kind, flags, _, vaddr, _, _, memsz, _ in _PHDR.iter_unpack(raw):
            if kind == _PT_DYNAMIC:
                dynamic = self._bias + vaddr
            elif kind == _PT_LOAD and flags & _PF_X:
                executable.append(Segment(self._bias + vaddr, self._bias + vaddr + memsz))
        self.executable = tuple(executable)
        if dynamic is None:
            raise NotElf("no dynamic section")
        tags = dict(self._dynamic(dynamic))
        try:
            self._strings = self._address(tags[_DT_STRTAB])
            self._symbols = self._address(tags[_DT_SYMTAB])
            self._hash = self._address(tags[_DT_GNU_HASH])
        except KeyError as error:
            raise NotElf("no GNU hash table of its symbols") from error

    def _dynamic(self, at: int) -> Iterator[tuple[int, int]]:
        for index in range(_MAX_DYNAMIC):
            tag, value = _DYN.unpack(self._memory.read(at + index * _DYN.size, _DYN.size))
            if tag == _DT_NULL:
                return
            yield tag, value

    def _address(self, value: int) -> int:
        """glibc has these relocated in place, musl has not."""
        return value if value >= self._bias else self._bias + value

    def symbol(self, name: str) -> Symbol | None:
        """The function or variable that it defines; None where it does not."""
        try:
            return self._symbol(name.encode())
        except (MemoryGone, struct.error):
            return None

    @property
    def bias(self) -> int:
        """What a symbol's value is relative to."""
        return self._bias

    @property
    def strings(self) -> int:
        """Where the symbols' names are."""
        return self._strings

    def symbol_table(self, most: int) -> tuple[int, int]:
        """Where all its dynamic symbols are, and how many bytes. Raises NotElf beyond `most`
        symbols, or MemoryGone. Only the hash table tells how many there are."""
        memory = self._memory
        buckets, first, words, _ = _GNU_HASH.unpack(memory.read(self._hash, _GNU_HASH.size))
        bucket_at = self._hash + _GNU_HASH.size + words * 8
        chain_at = bucket_at + buckets * 4
        if not buckets or buckets > most:
            raise NotElf(f"{buckets} buckets of symbols")
        last = 0
        for done in range(0, buckets, _BUCKETS_A_READ):
            raw = memory.read(bucket_at + done * 4, min(_BUCKETS_A_READ, buckets - done) * 4)
            last = max(last, *memoryview(raw).cast("I"))
        for _ in range(_MAX_CHAIN):
            if last < first or last >= most:
                break
            if self._u32(chain_at + (last - first) * 4) & 1:
                return self._symbols, (last + 1) * _SYM.size
            last += 1
        raise NotElf("its hash table has no end")

    def _symbol(self, name: bytes) -> Symbol | None:
        memory = self._memory
        buckets, first, words, _ = _GNU_HASH.unpack(memory.read(self._hash, _GNU_HASH.size))
        if not buckets:
            return None
        wanted = _gnu_hash(name)
        bucket_at = self._hash + _GNU_HASH.size + words * 8
        chain_at = bucket_at + buckets * 4
        index = self._u32(bucket_at + wanted % buckets * 4)
        for _ in range(_MAX_CHAIN):
            if index < first:
                return None
            found = self._u32(chain_at + (index - first) * 4)
            if found | 1 == wanted | 1 and (symbol := self._named(index, name)) is not None:
                return symbol
            if found & 1:
                return None
            index += 1
        return None

    def _named(self, index: int, name: bytes) -> Symbol | None:
        raw = self._memory.read(self._symbols + index * _SYM.size, _SYM.size)
        name_at, info, _, section, value, size = _SYM.unpack(raw)
        if section == _SHN_UNDEF or info & 15 not in (_STT_OBJECT, _STT_FUNC):
            return None
        if self._memory.read(self._strings + name_at, len(name) + 1) != name + b"\0":
            return None
        return Symbol(self._bias + value, size)

    def _u32(self, at: int) -> int:
        return int.from_bytes(self._memory.read(at, 4), "little")
