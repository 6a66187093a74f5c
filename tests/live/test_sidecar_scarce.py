"""The sidecar where something runs out: disk, memory, rights. It says so, and goes on."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from sidecar_lab import Lab, Sidecar, explained, get, until
from small_disk import needs_a_mount, on_small_disk

pytestmark = pytest.mark.usefixtures("the_only_sidecar")


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(f"{request.node.name}-{os.getpid()}")


@needs_a_mount
def test_a_full_disk_stops_the_recording_and_nothing_else(lab: Lab, tmp_path: Path) -> None:
    flags = ("--match", lab.token, "--record", str(tmp_path / "rec"))
    with (
        Sidecar(*flags, under=on_small_disk(tmp_path)) as sidecar,
        lab.engine(step_ms=0.2) as engine,
    ):
        sidecar.watching(engine.pid)
        number = 0
        while not any("No space left on device" in line for line in sidecar.err):
            number += 1
            engine.do(f"request r{number}")
            assert number < 3_000
        line = sidecar.said("No space left on device")
        assert "tried again in 60 s at the earliest" in line
        engine.do("request after")
        assert until(lambda: explained("after"), "an account without a recording")
        (only,) = sidecar.engines().values()
        (recording,) = [each for each in only["sinks"] if each["name"] == "recording"]
        assert "No space left on device" in recording["reason"]
        assert recording["dropped"] > 0
        assert only["uncounted_losses"] == 0


def test_close_to_its_memory_limit_it_keeps_and_looks_at_less(lab: Lab) -> None:
    with lab.sidecar("--max-memory", str(32 << 20)) as sidecar, lab.engine() as engine:
        sidecar.said(r"memory\.pressure .* of the memory limit are used: hardly any")
        sidecar.watching(engine.pid)
        for number in range(40):
            engine.do(f"request r{number}")
        assert until(lambda: explained("r39"), "the newest account")
        status = sidecar.status()
        assert status["memory"]["level"] == 3
        assert status["memory"]["limit_from"] == "--max-memory"
        assert status["recent"]["bytes"] <= 256 << 10
        assert any("close to the memory limit" in reason for reason in status["reasons"])
        (only,) = status["engines"]
        (kernel,) = [each for each in only["sources"] if each["name"] == "kernel"]
        assert kernel["state"] == "unavailable"
        document = until(lambda: explained("r39"), "the newest account")
        assert document["not_looked_at"] == ["kernel"] or kernel["reason"] != (
            "close to the memory limit"
        )


def test_without_rights_it_waits_and_says_which(lab: Lab) -> None:
    """As another user it may not look into root's engine."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with lab.engine() as engine:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        under = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
        flags = ("--match", lab.token, "--listen", f"127.0.0.1:{port}")
        with Sidecar(*flags, under=under) as sidecar:
            until(
                lambda: "may not be looked into" in get(port, "/readyz")[1],
                "a process it may not look at",
            )
            assert get(port, "/readyz")[0] == 503
            assert get(port, "/healthz") == (200, '{"alive": true}\n')
            assert not sidecar.gone
            assert engine.process.poll() is None


def test_without_the_library_for_anomalies_the_engine_is_watched_all_the_same(
    lab: Lab, tmp_path: Path
) -> None:
    """The image does not have it."""
    (tmp_path / "river").mkdir()
    lacking = "raise ModuleNotFoundError('not here', name='river')\n"
    (tmp_path / "river" / "__init__.py").write_text(lacking)
    lacks_it = {"PYTHONPATH": str(tmp_path)}
    with lab.sidecar("--anomalies", env=lacks_it) as sidecar, lab.engine() as engine:
        sidecar.said(r"anomalies\.absent .*dsagent\[anomalies\]")
        sidecar.watching(engine.pid)
