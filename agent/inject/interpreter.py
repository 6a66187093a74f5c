"""Finds the Python interpreter in a process, and says why nothing can be put into one."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError
from dsagent.agent.host import privileges, procfs
from dsagent.agent.host.privileges import Capability
from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.inject import code
from dsagent.agent.inject.elf import Image, NotElf, Segment, Symbol
from dsagent.agent.inject.memory import Mapping, Memory, MemoryGone, in_status, mappings

OLDEST, NEWEST = (3, 9), (3, 13)  # between these it has been tried
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_NAME = re.compile(r"(?:lib)?python(3)\.(\d{1,2})(t?)[^/]*$")
_MAX_CANDIDATES = 8
# Whoever stands in one of these may hold the lock of the queue of pending calls.
_LOCKING = (
    "Py_AddPendingCall", "Py_MakePendingCalls", "PyThread_acquire_lock",
    "PyThread_acquire_lock_timed", "PyThread_release_lock", "PyMutex_Lock", "PyMutex_Unlock",
)  # fmt: skip


class CannotInject(DsagentError):  # noqa: N818 - what was found, not what went wrong
    """Nothing has been put into the process; the text says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"cannot inject: {reason}", exit_code=CANNOT_ATTACH)
        self.reason = reason


class NoProcess(CannotInject):
    """There is none of that pid."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Addresses in the target, and its version. `cave`: unused bytes at the end of an executable
    page. `never_in`: where a running thread may hold a lock that the injection needs."""

    version: tuple[int, int]
    add_pending_call: int
    run_simple_string: int
    gil_ensure: int
    gil_release: int
    cave: int
    never_in: tuple[Segment, ...]


def check_allowed(pid: int) -> None:
    """Raises CannotInject where it is plain beforehand that it must not or cannot be done."""
    if platform.machine() != "x86_64":
        raise CannotInject(f"this is {platform.machine()}, and only x86_64 is known")
    try:
        namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
        tracer = int(in_status(pid, "TracerPid") or 0)
        state = procfs.read_stat(pid).state
        shadow_stack = "shstk" in (in_status(pid, "x86_Thread_features") or "")
    except (FileNotFoundError, ProcessGone, ValueError) as error:
        raise NoProcess(f"there is no process {pid}") from error
    except PermissionError as error:
        raise not_permitted(pid) from error
    if namespace != privileges.pid_namespace():
        raise CannotInject(
            f"process {pid} is in another pid namespace; run dsagent inside its container"
        )
    if tracer:
        raise CannotInject(f"process {pid} is traced already, by process {tracer}")
    if state in "tT":
        raise CannotInject(f"process {pid} is stopped")
    if state in "ZXx":
        raise CannotInject(f"process {pid} has ended")
    if shadow_stack:
        raise CannotInject(f"process {pid} has a shadow stack, which is not known here")


def not_permitted(pid: int, scope: Path = YAMA) -> CannotInject:
    if Capability.CAP_SYS_PTRACE in privileges.effective_capabilities():
        return CannotInject(f"not permitted to trace process {pid}: a security module forbids it")
    try:
        restricted = scope.read_text().strip() != "0"
    except OSError:
        restricted = False
    why = " (kernel.yama.ptrace_scope restricts it)" if restricted else ""
    return CannotInject(f"not permitted to trace process {pid}{why}: CAP_SYS_PTRACE is needed")


def _candidates(pid: int) -> Iterator[tuple[Mapping, str]]:
    """The beginnings of the files that may hold the interpreter: the program and libpython."""
    program = os.stat(f"/proc/{pid}/exe").st_ino
    for mapping in mappings(pid):
        if mapping.offset or mapping.file is None:
            continue
        name = mapping.path.rsplit("/", 1)[-1].removesuffix(" (deleted)")
        if mapping.file[1] == program or name.startswith("libpython3"):
            yield mapping, name


def find(pid: int, memory: Memory) -> Interpreter:
    """Raises CannotInject (not CPython, or one that is not known), ProcessGone."""
    try:
        candidates = list(_candidates(pid))
    except FileNotFoundError as error:
        raise ProcessGone(str(pid)) from error
    for mapping, name in candidates[:_MAX_CANDIDATES]:
        try:
            image = Image(memory, mapping.start)
        except NotElf:
            continue
        if (add := image.symbol("Py_AddPendingCall")) is not None:
            return _described(pid, memory, image, add, (name, *(each for _, each in candidates)))
    raise CannotInject(f"process {pid} is no Python interpreter that is known here")


def _described(
    pid: int, memory: Memory, image: Image, add: Symbol, names: tuple[str, ...]
) -> Interpreter:
    version = _version(memory, image, names)
    if version is None or not OLDEST <= version <= NEWEST:
        said = "unknown" if version is None else f"{version[0]}.{version[1]}"
        raise CannotInject(
            f"process {pid} runs Python of version {said}; known are "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        )

    def needed(name: str) -> int:
        symbol = image.symbol(name)
        if symbol is None:
            raise CannotInject(f"the interpreter of process {pid} has no {name}")
        return symbol.address

    locking = (image.symbol(name) for name in _LOCKING)
    return Interpreter(
        version=version,
        add_pending_call=add.address,
        run_simple_string=needed("PyRun_SimpleString"),
        gil_ensure=needed("PyGILState_Ensure"),
        gil_release=needed("PyGILState_Release"),
        cave=_cave(pid, memory, image),
        never_in=(
            *(Segment(each.address, each.address + each.size_bytes) for each in locking if each),
            *_system_libraries(pid),
        ),
    )


def _version(memory: Memory, image: Image, names: tuple[str, ...]) -> tuple[int, int] | None:
    """From 3.11 on the interpreter says it; before that its file's name does. None for one
    without the interpreter's lock: what is done here counts on that."""
    matches = [found for name in names if (found := _NAME.match(name))]
    if any(found.group(3) for found in matches):
        return None
    if (said := image.symbol("Py_Version")) is not None:
        number = int.from_bytes(memory.read(said.address, 4), "little")
        return number >> 24, number >> 16 & 0xFF
    return (3, int(matches[0].group(2))) if matches else None


def _cave(pid: int, memory: Memory, image: Image) -> int:
    """Room for our code behind the last instruction of the interpreter, or of another library."""
    images = [image]
    for mapping in mappings(pid):
        if mapping.file and not mapping.offset and mapping.path.endswith((".so", ".so.6", ".so.2")):
            if len(images) > 16:
                break
            try:
                images.append(Image(memory, mapping.start))
            except NotElf:
                continue
    for each in images:
        for segment in each.executable:
            start = -(-segment.end // 16) * 16
            try:
                free = not any(memory.read(start, max(0, segment.page_end - start)))
            except MemoryGone:
                continue
            if free and segment.page_end - start >= code.CAVE_BYTES:
                return start
    raise CannotInject(f"no room for code was found in process {pid}")


def _system_libraries(pid: int) -> Iterator[Segment]:
    for mapping in mappings(pid):
        name = mapping.path.rsplit("/", 1)[-1]
        if name.startswith(("libc.so", "libc-", "ld-", "libpthread", "[vdso]")) and (
            "x" in mapping.permissions
        ):
            yield Segment(mapping.start, mapping.end)
