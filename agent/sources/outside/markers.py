"""Functions that an engine enters once a step, found among what its processes have mapped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC, ProcessGone
from dsagent.agent.sources.outside.capture import Place
from dsagent.agent.sources.outside.elf import BadElf, Library
from dsagent.agent.sources.outside.mapped import Mapped

MOST_FILES = 4096  # mapped by one process, looked at


@dataclass(frozen=True, slots=True)
class Marker:
    """`library`: what the file's name begins with. Of those of equal rank all are watched, and
    only those of the first rank that is found."""

    library: str
    symbol: str
    says: str
    rank: int


# Since 2026 llama.cpp's server no longer goes through llama_decode; this is what both end in.
_LLAMA = ("_ZN13llama_context6decodeERK15llama_batch_ext", "llama_decode")

MARKERS: tuple[Marker, ...] = (
    *(
        Marker(library, symbol, "llama.cpp evaluates a batch", 0)
        for library in ("libllama", "xllamacpp", "llama")
        for symbol in _LLAMA
    ),
    Marker("libcudart", "cudaGraphLaunch", "a CUDA graph is launched", 1),
    Marker(
        "libtorch_cpu",
        "_ZN2at4_ops9embedding4callERKNS_6TensorES4_N3c106SymIntEbb",
        "PyTorch looks up the embeddings of a batch",
        1,
    ),
)

_LINE = re.compile(
    r"^([0-9a-f]+-[0-9a-f]+) ..x. [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ ([0-9]+) +(/.*)$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Found:
    """Markers of one target. `says` is for people; `inodes` tells whether they are still the
    same."""

    places: tuple[Place, ...]
    says: str
    inodes: frozenset[int]


def find_markers(pids: Iterable[int], proc: Path = PROC) -> Found | None:
    """The best markers that these processes have; None where they have none, or none may be
    looked at."""
    seen: set[int] = set()
    found: list[tuple[Marker, Place, int]] = []
    for pid in pids:
        for mapped in _executable(pid, proc):
            if mapped.inode in seen:
                continue
            seen.add(mapped.inode)
            name = _name(mapped)
            mine = [marker for marker in MARKERS if name.startswith(marker.library)]
            for marker in mine:
                offset = _offset(mapped, marker.symbol, proc)
                if offset is not None:
                    found.append((marker, Place(mapped, offset), mapped.inode))
                    break
    if not found:
        return None
    best = min(marker.rank for marker, _, _ in found)
    chosen = [each for each in found if each[0].rank == best]
    return Found(
        places=tuple(place for _, place, _ in chosen),
        says="; ".join(dict.fromkeys(marker.says for marker, _, _ in chosen)),
        inodes=frozenset(inode for _, _, inode in chosen),
    )


def find_function(pid: int, library: str, symbol: str, proc: Path = PROC) -> Place | None:
    """An exported function of a library that the process has mapped."""
    for mapped in _executable(pid, proc):
        if _name(mapped).startswith(library):
            offset = _offset(mapped, symbol, proc)
            if offset is not None:
                return Place(mapped, offset)
    return None


def _name(mapped: Mapped) -> str:
    return mapped.path.rsplit("/", 1)[-1]


def _executable(pid: int, proc: Path) -> list[Mapped]:
    """Each file that the process has mapped to run."""
    try:
        text = procfs.read_bytes(proc / str(pid) / "maps").decode("utf-8", "replace")
    except (ProcessGone, PermissionError):
        return []
    lines = _LINE.findall(text)[:MOST_FILES]
    return [Mapped(pid, where, int(inode), path) for where, inode, path in lines]


def _offset(mapped: Mapped, symbol: str, proc: Path) -> int | None:
    try:
        fd = mapped.open(proc)
    except (OSError, ValueError):  # ValueError: a null byte
        return None
    try:
        return Library(fd).function(symbol)
    except (BadElf, OSError):
        return None
    finally:
        os.close(fd)
