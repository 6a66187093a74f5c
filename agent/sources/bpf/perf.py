"""Software events of perf, one descriptor a CPU, for BPF programs to be attached to."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_NUMBERS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_SOFTWARE = 1
_EVENTS = {"page-faults-minor": 5, "page-faults-major": 6}
_ATTRIBUTE_BYTES = 112  # PERF_ATTR_SIZE_VER5
_CLOEXEC = 8


def open_on_every_cpu(event: str) -> list[int]:
    """Descriptors that count each single event on each CPU online. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    # type, size, config, sample_period: one
    attribute = struct.pack("=IIQQ", _SOFTWARE, _ATTRIBUTE_BYTES, _EVENTS[event], 1)
    memory = ctypes.create_string_buffer(attribute, _ATTRIBUTE_BYTES)
    opened: list[int] = []
    for cpu in _online():
        fd = libc.syscall(_NUMBERS[platform.machine()], memory, -1, cpu, -1, _CLOEXEC)
        if fd < 0:
            code = ctypes.get_errno()
            for each in opened:
                os.close(each)
            raise OSError(code, f"perf_event_open: {os.strerror(code)}")
        opened.append(fd)
    return opened


def _online() -> list[int]:
    """/sys/devices/system/cpu/online: 0-3,5"""
    with open("/sys/devices/system/cpu/online") as file:
        ranges = [part.split("-") for part in file.read().strip().split(",")]
    return [cpu for part in ranges for cpu in range(int(part[0]), int(part[-1]) + 1)]
