"""The sidecar beside an engine in real containers: every request explained, before and after the
engine is restarted, and nothing in the engine that depends on the sidecar."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pod import Pod, Rights, explained, send, watched
from podman_lab import Container


def source(engine: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(next(each for each in engine["sources"] if each["name"] == name))


@pytest.mark.ebpf
@pytest.mark.parametrize(
    "engine_options",
    [
        pytest.param((), id="engine of uid 0 with a runtime's capabilities"),
        pytest.param(("--user=1000:1000", "--cap-drop=ALL"), id="engine of uid 1000"),
    ],
)
def test_every_request_is_explained_before_and_after_the_engine_is_restarted(
    a_pod: Pod, engine_options: tuple[str, ...]
) -> None:
    sidecar = a_pod.sidecar(Rights())
    engine = a_pod.engine(*engine_options)
    first = watched(sidecar)
    assert source(first, "kernel")["state"] == "ok", first
    before = send(engine, 5)
    assert not any(explained(sidecar, request)["partial"] for request in before)

    engine.again()
    second = watched(sidecar, other_than=first["start_ticks"])
    assert source(second, "kernel")["state"] == "ok", second
    after = send(engine, 5)
    assert not any(explained(sidecar, request)["partial"] for request in (*before, *after))
    assert watched(sidecar)["uncounted_losses"] == 0


def test_killing_the_sidecar_changes_nothing_in_the_engine(a_pod: Pod) -> None:
    engine = a_pod.engine()
    send(engine, 1)
    unwatched = seen_of(engine)
    sidecar = a_pod.sidecar(Rights())
    watched(sidecar)
    send(engine, 3)
    said = engine.logs()
    sidecar.signal(signal.SIGKILL)
    assert sidecar.wait() == 128 + signal.SIGKILL
    assert seen_of(engine) == unwatched
    send(engine, 3)
    assert engine.logs() == said

    sidecar.again()
    watched(sidecar)
    (request,) = send(engine, 1)
    assert not explained(sidecar, request)["partial"]


def seen_of(engine: Container) -> dict[str, object]:
    """What another process could have changed of it: who traces it, what it maps and has open."""
    folder = Path(f"/proc/{engine.pid}")
    status = (folder / "status").read_text()
    maps = (folder / "maps").read_text().splitlines()
    return {
        "pid": engine.pid,
        "tracer": next(line for line in status.splitlines() if line.startswith("TracerPid")),
        "mapped": {line.split(maxsplit=5)[5] for line in maps if len(line.split()) == 6},
        "open": sorted(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
    }
