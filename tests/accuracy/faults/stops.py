"""The process is stopped: by a signal, by a debugger."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from pathlib import Path

from bench import Bench, Injector
from lab import Engine
from truth import Fault, Injection, Timeline, life

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def stop_for(target: Engine, seconds: float) -> tuple[int, int]:
    start_ns = time.monotonic_ns()
    os.kill(target.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(target.pid, signal.SIGCONT)
    return start_ns, time.monotonic_ns()


def stop(bench: Bench, dice: random.Random) -> Injection:
    start_ns, end_ns = stop_for(bench.target, dice.uniform(0.06, 0.6))
    return _stopped("sigstop", start_ns, end_ns)


def debug(bench: Bench, dice: random.Random) -> Injection:
    """As a debugger does it: every thread is seized, halted, looked at, and let go."""
    seconds = dice.uniform(0.06, 0.6)
    tids = [int(path.name) for path in Path(f"/proc/{bench.target.pid}/task").iterdir()]
    for tid in tids:
        _ptrace(_SEIZE, tid)
    start_ns = time.monotonic_ns()
    try:
        for tid in tids:
            _ptrace(_INTERRUPT, tid)
        for tid in tids:
            os.waitpid(tid, _WALL)
        time.sleep(seconds)
    finally:
        for tid in tids:
            _ptrace(_DETACH, tid)
    return _stopped("debugger", start_ns, time.monotonic_ns())


def _ptrace(request: int, tid: int) -> None:
    if _libc.ptrace(request, tid, None, None):
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace {request:#x} of {tid}: {os.strerror(error)}")


def _stopped(fault: str, start_ns: int, end_ns: int) -> Injection:
    return Injection(fault, start_ns, end_ns, Timeline.of([(start_ns, end_ns)]))


_CAUSES = frozenset({"process.stopped"})
SIGSTOP = Injector(Fault("sigstop", _CAUSES, "logged", life), "smollm2", stop)
DEBUGGER = Injector(Fault("debugger", _CAUSES, "logged", life), "smollm2", debug)
