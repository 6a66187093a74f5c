"""The sidecar beside two real bundled engines that start after it, crash and come again."""

from __future__ import annotations

import os
import re
import signal

import pytest
from shell_lab import Server, add_up
from sidecar_lab import Sidecar, explained, until

pytestmark = pytest.mark.usefixtures("the_only_sidecar")

# Of their own for this test run, so that the sidecar sees these engines and no others.
NETWORK = f"127.{40 + os.getpid() % 50}.{os.getpid() // 50 % 250}"


def test_two_engines_through_a_crash_and_a_restart() -> None:
    traces = {name: f"{number:032x}" for number, name in enumerate(("a", "b", "again"), 0xABC)}
    match = re.escape(NETWORK) + r"\.[12]( |$)"
    with Sidecar("--match", match) as sidecar, Server(f"{NETWORK}.2") as b:
        sidecar.watching(b.pid)
        with Server(f"{NETWORK}.1") as a:
            sidecar.watching(a.pid)
            for server, name in ((a, "a"), (b, "b")):
                reply = server.complete(traces[name])
                document = until(lambda n=name: explained(traces[n]), f"the account of {name}")
                assert document["trace_id"] == traces[name]
                assert document["output_tokens"] == reply["usage"]["completion_tokens"]
                assert document["partial"] is False
                add_up(document)
            os.kill(a.pid, signal.SIGKILL)
            sidecar.said(rf"engine\.ended .*\(pid {a.pid}\)")
        with Server(f"{NETWORK}.1") as again:
            sidecar.watching(again.pid)
            again.complete(traces["again"])
            for name, trace in traces.items():
                document = until(lambda t=trace: explained(t), f"the account of {name}")
                assert document["trace_id"] == trace
            engines = sidecar.engines()
            assert set(engines) == {b.pid, again.pid}
            assert engines[again.pid]["restarts"] == 1
            assert all(each["uncounted_losses"] == 0 for each in engines.values())
            os.kill(sidecar.pid, signal.SIGKILL)  # and the engines do not notice
            sidecar.wait()
            for server in (b, again):
                assert server.complete("f" * 32)["usage"]["completion_tokens"] == 8
