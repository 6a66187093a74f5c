"""ptrace of one thread, through ctypes: seized, stopped for a moment, let go.

The kernel lets a tracee go on by itself when its tracer dies, so no option that
kills it is ever set. All calls must come from the thread that seized.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from dataclasses import dataclass
from enum import Enum

_SYSCALL = 24
_CONT = 7
_GETREGS, _SETREGS = 12, 13
_DETACH = 17
_SEIZE = 0x4206
_INTERRUPT = 0x4207
_GET_RSEQ_CONFIGURATION = 0x420F

_O_TRACESYSGOOD = 1
_O_TRACEEXEC = 1 << 4
_EVENT_EXEC = 4
_EVENT_STOP = 128
_WALL = 0x40000000
_SYSCALL_STOP = signal.SIGTRAP | 0x80

_STOPPING = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_POLL_S = 0.0002

_NAMES = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi",
    "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs",
    "gs",
)  # fmt: skip
_REGS = struct.Struct(f"<{len(_NAMES)}Q")

Registers = dict[str, int]  # struct user_regs_struct, by name

_libc = ctypes.CDLL(None, use_errno=True)
_ptrace = _libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Gone(Exception):  # noqa: N818 - what happened, not what went wrong
    """The thread ended, or its process executes another program now."""


class Halted(Exception):  # noqa: N818 - what was found, not what went wrong
    """The process is stopped by a signal (SIGSTOP, Ctrl-Z): nothing in it runs."""


class Stop(Enum):
    INTERRUPTED = "interrupted"  # as asked; in a system call or out of it
    SYSCALL_ENTRY = "system call entry"  # it is about to do one


@dataclass(slots=True)
class Stopped:
    how: Stop
    registers: Registers
    since_ns: int


def _call(request: int, tid: int, address: int = 0, data: object = None) -> None:
    ctypes.set_errno(0)
    if _ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        if number == 3:  # ESRCH
            raise Gone(f"thread {tid} has ended")
        raise OSError(number, os.strerror(number))


class Tracee:
    """Seizes; it runs on. Raises PermissionError where that is not allowed, or Gone.

    `stopped_ns`: for how long it has been kept stopped, in all.
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.stopped_ns = 0
        self._stop: Stopped | None = None
        self._attached = False
        self._interrupts = 0  # asked for, and not seen yet
        _call(_SEIZE, tid, 0, _O_TRACESYSGOOD | _O_TRACEEXEC)
        self._attached = True

    def interrupt(self, timeout_s: float = 1.0) -> Stopped:
        """Stops it, wherever it is. Raises Gone, Halted, TimeoutError (it does not come out of
        the kernel: disk, a driver)."""
        if not self._interrupts:
            _call(_INTERRUPT, self.tid)
            self._interrupts = 1
        stop = self._wait(timeout_s, _CONT)
        if stop is None:
            raise TimeoutError(
                f"thread {self.tid} does not stop: it waits in the kernel, or for a CPU"
            )
        return stop

    def run_to_system_call(self, timeout_s: float) -> Stopped | None:
        """From a stop on, until it is about to do a system call; None if it runs on without."""
        self._resume(_SYSCALL)
        return self._wait(timeout_s, _SYSCALL)

    def set_registers(self, registers: Registers) -> None:
        raw = ctypes.create_string_buffer(
            _REGS.pack(*(registers[name] & (1 << 64) - 1 for name in _NAMES)), _REGS.size
        )
        _call(_SETREGS, self.tid, 0, ctypes.addressof(raw))

    def run_on(self) -> None:
        """From a stop on."""
        self._resume(_CONT)

    def rseq_area(self) -> int:
        """Address of its `struct rseq`, which says whether it is in a restartable sequence; 0
        where it has none. It must be stopped."""
        raw = ctypes.create_string_buffer(24)  # struct ptrace_rseq_configuration
        try:
            _call(_GET_RSEQ_CONFIGURATION, self.tid, 24, ctypes.addressof(raw))
        except OSError:
            return 0  # before Linux 5.13
        return int.from_bytes(raw.raw[:8], "little")

    def detach(self) -> None:
        """Lets go. A thread that runs has to be stopped for that; one that has ended, or that
        will not stop now, is let go by the kernel when this process ends."""
        if not self._attached:
            return
        try:
            if self._stop is None:
                self.interrupt()
            _call(_DETACH, self.tid)
        except (Gone, Halted, TimeoutError):
            self._detach_halted()
        finally:
            self._attached = False
            self._count()

    def _detach_halted(self) -> None:
        try:
            _call(_DETACH, self.tid)
        except (Gone, OSError):
            return  # gone, or running: see `detach`

    def _resume(self, request: int, signal_number: int = 0) -> None:
        self._count()
        _call(request, self.tid, 0, signal_number)

    def _count(self) -> None:
        if self._stop is not None:
            self.stopped_ns += time.monotonic_ns() - self._stop.since_ns
            self._stop = None

    def _wait(self, timeout_s: float, request: int) -> Stopped | None:
        """The next stop that is ours; signals on their way to it are passed on."""
        deadline = time.monotonic() + timeout_s
        while True:
            pid, status = os.waitpid(self.tid, os.WNOHANG | _WALL)
            if pid == 0:
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_S)
                continue
            if not os.WIFSTOPPED(status):
                self._attached = False
                raise Gone(f"thread {self.tid} has ended")
            stop = self._stop_of(os.WSTOPSIG(status), status >> 16, request)
            if stop is not None:
                self._stop = stop
                return stop

    def _stop_of(self, number: int, event: int, request: int) -> Stopped | None:
        if event == _EVENT_EXEC:
            raise Gone(f"process {self.tid} executes another program now")
        if event == _EVENT_STOP:
            if number in _STOPPING:
                raise Halted(f"process {self.tid} is stopped by {signal.Signals(number).name}")
            self._interrupts = 0
            return self._stopped(Stop.INTERRUPTED)
        if number == _SYSCALL_STOP:
            return self._stopped(Stop.SYSCALL_ENTRY)
        _call(request, self.tid, 0, number)  # a signal on its way: delivered
        return None

    def _stopped(self, how: Stop) -> Stopped:
        since_ns = time.monotonic_ns()
        raw = ctypes.create_string_buffer(_REGS.size)
        _call(_GETREGS, self.tid, 0, ctypes.addressof(raw))
        return Stopped(how, dict(zip(_NAMES, _REGS.unpack(raw.raw), strict=True)), since_ns)
