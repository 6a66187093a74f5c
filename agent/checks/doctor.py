"""What works on this machine and for this process, what does not, and what to do about it.

Nothing here changes anything. Every file is looked for under `Places`, so
that tests can hand in frozen ones.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsagent.agent.errors import DsagentError
from dsagent.agent.host import privileges, procfs
from dsagent.agent.host.clock import check_time_namespace
from dsagent.agent.host.privileges import Capability
from dsagent.instrumentation.ring import RingReader, RingRejected, find_rings

State = Literal["ok", "warn", "fail", "not_applicable"]

# bpf_task_pt_regs, the newest helper that the BPF programs call.
KERNEL_LEAST = (5, 15)
NO_KERNEL_SOURCE = "no kernel facts: lost CPUs, locks, disks and stops stay unattributed"


@dataclass(frozen=True, slots=True)
class Check:
    """`found` is a fact; `consequence` and `fix` say what it means where it is not ok."""

    name: str
    state: State
    found: str
    consequence: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "state": self.state,
            "found": self.found,
            "consequence": self.consequence,
            "fix": self.fix,
        }


def can_load(library: str) -> bool:
    """Whether the dynamic linker finds it (and not whether some tool lists it)."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Places:
    """Where the checks look."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    bpf_object: Path = privileges.BPF_OBJECT
    can_load: Callable[[str], bool] = can_load


def run_checks(pid: int | None = None, places: Places | None = None) -> list[Check]:
    """Of the machine; with `pid` also of that process as a target."""
    places = places or Places()
    checks = [
        *kernel_checks(places),
        ptrace_permission(places),
        pid_namespace(places),
        nvml(places),
    ]
    if pid is not None:
        checks += target_checks(pid, places)
    return checks


def kernel_checks(places: Places) -> list[Check]:
    """What the kernel source needs: it runs where none of these fails."""
    return [
        kernel(places),
        type_information(places),
        lockdown(places),
        capabilities(places),
        libbpf(places),
        bpf_object(places),
    ]


def kernel(places: Places) -> Check:
    release = (places.proc / "sys/kernel/osrelease").read_text().strip()
    found = f"Linux {release}"
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None or (int(version[1]), int(version[2])) < KERNEL_LEAST:
        needed = ".".join(map(str, KERNEL_LEAST))
        return Check("kernel", "fail", found, NO_KERNEL_SOURCE, f"run Linux {needed} or newer")
    return Check("kernel", "ok", found)


def type_information(places: Places) -> Check:
    path = places.sys / "kernel/btf/vmlinux"
    if path.exists():
        return Check("BTF", "ok", f"{path} is there")
    return Check(
        "BTF",
        "fail",
        f"the kernel has no type information ({path})",
        NO_KERNEL_SOURCE,
        "use a kernel built with CONFIG_DEBUG_INFO_BTF",
    )


def lockdown(places: Places) -> Check:
    mode = privileges.lockdown(places.sys / "kernel/security/lockdown")
    if mode is None:
        return Check("lockdown", "not_applicable", "this kernel has none")
    if mode == "confidentiality":
        return Check(
            "lockdown",
            "fail",
            "the kernel is locked down (confidentiality), so BPF may not read it",
            NO_KERNEL_SOURCE,
            "boot with lockdown=integrity or none",
        )
    return Check("lockdown", "ok", mode)


def capabilities(places: Places) -> Check:
    held = privileges.effective_capabilities(places.proc / "self/status")
    missing = {Capability.CAP_BPF, Capability.CAP_PERFMON} - held
    if missing:
        names = " and ".join(sorted(capability.name for capability in missing))
        return Check(
            "capabilities",
            "fail",
            f"not permitted, {names} missing",
            NO_KERNEL_SOURCE,
            _how_to_have_them(missing, places),
        )
    return Check("capabilities", "ok", "CAP_BPF and CAP_PERFMON are in effect")


def _how_to_have_them(missing: set[Capability], places: Places) -> str:
    """In a container, capabilities that are added reach uid 0 only, and others by a file."""
    status = places.proc / "self/status"
    granted = missing <= privileges.bounding_capabilities(status)
    if not granted or privileges.is_root(status):
        return "run as root or grant them"
    if privileges.no_new_privs(status):
        return (
            "they are granted, but not to this user: run as uid 0 (a program's file cannot bring "
            "them along either, since no_new_privs is set)"
        )
    return (
        "they are granted, but not to this user: run as uid 0, or give them to the program's file"
    )


def libbpf(places: Places) -> Check:
    if places.can_load("libbpf.so.1"):
        return Check("libbpf", "ok", "libbpf.so.1 is installed")
    return Check(
        "libbpf",
        "fail",
        "libbpf.so.1 is not installed",
        NO_KERNEL_SOURCE,
        "apt-get install libbpf1",
    )


def bpf_object(places: Places) -> Check:
    if places.bpf_object.exists():
        return Check("BPF programs", "ok", f"{places.bpf_object.name} is built")
    return Check(
        "BPF programs",
        "fail",
        f"the BPF programs are not built ({places.bpf_object.name} is missing)",
        NO_KERNEL_SOURCE,
        "run make bpf",
    )


def ptrace_permission(places: Places) -> Check:
    """Reading another user's /proc/PID/fd, maps and memory."""
    held = privileges.effective_capabilities(places.proc / "self/status")
    try:
        scope = int((places.proc / "sys/kernel/yama/ptrace_scope").read_text())
    except OSError:
        scope = 0  # no Yama
    if Capability.CAP_SYS_PTRACE not in held:
        return Check(
            "ptrace",
            "warn",
            "CAP_SYS_PTRACE is not in effect",
            "only processes of this user can be attached to",
            "run as root or grant it",
        )
    if scope >= 3:
        return Check(
            "ptrace",
            "warn",
            "kernel.yama.ptrace_scope is 3",
            "no stacks of a stalled engine",
            "set it to 2 or lower (it needs a reboot)",
        )
    return Check("ptrace", "ok", "CAP_SYS_PTRACE is in effect")


def pid_namespace(places: Places) -> Check:
    inode = privileges.pid_namespace(places.proc / "self/ns/pid")
    if inode == privileges.INITIAL_PID_NAMESPACE:
        return Check("pid namespace", "ok", "the initial one")
    return Check(
        "pid namespace",
        "warn",
        f"a container's own (pid:[{inode}])",
        "culprits outside the container are shown by the host's pids",
        "share the host's pid namespace to see them by their own",
    )


def nvml(places: Places) -> Check:
    if places.can_load("libnvidia-ml.so.1"):
        return Check("NVML", "ok", "libnvidia-ml.so.1 is installed")
    if not (places.dev / "nvidiactl").exists():
        return Check("NVML", "not_applicable", "no NVIDIA driver here")
    return Check(
        "NVML",
        "warn",
        "the NVIDIA driver is loaded, but libnvidia-ml.so.1 is not found",
        "no GPU readings",
        "install the driver's user-space libraries (in containers: the utility capability)",
    )


def target_checks(pid: int, places: Places) -> list[Check]:
    """Whether `dsagent attach pid` would work, and how well."""
    pid = procfs.process_of(pid, places.proc)
    try:
        stat = procfs.read_stat(pid, places.proc)
    except (procfs.ProcessGone, PermissionError):
        gone = f"no process {pid} can be seen"
        return [Check("target", "fail", gone, "nothing to attach to", "check the pid")]
    checks = [Check("target", "ok", f"{pid} {stat.comm}"), owner(pid, places)]
    if checks[-1].state != "fail":
        checks += [clock(pid, places), step_ring(pid)]
    return checks


def owner(pid: int, places: Places) -> Check:
    folder = places.proc / str(pid)
    try:
        os.listdir(folder / "fdinfo")  # open to who may trace it, as fd is not
        os.readlink(folder / "ns" / "pid")
    except PermissionError:
        return Check(
            "target's owner",
            "fail",
            f"process {pid} may not be read",
            "it cannot be attached to",
            "run as root, as its user, or with CAP_SYS_PTRACE; where that is no help, outside of "
            "this container",
        )
    except OSError as error:
        return Check("target's owner", "fail", f"process {pid}: {error.strerror}", "", "try again")
    return Check("target's owner", "ok", "it may be read")


def clock(pid: int, places: Places) -> Check:
    try:
        check_time_namespace(pid, places.proc)
    except DsagentError as error:
        return Check(
            "target's clock", "fail", str(error), "it cannot be attached to", "run dsagent inside"
        )
    return Check("target's clock", "ok", "the same monotonic clock")


def step_ring(pid: int) -> Check:
    """The engine's own record of its steps."""
    reasons = []
    try:
        candidates = find_rings(pid)
    except OSError as error:
        return Check("target's step ring", "fail", f"process {pid}: {error.strerror}", "", "")
    for candidate in candidates:
        try:
            RingReader.open(candidate).close()
        except RingRejected as reason:
            reasons.append(str(reason))
        else:
            return Check("target's step ring", "ok", "it can be read")
    if reasons:
        return Check(
            "target's step ring",
            "fail",
            reasons[0],
            "its requests cannot be explained",
            "use the same version of dsagent on both sides",
        )
    return Check(
        "target's step ring",
        "warn",
        f"process {pid} has no step ring",
        "only its children, or nothing, can be explained",
        "serve with dsagent serve, or name the engine's own process",
    )
