"""What the kernel lets this process do: capabilities, lockdown, namespaces.

Each function takes the file it reads, so that tests can read frozen ones.
"""

from __future__ import annotations

import os
import pwd
import re
from enum import IntEnum
from pathlib import Path

STATUS = Path("/proc/self/status")
LOCKDOWN = Path("/sys/kernel/security/lockdown")
PID_NAMESPACE = Path("/proc/self/ns/pid")
BPF_OBJECT = Path(__file__).parents[1] / "sources" / "bpf" / "sched.bpf.o"
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # include/linux/proc_ns.h: PROC_PID_INIT_INO


class Capability(IntEnum):
    """include/uapi/linux/capability.h"""

    CAP_SYS_PTRACE = 19
    CAP_SYS_ADMIN = 21
    CAP_PERFMON = 38
    CAP_BPF = 39


def effective_capabilities(status: Path = STATUS) -> frozenset[Capability]:
    """Those in effect. CAP_SYS_ADMIN stands for CAP_BPF and CAP_PERFMON too, as in the kernel."""
    return _capabilities("CapEff", status)


def bounding_capabilities(status: Path = STATUS) -> frozenset[Capability]:
    """Those that this process, or a program that it runs, could have."""
    return _capabilities("CapBnd", status)


def _capabilities(name: str, status: Path) -> frozenset[Capability]:
    found = re.search(rf"^{name}:\s+([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    bits = int(found.group(1), 16) if found else 0
    held = {capability for capability in Capability if bits >> capability & 1}
    if Capability.CAP_SYS_ADMIN in held:
        held |= {Capability.CAP_BPF, Capability.CAP_PERFMON}
    return frozenset(held)


def is_root(status: Path = STATUS) -> bool:
    """Whether uid 0 is in effect, whatever that may do here."""
    return re.search(r"^Uid:\s+\d+\s+0\s", status.read_text(), re.MULTILINE) is not None


def no_new_privs(status: Path = STATUS) -> bool:
    """Whether no program that is run here may have more rights than this process."""
    return re.search(r"^NoNewPrivs:\s+1$", status.read_text(), re.MULTILINE) is not None


def lockdown(path: Path = LOCKDOWN) -> str | None:
    """none, integrity or confidentiality; None: the kernel has no lockdown."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def pid_namespace(path: Path = PID_NAMESPACE) -> int:
    """The inode of this process's pid namespace."""
    return os.stat(path).st_ino


def user_name(uid: int) -> str:
    """As the system calls the user; "user 4711" where it has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
