"""Several engines share one receiver: each received span is one engine's, or nobody's, once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection

import pytest
from made import ANCHOR, S, account, engine_span
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import dsagent.agent.sidecar.receiver as module
from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.engine_spans import EngineSpans
from dsagent.agent.listening.admission import ListenOptions
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.sidecar.processes import Key
from dsagent.agent.sidecar.receiver import Receiver
from dsagent.agent.sidecar.span_board import (
    KEEP_NS,
    MOST_SPANS,
    NAMED_FIRST_NS,
    SharedClaims,
    SpanBoard,
)

A, B = Key(10, 1, 7), Key(20, 1, 7)
TRACE, CALLER = 0xABC << 64 | 7, 77
NOW_NS = 2001 * S


def owner_of(pid: int) -> Key | None:
    return {11: A, 21: B}.get(pid)


class Engine:
    """One engine's side: its accounts, and the spans that it is shown."""

    def __init__(self, board: SpanBoard, key: Key) -> None:
        self.key = key
        self._board = board
        board.show_to(key)
        self._spans = EngineSpans(SharedClaims(board, key))
        self._next = 0

    def ended(self, name: str) -> Account:
        mine = account(name, trace_id=TRACE, parent_span_id=CALLER, sampled=True)
        self._spans.pass_on([mine], [], ANCHOR, NOW_NS)
        return mine

    def look(self, now_ns: int = NOW_NS) -> list[str]:
        """The requests that were joined to a span."""
        shown, self._next = self._board.since(self._next, self.key)
        passed = self._spans.pass_on([], shown, ANCHOR, now_ns)
        return [each.record.request_id for each in passed if each.engine_span is not None]

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(self._spans.outcomes)


@pytest.fixture
def board() -> SpanBoard:
    return SpanBoard()


def test_the_engine_that_knows_the_id_has_it_whoever_looks_first(board: SpanBoard) -> None:
    """As behind a router: both have a request of that trace and that caller."""
    a, b = Engine(board, A), Engine(board, B)
    a.ended("of-a")
    mine = b.ended("of-b")
    board.put([engine_span(mine)], owner_of, NOW_NS)
    assert a.look() == []
    assert b.look() == ["of-b"]
    assert a.look(NOW_NS + NAMED_FIRST_NS) == []
    board.expire(NOW_NS + KEEP_NS + 1)
    assert (a.outcomes, b.outcomes, board.counts()) == ({}, {"joined": 1}, {})


def test_a_span_that_names_its_process_is_that_engines_alone(board: SpanBoard) -> None:
    """Two engines may have the same id, where one client gave it to both."""
    a, b = Engine(board, A), Engine(board, B)
    mine = a.ended("same")
    b.ended("same")
    board.put([engine_span(mine, process_id=21)], owner_of, NOW_NS)
    assert a.look() == []
    assert b.look() == ["same"]
    board.put([engine_span(mine, 0xFACE, process_id=11)], owner_of, NOW_NS)
    assert (a.look(), b.look()) == (["same"], [])


def test_a_process_that_is_no_engines_says_nothing(board: SpanBoard) -> None:
    a, b = Engine(board, A), Engine(board, B)
    mine = b.ended("of-b")
    board.put([engine_span(mine, process_id=1)], owner_of, NOW_NS)
    assert (a.look(), b.look()) == ([], ["of-b"])


def test_one_that_fits_by_its_trace_waits_for_who_knows_it_better(board: SpanBoard) -> None:
    a, b = Engine(board, A), Engine(board, B)
    mine = a.ended("of-a")
    board.put([engine_span(mine, request_id="unheard-of")], owner_of, NOW_NS)
    assert a.look(NOW_NS + NAMED_FIRST_NS - 1) == []
    assert a.look(NOW_NS + NAMED_FIRST_NS) == ["of-a"]
    assert b.look(NOW_NS + NAMED_FIRST_NS) == []
    alone = SpanBoard()
    only = Engine(alone, A)
    mine = only.ended("of-a")
    alone.put([engine_span(mine, request_id="unheard-of")], owner_of, NOW_NS)
    assert only.look() == ["of-a"]  # there is nobody who could know it better


def test_what_nobody_has_is_counted_once_and_what_comes_again_is_no_other(
    board: SpanBoard,
) -> None:
    a, b = Engine(board, A), Engine(board, B)
    stranger = engine_span(account("nobody's", trace_id=5))
    board.put([stranger, stranger], owner_of, NOW_NS)
    for engine in (a, b):
        assert engine.look() == []
    board.expire(NOW_NS + KEEP_NS)
    assert board.counts() == {"repeated": 1}
    board.expire(NOW_NS + KEEP_NS + 1)
    assert board.counts() == {"repeated": 1, "unmatched": 1}
    for engine in (a, b):
        assert engine.look(NOW_NS + KEEP_NS + 1) == []
        assert engine.outcomes == {}


def test_a_flood_is_bounded_and_counted(board: SpanBoard) -> None:
    one = engine_span(account("x", trace_id=5))
    board.put((replace(one, span_id=n + 1) for n in range(MOST_SPANS + 9)), owner_of, NOW_NS)
    shown, _ = board.since(0, A)
    assert len(shown) == MOST_SPANS
    assert board.counts() == {"unmatched": 9}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    receiver = Receiver()
    yield receiver
    receiver.stop()


def no_owners() -> object:
    raise AssertionError("nothing has come")


def attended(receiver: Receiver, now_ns: int) -> dict[str, object]:
    receiver.attend(now_ns, no_owners)  # type: ignore[arg-type]
    return receiver.describe()


def test_without_being_asked_it_does_not_listen(receiver: Receiver) -> None:
    receiver.set(SidecarOptions())
    assert attended(receiver, 0)["state"] == "off"
    assert receiver.source_for(A) is None
    assert receiver.families() == []


def test_a_port_that_is_taken_is_tried_again_ever_more_rarely(receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        receiver.set(SidecarOptions(otlp_receive=f"127.0.0.1:{port}"))
        assert attended(receiver, 0)["state"] == "waiting"
        assert f"127.0.0.1:{port}" in receiver.reason
        source = receiver.source_for(A)
        assert source is not None
        assert (source.status().state, source.poll(0).engine_spans) == ("unavailable", [])
    assert attended(receiver, S - 1)["state"] == "waiting"
    assert attended(receiver, S)["ports"] == [port]
    assert receiver.reason == ""
    assert source.status().state == "ok"


def test_whatever_is_in_its_way_it_lets_go_of_the_port_says_so_and_tries_again(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(_options: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(module, "make_forward", no_thread)
        receiver.set(SidecarOptions(otlp_receive="127.0.0.1:0"))
        assert attended(receiver, 0)["state"] == "waiting"
    assert "can't start new thread" in receiver.reason
    assert receiver.describe()["ports"] == []
    assert attended(receiver, S)["state"] == "ok"
    assert receiver.reason == ""


def test_spans_that_were_too_many_before_it_looked_are_counted(receiver: Receiver) -> None:
    """Whatever kept it from looking: the others of the flood are counted by the board."""
    receiver.set(SidecarOptions(otlp_receive="127.0.0.1:0"))
    attended(receiver, 0)
    (port,) = receiver.describe()["ports"]
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add().scope_spans.add().spans
    for _ in range(MOST_SPANS // 2 + 3):
        span = spans.add(kind=Span.SPAN_KIND_SERVER, trace_id=b"t" * 16)
        span.attributes.add(key="gen_ai.request.id").value.string_value = "x"
    for times in range(3):
        for number, span in enumerate(spans, times * len(spans) + 1):
            span.span_id = number.to_bytes(8, "big")
        assert posted(port, message.SerializeToString()) == 200
    for now_ns in (1, 2):
        receiver.attend(now_ns, lambda: lambda _pid: None)
        missed = 3 * len(spans) - MOST_SPANS
        assert receiver.describe()["outcomes"] == {"unmatched": missed}


def posted(port: int, body: bytes) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_beyond_loopback_it_asks_for_a_token(receiver: Receiver) -> None:
    options = SidecarOptions(otlp_receive="0.0.0.0:0")
    receiver.set(options)
    assert attended(receiver, 0)["state"] == "waiting"
    assert "--listen-token-file" in receiver.reason
    receiver.set(replace(options, guarded_by=ListenOptions(is_open=True)))
    assert attended(receiver, 0)["state"] == "ok"


def test_it_does_not_send_to_itself(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    receiver.set(SidecarOptions(otlp_receive="127.0.0.1:4318"))
    assert attended(receiver, 0)["state"] == "waiting"
    assert "to itself" in receiver.reason
