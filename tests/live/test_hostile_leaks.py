"""Attached to again and again from one process, as a sidecar does for months: nothing grows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_lab import require_kernel_source
from shell_lab import PATIENCE_S, Engine

from dsagent.agent.host.target import resolve
from dsagent.agent.session.loop import Session
from dsagent.agent.session.outlets import Judged, OutletOptions, make_receiver, make_sinks


def open_files() -> list[str]:
    """What the descriptors name; inodes of sockets and pipes differ each time."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}").partition(":[")[0])
        except FileNotFoundError:
            continue  # the one that listed them
    return sorted(found)


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


def settles(read: Callable[[], list[str]], expected: list[str]) -> list[str]:
    """What is read once it is that; else what it stays at."""
    deadline = time.monotonic() + PATIENCE_S / 6
    while (found := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def attach_once(engine: Engine, options: OutletOptions, request_id: str) -> None:
    target = resolve(engine.pid)
    attached = threading.Event()
    session = Session(
        target,
        make_sinks(options, Judged(options, lambda _line: None)),
        receiver=make_receiver(options),
        tier="full",
        on_attached=attached.set,
    )
    runner = threading.Thread(target=session.run)
    runner.start()
    assert attached.wait(PATIENCE_S), "it did not attach"
    engine.do(f"request {request_id}")
    deadline = time.monotonic() + PATIENCE_S
    while session.counts.requests == 0:
        assert time.monotonic() < deadline, "the request was not accounted for"
        time.sleep(0.05)
    session.stop()
    runner.join(PATIENCE_S)
    assert not runner.is_alive(), "it did not end"


@pytest.mark.ebpf
def test_descriptors_threads_and_programs_are_what_they_were(tmp_path: Path) -> None:
    require_kernel_source()
    options = OutletOptions(
        record=tmp_path / "rec",
        otlp_endpoint="http://127.0.0.1:1",
        otlp_queue=tmp_path / "queue",
        remote_write="http://127.0.0.1:1/write",
        prometheus="127.0.0.1:0",
        otlp_receive="127.0.0.1:0",
        otlp_receive_grpc="127.0.0.1:0",
    )
    with Engine() as engine:
        for number in range(2):  # what is made once for a process is made
            attach_once(engine, options, f"warm{number}")
        files, running = open_files(), threads()
        for number in range(4):
            attach_once(engine, options, f"r{number}")
        assert settles(open_files, files) == files
        assert settles(threads, running) == running
    assert not [name for name in files if "bpf" in name], "programs, maps and links are all closed"
    assert not [path for path in (tmp_path / "rec").iterdir() if path.suffix == ".part"]
