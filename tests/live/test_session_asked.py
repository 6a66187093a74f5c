"""A session does what other threads ask of it: says how it stands, looks into the kernel or not."""

from __future__ import annotations

import json

import made_status
import pytest
from shell_lab import Engine, dsagent
from watching import Watching

from dsagent.agent.host.target import resolve


def kernel_of(watching: Watching) -> dict[str, str]:
    status = watching.session.call(watching.session.status, 30.0)
    (kernel,) = [each for each in status["sources"] if each["name"] == "kernel"]
    found: dict[str, str] = kernel
    return found


def test_it_says_how_it_stands() -> None:
    with Engine() as engine, Watching(resolve(engine.pid)) as watching:
        engine.do("request r1")
        watching.explain("r1")
        status = watching.session.call(watching.session.status, 30.0)
        of_sidecar = {"engine", "command_line", "since_unix_ns", "restarts"}
        assert set(status) == set(made_status.ENGINE) - of_sidecar
        assert (status["requests"], status["steps"], status["model"]) == (1, 6, "fake")
        assert status["uncounted_losses"] == 0
        told = dsagent("status", "--pid", str(engine.pid), "--json")
        document = json.loads(told.stdout)
        assert document["mode"] == "attach"
        assert set(document) < set(made_status.SIDECAR)
        (only,) = document["engines"]
        assert only["pid"] == engine.pid
        assert "through its step rings" in dsagent("status", "--pid", str(engine.pid)).stdout


def test_what_it_is_asked_may_fail_and_it_goes_on() -> None:
    def fails() -> None:
        raise ValueError("of the asker's")

    with Engine() as engine, Watching(resolve(engine.pid)) as watching:
        with pytest.raises(ValueError, match="of the asker's"):
            watching.session.call(fails, 30.0)
        engine.do("request r1")
        watching.explain("r1")


@pytest.mark.ebpf
def test_the_kernel_is_left_out_and_looked_into_again() -> None:
    with Engine() as engine, Watching(resolve(engine.pid)) as watching:
        before = kernel_of(watching)
        if before["state"] != "ok":
            pytest.skip(before["reason"])
        session = watching.session
        session.call(lambda: session.look_into_kernel("short of memory"), 30.0)
        assert kernel_of(watching)["state"] == "unavailable"
        assert kernel_of(watching)["reason"] == "short of memory"
        engine.do("request r1")
        assert watching.explain("r1")["not_looked_at"] == ["kernel"]
        session.call(lambda: session.look_into_kernel(None), 30.0)
        assert kernel_of(watching)["state"] == "ok"
        engine.do("request r2")
        assert watching.explain("r2")["not_looked_at"] == []
