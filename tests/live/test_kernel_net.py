"""Segments that are lost, and a client that does not read: of a known number and length."""

from __future__ import annotations

import ctypes
import itertools
import re
import select
import socket
import struct
import time
from pathlib import Path

import pytest
from kernel_lab import Child, Watch, overlap_ns, require_kernel_source, within

from dsagent.agent.facts import Kind

pytestmark = pytest.mark.ebpf

SERVER = """
import select, socket
server = socket.create_server(("127.0.0.1", 0))
say(port=server.getsockname()[1])
sock = server.accept()[0]
def info(offset):  # of struct tcp_info
    told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
    return struct.unpack_from("=I", told, offset)[0]
"""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def test_each_segment_sent_again_is_told_until_it_is_acknowledged() -> None:
    body = (
        SERVER
        + """
say(ready=True); hear()
before = now()
sock.send(b"x")
start = now()
while info(100) < 3:  # tcpi_total_retrans
    nap(10_000)
say(lost=True)
while info(24):  # tcpi_unacked
    nap(1_000)
say(before=before, start=start, end=now(), again=info(100)); hear()
"""
    )
    with Child(body) as child, socket.create_connection(("127.0.0.1", child.hear()["port"])) as me:
        child.hear()
        _go_deaf(me)
        with Watch(child.pid) as watch:
            booked = _retransmitted()
            child.say()
            child.hear()
            me.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            told = child.hear()
            booked = _retransmitted() - booked
            watch.until(told["end"])
    pieces = sorted(watch.of(Kind.RETRANSMIT, tid=child.pid)[["start_ns", "end_ns"]].tolist())
    # One for each time it was sent again, and the last one until it was acknowledged.
    assert len(pieces) == told["again"] + 1
    assert booked >= told["again"] >= 3
    assert told["before"] <= pieces[0][0] <= told["start"]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert pieces[-1][1] <= told["end"]


def _retransmitted() -> int:
    """RetransSegs of this network namespace."""
    rows = re.findall(r"^Tcp: (.*)$", Path("/proc/net/snmp").read_text(), re.MULTILINE)
    return int(dict(zip(rows[0].split(), rows[1].split(), strict=True))["RetransSegs"])


def test_5_times_that_a_client_does_not_read_are_told() -> None:
    body = (
        SERVER
        + """
sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
sock.setblocking(False)
say(ready=True); hear()
for _ in range(5):
    try:
        while True:
            sock.send(bytes(4096))
    except BlockingIOError:
        full = now()
    say(full=full); hear()
    select.select([], [sock], [])
    sock.send(b"x")
    say(again=now()); hear()
say(end=now()); hear()
"""
    )
    rounds = []
    with Child(body) as child, socket.create_connection(("127.0.0.1", child.hear()["port"])) as me:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            for _ in range(5):
                full = child.hear()["full"]
                time.sleep(0.05)  # so long it does not read
                drained = time.monotonic_ns()
                me.setblocking(False)
                child.say()
                again = _drain_until_heard(me, child)
                rounds.append((full, drained, again))
                child.say()
            told = child.hear()
            watch.until(told["end"])
    waits = watch.of(Kind.BACKPRESSURE, tid=child.pid, least_ns=50_000_000)
    assert len(waits) == 5
    for full, drained, again in rounds:
        (wait,) = within(waits, full - 1_000_000_000, again)[-1:]
        assert wait["start_ns"] <= full
        assert drained <= wait["end_ns"] <= again


def test_a_window_that_was_shut_is_no_loss() -> None:
    """A client does not read and so takes nothing more; when it does at last, what comes next is
    lost. That is both, one after the other: nothing was lost while the window was shut."""
    body = (
        SERVER
        + """
sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
sock.setblocking(False)
say(ready=True); hear()
try:
    while True:
        sock.send(bytes(300))
        nap(3_000)
except BlockingIOError:
    full = now()
while info(228):  # tcpi_snd_wnd
    nap(10_000)
say(full=full, shut=now(), again=info(100)); hear()
before = info(100)
while info(100) == before:
    nap(10_000)
say(lost=True)
select.select([], [sock], [])
sock.send(b"x")
say(again=now()); hear()
"""
    )
    me = _narrow_socket()
    with Child(body) as child, me:
        me.connect(("127.0.0.1", child.hear()["port"]))
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            told = child.hear()
            time.sleep(0.5)  # so long it does not read
            _go_deaf(me)
            opened = time.monotonic_ns()
            child.say()
            me.recv(1 << 20)
            child.hear()
            me.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            heard = time.monotonic_ns()
            me.setblocking(False)
            again = _drain_until_heard(me, child)
            child.say()
            watch.until(again)
    lost = watch.of(Kind.RETRANSMIT, tid=child.pid)
    assert overlap_ns(lost, told["shut"], opened) == 0
    assert overlap_ns(lost, opened, heard) >= (heard - opened) / 2
    (wait,) = watch.of(Kind.BACKPRESSURE, tid=child.pid, least_ns=500_000_000)
    assert wait["start_ns"] <= told["full"]
    assert heard <= wait["end_ns"] <= again


def _narrow_socket() -> socket.socket:
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    narrow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    return narrow


def _go_deaf(me: socket.socket) -> None:
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))  # BPF_RET 0
    program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
    me.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


def _drain_until_heard(me: socket.socket, child: Child) -> int:
    """Read all until the child could write again; when it did."""
    assert child.process.stdout is not None
    while True:
        readable, _, _ = select.select([me, child.process.stdout], [], [])
        if me in readable:
            me.recv(1 << 20)
        if child.process.stdout in readable:
            return int(child.hear()["again"])
