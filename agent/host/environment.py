"""The environment that a process was started with."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC, ProcessGone

_START, _END = 47, 48  # env_start and env_end among the fields of stat that follow the name


def environment(pid: int, proc: Path = PROC) -> Mapping[str, str]:
    """Control characters escaped. Raises ProcessGone, or PermissionError."""
    try:
        text = procfs.read_bytes(proc / str(pid) / "environ")
    except PermissionError:
        # Its own user's file: who may only trace the process finds it in its memory.
        text = _from_memory(pid, proc)
    pairs = (pair.decode("utf-8", "replace").partition("=") for pair in text.split(b"\0"))
    return {name: procfs.escape(value) for name, equals, value in pairs if equals}


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _from_memory(pid: int, proc: Path) -> bytes:
    line = procfs.read_bytes(proc / str(pid) / "stat")
    fields = line.rpartition(b")")[2].split()
    if len(fields) <= _END:
        raise ProcessGone("truncated stat")
    start = int(fields[_START])
    length = min(int(fields[_END]) - start, procfs.MAX_FILE_BYTES)
    if start == 0 or length <= 0:  # not shown to us
        raise PermissionError(f"the environment of process {pid} may not be read")
    buffer = ctypes.create_string_buffer(length)
    here = _Span(ctypes.addressof(buffer), length)
    there = _Span(start, length)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    got = read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if got < 0:
        raise PermissionError(ctypes.get_errno(), f"the memory of process {pid} may not be read")
    return buffer.raw[:got]
