"""Alerts on their way: a real web hook, a real command, and back ends that are none."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from made import ANCHOR, S, batch, until
from slo_watch import SEES, Watch, request

from dsagent.agent.sinks import notify
from dsagent.agent.sinks.notify import QUEUE, Message, Notifier
from dsagent.agent.sinks.slo import SloSink
from dsagent.agent.slo.cache import CacheAlert
from dsagent.agent.slo.evaluator import Evaluator
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Limits
from dsagent.agent.slo.payload import NO_END, fingerprint, webhook_body


@contextmanager
def web_hook(*statuses: int) -> Iterator[tuple[str, list[Any]]]:
    """Answers with these, then 200; the bodies that came."""
    came: list[Any] = []
    answers = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if answers else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook?x=1", came
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def notifier() -> Iterator[Notifier]:
    made = Notifier("slo")
    made.start()
    try:
        yield made
    finally:
        made.stop(5.0)


def test_a_busy_web_hook_gets_it_at_last_and_in_order() -> None:
    with web_hook(503, 429) as (url, came), notifier() as sender:
        for number in range(3):
            sender.send(Message({"number": number}, url=url))
        until(lambda: sender.status().acknowledged == 3)
        assert [each["number"] for each in came] == [0, 0, 0, 1, 2]
        assert sender.status().sent == 3


def test_a_refusal_is_no_reason_to_try_again() -> None:
    with web_hook(400) as (url, came), notifier() as sender:
        sender.send(Message({}, url=url))
        until(lambda: sender.status().failed == 1)
        assert len(came) == 1
        assert "answered 400" in sender.status().reason
        assert "x=1" not in sender.status().reason  # a query may hold a secret


def test_a_web_hook_that_hangs_costs_bounded_memory_and_nobody_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(notify, "TIMEOUT_S", 60.0)  # it does not end by itself
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        sender = Notifier("slo")
        sender.start()
        for number in range(QUEUE * 3):
            sender.send(Message({"n": number}, url=f"http://127.0.0.1:{silent.getsockname()[1]}/"))
        until(lambda: sender.status().sent == 1)
        sender.stop(0.2)
        assert sender._thread.is_alive()  # it still waits; whoever ended it does not
        status = sender.status()
        assert (status.dropped, status.failed) == (QUEUE * 3, 0)
    sender._thread.join(60)  # the hook hangs up


@contextmanager
def dripping(sent: bytes) -> Iterator[tuple[int, list[int]]]:
    """Sends these, then for ever a byte more, each much sooner than a wait's time limit; its port,
    and how many connections came and were hung up on."""
    ended: list[int] = []
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection:
            try:
                connection.sendall(sent)
                while not over.wait(0.02):
                    connection.sendall(b"x")
            except OSError:
                ended.append(1)

    def listen() -> None:
        while not over.is_set():
            connection, _ = server.accept()
            thread = threading.Thread(target=drip, args=(connection,))
            threads.append(thread)
            thread.start()

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield server.getsockname()[1], ended
        finally:
            over.set()
            socket.create_connection(server.getsockname()).close()  # so that it stops listening
            for thread in (listener, *threads):
                thread.join(30)


@pytest.mark.parametrize(
    ("scheme", "sent"),
    [
        ("http", b""),
        ("http", b"HTTP/1.1 "),
        ("http", b"HTTP/1.1 500 No\r\nA: "),
        ("https", b"\x16\x03\x03\x3f\xff"),  # the head of a record of TLS that never ends
    ],
)
def test_an_answer_that_drips_in_is_cut_off(monkeypatch: Any, scheme: str, sent: bytes) -> None:
    monkeypatch.setattr(notify, "MOST_POST_S", 0.3)
    with dripping(sent) as (port, ended):
        reason, is_worth_another = notify.post(f"{scheme}://127.0.0.1:{port}/", b"{}")
        until(lambda: len(ended) == 1)
    assert is_worth_another
    assert reason.startswith(f"the web hook at 127.0.0.1:{port}: ")
    assert reason.endswith("answered 500" if b"500" in sent else "not done after 0.3 s")


@pytest.mark.parametrize(
    "rest", [b"Content-Length: 9999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nno size"]
)
def test_what_was_taken_is_taken_though_the_rest_of_the_answer_drips(
    monkeypatch: Any, rest: bytes
) -> None:
    monkeypatch.setattr(notify, "MOST_POST_S", 0.3)
    with dripping(b"HTTP/1.1 200 OK\r\n" + rest) as (port, ended):
        assert notify.post(f"http://127.0.0.1:{port}/", b"{}") == ("", False)
        until(lambda: len(ended) == 1)


def test_one_that_cannot_even_be_tried_is_counted_and_the_next_is_sent(monkeypatch: Any) -> None:
    class NoThread(threading.Timer):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with web_hook() as (url, came), notifier() as sender:
        with monkeypatch.context() as patch:
            patch.setattr(notify.threading, "Timer", NoThread)
            sender.send(Message({"n": 1}, url=url))
            until(lambda: sender.status().failed == 1)
        assert "can't start new thread" in sender.status().reason
        sender.send(Message({"n": 2}, url=url))
        until(lambda: sender.status().acknowledged == 1)
        assert came == [{"n": 2}]


def test_a_command_gets_the_document_on_stdin(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with notifier() as sender:
        sender.send(Message({"a": 1}, command=("sh", "-c", f"cat > {out}")))
        sender.send(Message({"a": 1}, command=("sh", "-c", "exit 3")))
        sender.send(Message({"a": 1}, command=(str(tmp_path / "none"),)))
        until(lambda: sender.status().failed == 2)
    assert json.loads(out.read_text()) == {"a": 1}
    assert "No such file" in sender.status().reason


def test_a_command_that_does_not_end_is_ended(monkeypatch: Any) -> None:
    monkeypatch.setattr(notify, "COMMAND_TIMEOUT_S", 0.1)
    with notifier() as sender:
        sender.send(Message({}, command=("sleep", "1000")))
        until(lambda: sender.status().failed == 1)
        assert "took longer" in sender.status().reason


def test_the_body_is_that_of_alertmanager() -> None:
    watch = Watch()
    watch.run(60)
    watch.run(20, bad=True)
    (alert, *_) = watch.alerts
    body = webhook_body(alert, ANCHOR, {"service": "chat\x1b", "engine": "reference"})
    assert (body["version"], body["status"], body["receiver"]) == ("4", "firing", "dsagent")
    (inner,) = body["alerts"]
    assert inner["labels"] == {
        "alertname": "DsagentSloBurn",
        "service": "chat\\x1b",
        "engine": "reference",
        "slo": "*",
        "objective": "ttft",
        "model": "tiny-llama",
        "severity": "page",
    }
    assert inner["annotations"]["top_cause"] == "batch.prefill_interference"
    assert inner["annotations"]["state"] == "burning"
    assert inner["annotations"]["trace_ids"] == request().trace_id
    assert inner["endsAt"] == NO_END
    assert inner["startsAt"].startswith("2023-11-1")
    assert inner["dsagent"]["culprits"][0]["request_id"] == "long-one"
    assert inner["fingerprint"] == fingerprint(inner["labels"])
    watch.run(4000)
    ended = next(a for a in watch.alerts if a.status == "resolved" and a.labels == alert.labels)
    after = webhook_body(ended, ANCHOR, {"service": "chat\x1b", "engine": "reference"})["alerts"][0]
    assert after["fingerprint"] == inner["fingerprint"]
    assert after["endsAt"] > after["startsAt"] == inner["startsAt"]


def test_the_sink_from_accounts_to_the_web_hook() -> None:
    with web_hook() as (url, came), web_hook() as (action_url, acted):
        limit = Limit("*", ttft_ns=500_000_000)
        alert = CacheAlert("prefix", "bypass", 0.6, 20.0, webhook=action_url, command=("true",))
        file = SloFile(Limits((limit,)), webhook=url, cache=(alert,))
        told = []
        sink = SloSink(file, Evaluator(file), on_alert=lambda alert: told.append(alert.name))
        sink.start()
        now_ns = 5000 * S
        for number in range(60):
            now_ns += S
            bad = request(bad=number > 20, prompt_tokens=100, cached_tokens=0)
            sink.take(replace(batch(now_ns, accounts=(bad,)), sources=SEES))
        sink.stop(5.0)
        sink.stop(0.0)
        states = [(b["commonLabels"]["alertname"], b["commonAnnotations"]["state"]) for b in came]
        assert ("DsagentSloBurn", "burning") in states
        assert ("DsagentCacheHitRatio", "low") in states
        assert states[-1] == ("DsagentSloBurn", "blind")  # the agent ended while it burnt
        assert acted[0]["circuit"] == "open"
        assert acted[0]["hit_ratio"] == 0.0
        assert len(told) == len(came)
        assert sink.status().acknowledged == len(came) + len(acted) + 1
