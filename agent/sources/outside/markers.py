"""Functions that an engine enters once a step, found among what its processes have mapped."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent import procfs
from dsagent.agent.procfs import PROC, ProcessGone
from dsagent.agent.sources.outside.capture import Place
from dsagent.agent.sources.outside.elf import BadElf, Library

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
    looked at. A mapped file is reached through /proc/PID/map_files: whatever its path says in
    another mount namespace, it is this very file."""
    seen: set[int] = set()
    found: list[tuple[Marker, Place, int]] = []
    for pid in pids:
        for where, inode, path in _executable(pid, proc):
            if inode in seen:
                continue
            seen.add(inode)
            name = path.rsplit("/", 1)[-1]
            mine = [marker for marker in MARKERS if name.startswith(marker.library)]
            link = proc / str(pid) / "map_files" / where
            for marker in mine:
                offset = _offset(link, marker.symbol)
                if offset is not None:
                    found.append((marker, Place(str(link), offset), inode))
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
    for where, _, path in _executable(pid, proc):
        if path.rsplit("/", 1)[-1].startswith(library):
            link = proc / str(pid) / "map_files" / where
            offset = _offset(link, symbol)
            if offset is not None:
                return Place(str(link), offset)
    return None


def _executable(pid: int, proc: Path) -> list[tuple[str, int, str]]:
    """(range, inode, path) of each file that the process has mapped to run."""
    try:
        text = procfs.read_bytes(proc / str(pid) / "maps").decode("utf-8", "replace")
    except (ProcessGone, PermissionError):
        return []
    lines = _LINE.findall(text)[:MOST_FILES]
    return [(where, int(inode), path) for where, inode, path in lines]


def _offset(link: Path, symbol: str) -> int | None:
    try:
        fd = os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return Library(fd).function(symbol)
    except (BadElf, OSError):
        return None
    finally:
        os.close(fd)
