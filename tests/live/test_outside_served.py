"""An engine's /metrics found by its sockets: its counts and ours; slow and hostile ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from kernel_lab import Child

from dsagent.agent.facts import Event, Readings, Target
from dsagent.agent.sources import served
from dsagent.agent.sources.served import ServedSource

SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = TEXT.encode()
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
TEXT = "llamacpp:n_decode_total 10\\nllamacpp:requests_processing 0\\n"
say(ready=True)
while True:
    TEXT = hear().replace("|", chr(10))
    say(done=True)
"""


@pytest.fixture
def child() -> Iterator[Child]:
    with Child(SERVER) as child:
        child.hear()
        yield child


class Asked:
    def __init__(self, pid: int) -> None:
        self.ours: dict[str, float] | None = {"steps": 0.0}
        self.source = ServedSource(
            Target(pid, 1, 0, "child", (), "http"), lambda: (pid,), lambda: self.ours
        )
        self.source.start()
        self.now_ns = 0

    def once(self) -> Readings:
        """One question and its answer."""
        self.now_ns += served.EVERY_NS
        self.source.poll(self.now_ns)
        assert self.source._thread is not None
        self.source._thread.join()
        readings = Readings()
        end = time.monotonic() + 10
        while self.source._thread is not None and time.monotonic() < end:
            readings = self.source.poll(self.now_ns)
        return readings


def test_counts_that_agree_and_counts_that_do_not(child: Child) -> None:
    asked = Asked(child.pid)
    names = {sample.name: sample.value for sample in asked.once().samples}
    assert names == {"dsagent.served.steps": 10.0, "dsagent.served.requests.running": 0.0}

    def say(steps: int) -> list[Event]:
        child.say(f"llamacpp:n_decode_total {steps}")
        child.hear()
        return asked.once().events

    asked.ours = {"steps": 100.0}
    assert say(111) == []  # 101 of theirs
    assert "steps 100 of 101" in asked.source.status().reason
    (event,) = say(160)
    assert event.name == "served.mismatch" and "150" in event.message
    assert say(160) == []  # told once
    asked.ours = None  # something is going on: nothing is compared
    assert say(500) == []
    asked.ours = {"steps": 120.0}
    assert say(3) == []  # it has been started anew
    asked.ours = {"steps": 127.0}
    assert say(10) == [] and "steps 7 of 7" in asked.source.status().reason


def test_a_server_that_says_nothing_known(child: Child) -> None:
    child.say("python_info 1|" + "x" * 100)
    child.hear()
    asked = Asked(child.pid)
    assert asked.once().samples == []
    status = asked.source.status()
    assert status.state == "unavailable" and "nothing that is known" in status.reason


def test_too_much_is_not_taken(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MOST_BYTES", 1000)
    child.say("llamacpp:n_decode_total 10|" + "#" * 2000)
    child.hear()
    asked = Asked(child.pid)
    assert asked.once().samples == []
    assert "ValueError" in asked.source.status().reason


def test_one_that_accepts_and_never_answers_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "TIMEOUT_S", 0.2)
    body = "import socket; s = socket.create_server(('127.0.0.1', 0)); say(ready=True); hear()"
    with Child(body) as silent:
        silent.hear()
        asked = Asked(silent.pid)
        assert asked.once().samples == []
        assert asked.source.status().state == "unavailable"


def test_who_listens_for_its_like_only_is_left_alone() -> None:
    body = """
import socket
open("/proc/self/comm", "w").write("VLLM::EngineCor")
s = socket.create_server(("127.0.0.1", 0))
s.setblocking(False)
say(ready=True)
hear()
try:
    s.accept()
    say(came=True)
except BlockingIOError:
    say(came=False)
hear()
"""
    with Child(body) as core:
        core.hear()
        asked = Asked(core.pid)
        asked.once()
        assert asked.source.status().reason == "it listens on no TCP port"
        core.say("now")
        assert core.hear() == {"came": False}


def test_no_socket_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with Child("say(ready=True); hear()") as idle:
        idle.hear()
        asked = Asked(idle.pid)
        asked.once()
        assert asked.source.status().reason == "it listens on no TCP port"
    assert os.getpid() != idle.pid
