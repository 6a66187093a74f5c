"""What watching could leave behind in an engine's process and around it, and what differs."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import soak_gauges as gauges

State = Mapping[str, str]
# Of /proc/PID/status: who traces it, its rights, where it may run.
STATUS_LINES = ("TracerPid", "Uid", "CapEff", "NoNewPrivs", "Seccomp", "Cpus_allowed_list")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def tree(folder: Path) -> str:
    """One text for all files below: names, modes, contents."""
    found = hashlib.sha256()
    count = 0
    for path in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):
            count += 1
            found.update(f"{path.relative_to(folder)} {path.lstat().st_mode}\n".encode())
            if path.is_file() and not path.is_symlink():
                found.update(path.read_bytes())
    return f"{count} entries, {found.hexdigest()[:16]}"


def names_in(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f"{len(names)} entries, {digest(repr(names).encode())}"


def _mapped(pid: int) -> str:
    """Every mapping that has a name, with its rights: libraries, files, memory files, and what the
    kernel itself maps for probes."""
    found: Counter[str] = Counter()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and not fields[5].startswith(("[heap]", "[stack", "[anon")):
            found[f"{fields[1]} {fields[5]}"] += 1
    special = [name for name in found if name.endswith("[uprobes]")]
    text = digest(repr(sorted(found.items())).encode())
    return f"{sum(found.values())} of {len(found)}, {text}" + "".join(f"; {s}" for s in special)


def state_of(pid: int, working: Path, temporary: Path, packages: Path) -> State:
    """`working`, `temporary`: the engine's own folders. `packages`: of its Python environment."""
    proc = Path(f"/proc/{pid}")
    lines = (proc / "status").read_text().splitlines()
    status = [line for line in lines if line.startswith(STATUS_LINES)]
    kinds = gauges.descriptors(pid)
    return {
        "environment": digest((proc / "environ").read_bytes()),
        "command line": digest((proc / "cmdline").read_bytes()),
        "descriptors": ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds)),
        "mapped files": _mapped(pid),
        "threads": str(gauges.threads(pid)),
        "children": str(gauges.below(pid)),
        "rights, tracer, CPUs": digest(repr(status).encode()),
        "limits": digest((proc / "limits").read_bytes()),
        "niceness, policy": f"{os.getpriority(os.PRIO_PROCESS, pid)}, {os.sched_getscheduler(pid)}",
        "cgroups": digest((proc / "cgroup").read_bytes()),
        "files where it runs": tree(working),
        "its temporary files": tree(temporary),
        "/dev/shm": tree(Path("/dev/shm")),
        "its Python's packages": names_in(packages),
    }
