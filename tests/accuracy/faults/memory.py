"""Memory is taken away: the engine's code is paged out while it runs."""

from __future__ import annotations

import ctypes
import os
import random
import re
import time
from pathlib import Path

from bench import Bench, Injector
from truth import Fault, Injection, life

_PROCESS_MADVISE, _MADV_PAGEOUT = 440, 21
_CODE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp .*/libtorch_cpu\.so$", re.MULTILINE)
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def page_out(bench: Bench, dice: random.Random) -> Injection:
    """Again and again the kernel is told to drop the pages of torch's code from this process;
    each next step has to read from the disk what it needs of them."""
    maps = Path(f"/proc/{bench.target.pid}/maps").read_text()
    code = [(int(start, 16), int(end, 16)) for start, end in _CODE.findall(maps)]
    ranges = (_Range * len(code))(*[_Range(start, end - start) for start, end in code])
    pidfd = os.pidfd_open(bench.target.pid)
    start_ns = time.monotonic_ns()
    try:
        for _ in range(dice.randint(4, 16)):
            advised = _libc.syscall(
                _PROCESS_MADVISE, pidfd, ranges, ctypes.c_size_t(len(code)), _MADV_PAGEOUT, 0
            )
            if advised < 0:
                error = ctypes.get_errno()
                raise OSError(error, f"process_madvise: {os.strerror(error)}")
            time.sleep(dice.uniform(0.05, 0.2))
    finally:
        os.close(pidfd)
    return Injection("major_faults", start_ns, time.monotonic_ns())


MAJOR_FAULTS = Injector(
    Fault("major_faults", frozenset({"memory.major_fault"}), "counterfactual", life),
    "smollm2",
    page_out,
)
