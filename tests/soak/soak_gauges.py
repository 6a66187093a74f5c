"""What a process holds: memory, descriptors by kind, threads, objects in the kernel, disk."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Literal

Objects = frozenset[tuple[str, int]]  # kind of BPF object, its number in the kernel
BPF_KINDS: tuple[Literal["prog", "map", "link"], ...] = ("prog", "map", "link")
_BPF_ID = re.compile(r"^(prog|map|link)_id:\s*(\d+)$", re.MULTILINE)


def kind_of(link: str) -> str:
    """What a descriptor is, by the text that its link in /proc shows."""
    if link.startswith("/memfd:"):
        return "memory files"
    if link.startswith(("anon_inode:bpf", "anon_inode:[perf_event]")):
        return "probes"
    if link.startswith("socket:"):
        return "sockets"
    return "other files"


def descriptors(pid: int) -> Counter[str]:
    """How many of each kind are open now."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[kind_of(os.readlink(entry))] += 1
    return found


def memory_bytes(pid: int) -> dict[str, int]:
    """Of a process and of all below it: PSS, RSS, and what is its own (anonymous). Of a file's page
    its share depends on who else has mapped it, so PSS rises when a stranger ends."""
    total: Counter[str] = Counter()
    for one in (pid, *below(pid)):
        with suppress(FileNotFoundError, ProcessLookupError):
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
            for name in ("Pss", "Rss", "Anonymous"):
                found = re.search(rf"^{name}:\s+(\d+) kB", rollup, re.MULTILINE)
                total[name] += int(found[1]) << 10 if found else 0
    return {"pss": total["Pss"], "rss": total["Rss"], "own": total["Anonymous"]}


def mappings(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def below(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *below(int(child))]
    return found


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def bpf_of(pid: int) -> Objects:
    """The BPF objects that the process holds a descriptor of."""
    found: set[tuple[str, int]] = set()
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            text = info.read_text()
            # A link's entry names its program too, a program's only itself.
            ids = dict(_BPF_ID.findall(text))
            kind = next((kind for kind in ("link", "map", "prog") if kind in ids), None)
            if kind is not None:
                found.add((kind, int(ids[kind])))
    return frozenset(found)


def bpf_in_kernel() -> Objects:
    """All there are, as the kernel lists them to `bpftool`."""
    found: set[tuple[str, int]] = set()
    for kind in BPF_KINDS:
        listed = subprocess.run(
            ["bpftool", "--json", kind, "show"], check=True, capture_output=True, text=True
        )
        found |= {(kind, each["id"]) for each in json.loads(listed.stdout or "[]")}
    return frozenset(found)


def disk_bytes(folder: Path) -> int:
    """What the files below take, by their own length."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file():
                total += path.stat().st_size
    return total
