"""Where a process listens, read from /proc: its sockets and the addresses they are bound to."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.host import fdinfo, procfs
from dsagent.agent.host.procfs import PROC, ProcessGone

MOST_FDS = 65_536
MOST_LINES = 65_536
_LISTEN = b"0A"


@dataclass(frozen=True, slots=True)
class Listening:
    """One listening TCP socket. `address` is as it was bound: 0.0.0.0 and :: are any."""

    inode: int
    address: str
    port: int


def listening(pid: int, proc: Path = PROC) -> tuple[Listening, ...]:
    """The TCP sockets that the process listens on, by port; none where it may not be looked at."""
    own = _sockets(pid, proc)
    if not own:
        return ()
    found = [
        each
        for name in ("tcp", "tcp6")
        for each in _listening_in(proc / str(pid) / "net" / name)
        if each.inode in own
    ]
    return tuple(sorted(found, key=lambda each: (each.port, each.address)))


def _sockets(pid: int, proc: Path) -> set[int]:
    folder = proc / str(pid) / "fd"
    try:
        names = procfs.list_names(folder)[:MOST_FDS]
    except PermissionError:
        return _of_another_user(pid, proc)
    except ProcessGone:
        return set()
    inodes = set()
    for name in names:
        try:
            link = os.readlink(folder / name)
        except OSError:
            continue  # closed meanwhile
        kind, _, number = link.partition(":")
        if kind == "socket" and number[1:-1].isdigit():
            inodes.add(int(number[1:-1]))
    return inodes


def _of_another_user(pid: int, proc: Path) -> set[int]:
    try:
        return fdinfo.socket_inodes(pid, proc)
    except (ProcessGone, PermissionError):
        return set()


def _listening_in(table: Path) -> list[Listening]:
    """sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode …"""
    try:
        lines = procfs.read_bytes(table).splitlines()[1:MOST_LINES]
    except (ProcessGone, PermissionError):
        return []
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        address, _, port = fields[1].partition(b":")
        try:
            found.append(Listening(int(fields[9]), _address(address), int(port, 16)))
        except ValueError:
            continue
    return found


def _address(text: bytes) -> str:
    """The kernel prints each 32-bit word of it in the machine's own order of bytes."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed)
    address = ipaddress.IPv6Address(packed)
    return str(address.ipv4_mapped or address)
