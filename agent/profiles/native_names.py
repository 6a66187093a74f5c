"""Which function an address of another process lies in, by the symbols of what it has mapped.

No file is opened: the symbols lie in the process's memory, mapped with the library. Functions that
a library does not export have no name there, and get none.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsagent.agent.host.procfs import escape
from dsagent.agent.inject.elf import Image, NotElf
from dsagent.agent.inject.memory import MAX_READ_BYTES, Mapping, Memory, MemoryGone, mappings
from dsagent.agent.profiles.stacks import MAX_TEXT_CHARS, Frame

MAX_SYMBOLS = 1_000_000  # of one library
MAX_KEPT_SYMBOLS = 1_000_000  # of all libraries of one process: 24 MB
MAX_NAMES = 20_000
MAX_NAME_BYTES = 1024
NO_SYMBOL = "(not exported)"
KERNEL = Frame("(kernel)", "", 0)
UNKNOWN = Frame("(unknown)", "", 0)

_SYMBOL = np.dtype(
    [
        ("name", "<u4"),
        ("info", "u1"),
        ("other", "u1"),
        ("section", "<u2"),
        ("at", "<u8"),
        ("size", "<u8"),
    ]
)
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
_PART = re.compile(r"(\d{1,4})")


@dataclass(frozen=True, slots=True)
class _Table:
    """Functions of one library by their addresses in the process."""

    starts: npt.NDArray[np.uint64]
    ends: npt.NDArray[np.uint64]
    names_at: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.starts)


class NativeNames:
    """Of one process. Raises PermissionError or ProcessGone where its memory cannot be read."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._memory = Memory(pid)
        self._mappings: list[Mapping] = []
        self._starts: list[int] = []
        self._bases: dict[tuple[bytes, int], int] = {}  # by file: where it begins
        self._tables: dict[int, _Table | None] = {}  # by where the library begins
        self._known: dict[int, tuple[Frame, Frame]] = {}

    def look_again(self) -> None:
        """Libraries come and go: what is mapped is read anew."""
        mapped = list(mappings(self._pid))
        found = [each for each in mapped if "x" in each.permissions]
        if found == self._mappings:
            return
        self._mappings, self._starts = found, [each.start for each in found]
        self._bases = {}
        for each in mapped:
            if each.file is not None and each.offset == 0:
                self._bases.setdefault(each.file, each.start)
        self._tables.clear()
        self._known.clear()

    def frames(self, address: int) -> tuple[Frame, Frame]:
        """The library and the function."""
        known = self._known.get(address)
        if known is None:
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            known = self._known[address] = self._find(address)
        return known

    def _find(self, address: int) -> tuple[Frame, Frame]:
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._mappings[index].end:
            return UNKNOWN, UNKNOWN
        mapping = self._mappings[index]
        if mapping.file is None:  # made while it runs: a compiler's, or the kernel's own page
            return Frame(escape(mapping.path or "(generated code)", MAX_TEXT_CHARS), "", 0), UNKNOWN
        path = escape(mapping.path, MAX_TEXT_CHARS)
        library = Frame(path.rsplit("/", 1)[-1], path, 0)
        name = self._name(self._bases.get(mapping.file), address)
        return library, Frame(name or NO_SYMBOL, path, 0)

    def _name(self, base: int | None, address: int) -> str | None:
        if base is None:
            return None
        if base not in self._tables:
            self._keep(base, self._read_table(base))
        table = self._tables[base]
        if table is None:
            return None
        index = int(np.searchsorted(table.starts, np.uint64(address), side="right")) - 1
        if index < 0 or address >= int(table.ends[index]):
            return None
        try:
            return readable(self._text(int(table.names_at[index])))
        except MemoryGone:
            return None

    def _keep(self, base: int, table: _Table | None) -> None:
        """Those that came first go, where it would be too many symbols."""
        self._tables[base] = table
        kept = sum(len(each) for each in self._tables.values() if each is not None)
        for other in list(self._tables):
            if kept <= MAX_KEPT_SYMBOLS or other == base:
                return
            gone = self._tables.pop(other)
            kept -= 0 if gone is None else len(gone)

    def _text(self, at: int) -> bytes:
        """Up to its end, or to the page's where nothing more is mapped."""
        try:
            raw = self._memory.read(at, MAX_NAME_BYTES)
        except MemoryGone:
            raw = self._memory.read(at, -at % 4096 or 4096)
        return raw.partition(b"\0")[0]

    def _read_table(self, base: int) -> _Table | None:
        """None where it is no library, or one without symbols."""
        try:
            image = Image(self._memory, base)
            symbols = np.frombuffer(self._read(*image.symbol_table(MAX_SYMBOLS)), _SYMBOL)
        except (NotElf, MemoryGone, struct.error):
            return None
        is_function = np.isin(symbols["info"] & 15, _FUNCTIONS) & (symbols["section"] != 0)
        own = symbols[is_function]
        own = own[np.argsort(own["at"], kind="stable")]
        starts = own["at"] + np.uint64(image.bias)
        return _Table(starts, starts + own["size"], own["name"] + np.uint64(image.strings))

    def _read(self, at: int, size_bytes: int) -> bytes:
        """Longer than one read may be."""
        return b"".join(
            self._memory.read(at + done, min(MAX_READ_BYTES, size_bytes - done))
            for done in range(0, size_bytes, MAX_READ_BYTES)
        )

    def close(self) -> None:
        self._memory.close()


def readable(name: bytes) -> str:
    """A C++ name without its arguments: _ZN2at6native4gemmEv is at::native::gemm. Others as they
    are."""
    text = name.decode("utf-8", "replace")
    parts = _nested(text) if text.startswith("_Z") else []
    return escape("::".join(parts) or text, MAX_TEXT_CHARS)


def _nested(text: str) -> Sequence[str]:
    """The identifiers of a mangled name, up to the first thing that is none."""
    at = 2
    nested = text[at : at + 1] == "N"
    at += nested
    while text[at : at + 1] in ("K", "L") and text[at : at + 1]:
        at += 1
    parts = []
    while (found := _PART.match(text, at)) is not None:
        at = found.end() + int(found[1])
        if at > len(text):
            return []
        parts.append(text[found.end() : at].replace("_GLOBAL__N_1", "(anonymous)"))
        if not nested:
            break
    return parts
