"""Requests and replies put together; hostile bytes; what is looked at and what is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsagent.agent.sources.outside import exchanges
from dsagent.agent.sources.outside.exchanges import Exchange, Exchanges, Heard, Kind, Moved
from dsagent.agent.sources.outside.reply import MOST_LINE_BYTES, Reply

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def request(path: str = "/v1/completions", body: bytes = b'{"prompt":"x"}') -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nTraceparent: {TRACEPARENT}\r\nX-Request-Id: r\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def piece(text: str, **more: object) -> bytes:
    said = {"id": "cmpl-1", "model": "m", "choices": [{"text": text, "finish_reason": None}]}
    event = b"data: " + json.dumps(said | more).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


class Wire:
    """One connection of a server, and what was made of it."""

    def __init__(self) -> None:
        self.exchanges = Exchanges()
        self.heard = Heard()
        self.now_ns = 0

    def move(self, kind: Kind, data: bytes = b"", length: int | None = None) -> None:
        self.now_ns += 1000
        size = len(data) if length is None else length
        moved = Moved(kind, 1, self.now_ns, 7, 8, 0, size, data, data[-8:])
        self.exchanges.hear(moved, self.heard)

    def only(self) -> Exchange:
        (found,) = self.heard.ended
        return found


def test_a_stream_from_first_byte_to_last() -> None:
    wire = Wire()
    sent = request()
    wire.move("received", sent[:40])
    wire.move("received", sent[40:])
    for data in (HEAD, piece("a"), piece("b"), piece("", usage={"completion_tokens": 2})):
        wire.move("sent", data)
    wire.move("sent", b"e\r\ndata: [DONE]\n\n\r\n" + END)
    found = wire.only()
    assert found.received_ns == 1000 and found.ended_ns == 7000
    assert found.tokens_ns == [4000, 5000]
    assert found.first_token_ns == 4000
    assert found.outcome == "complete" and found.status == 200 and found.streams
    assert found.headers["traceparent"] == TRACEPARENT
    assert found.body_bytes == 14
    assert found.reply is not None
    assert (found.reply.reply_id, found.reply.model) == ("cmpl-1", "m")
    assert found.reply.completion_tokens == 2 and found.reply.done


def test_requests_that_ask_for_no_text_are_none() -> None:
    wire = Wire()
    for data in (b"GET /metrics HTTP/1.1\r\n\r\n", request("/v1/embeddings")):
        wire.move("received", data)
        wire.move("sent", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert wire.heard == Heard() and wire.exchanges.other == 2


def test_one_connection_serves_one_after_the_other_and_both_at_once() -> None:
    wire = Wire()
    wire.move("received", request())
    wire.move("sent", HEAD + piece("a") + END)
    wire.move("received", request() + request("/v1/chat/completions"))  # pipelined
    wire.move("sent", HEAD + piece("b") + END + HEAD + piece("c") + piece("d") + END)
    assert [e.outcome for e in wire.heard.ended] == ["complete"] * 3
    assert [len(e.tokens_ns) for e in wire.heard.ended] == [1, 1, 2]
    assert [e.operation for e in wire.heard.ended] == ["text_completion", "text_completion", "chat"]


def test_a_reply_to_head_has_no_body_wherever_it_is_in_a_send() -> None:
    wire = Wire()
    wire.move("received", request() + b"HEAD /v1/models HTTP/1.1\r\n\r\n" + request())
    bare = b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n"
    interim = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    wire.move("sent", HEAD + piece("a") + END + interim + bare + HEAD + piece("b") + END)
    assert [found.outcome for found in wire.heard.ended] == ["complete", "complete"]
    assert [len(found.tokens_ns) for found in wire.heard.ended] == [1, 1]
    assert wire.exchanges.lost == 0


def test_what_a_client_that_left_also_asked_for_is_still_replied_to_first() -> None:
    wire = Wire()
    wire.move("received", b"GET /health HTTP/1.1\r\n\r\n")
    wire.move("peer closed")  # seen before the server has read all that came
    wire.exchanges.client_left(wire.now_ns, wire.heard)
    wire.move("received", request())
    wire.move("sent", b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")
    wire.move("sent", HEAD + piece("a") + END)
    assert (wire.only().outcome, wire.only().status) == ("complete", 200)


def test_of_too_many_connections_that_is_forgotten_which_moved_longest_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchanges, "MOST_CONNECTIONS", 2)
    all_of_them, heard = Exchanges(), Heard()
    sent = request()
    for at, connection in enumerate((1, 2, 1, 3), start=1):
        data = sent if at != 3 else b""
        moved = Moved("received", connection, at, 7, 8, 0, len(data), data)
        all_of_them.hear(moved, heard)
    assert [found.received_ns for found in heard.ended] == [2]
    assert all_of_them.given_up == 1


def test_a_client_that_leaves_and_one_that_only_says_all() -> None:
    wire = Wire()
    wire.move("received", request())
    wire.move("sent", HEAD + piece("a"))
    wire.move("peer closed")
    wire.exchanges.client_left(wire.now_ns - 1, wire.heard)
    assert wire.heard.ended == []
    wire.exchanges.client_left(wire.now_ns, wire.heard)
    assert wire.only().outcome == "left by the client" and wire.only().ended_ns == 3000

    half = Wire()  # it has closed its side only, and reads on
    half.move("received", request())
    half.move("peer closed")
    half.move("sent", HEAD + piece("a"))
    half.exchanges.client_left(half.now_ns, half.heard)
    assert half.heard.ended == []
    half.move("sent", END)
    assert half.only().outcome == "complete"


def test_a_server_that_dies() -> None:
    wire = Wire()
    wire.move("received", request())
    wire.move("sent", HEAD + piece("a"))
    wire.move("closed")
    assert wire.only().outcome == "broken off by the server"


def test_a_reply_up_to_the_end_of_the_connection_is_complete() -> None:
    wire = Wire()
    wire.move("received", request())
    wire.move("sent", b'HTTP/1.0 200 OK\r\n\r\n{"usage": {"completion_tokens": 9}}')
    wire.move("closed")
    assert wire.only().outcome == "complete"
    assert wire.only().reply is not None and wire.only().reply.completion_tokens == 9


def test_what_was_not_copied_is_reckoned_with() -> None:
    reply = Reply(events=True)
    line = b'data: {"text":"a"}\n\n'
    assert reply.feed(line * 10, 10 * len(line)) == 10
    reply.feed(line[:9], 5 * len(line))  # five more, of which the beginning was copied
    reply.feed(line, len(line))
    assert reply.tokens + reply.hidden_tokens in (15, 16)


def test_text_cannot_pass_for_what_the_server_says() -> None:
    reply = Reply(events=True)
    said = {"choices": [{"text": '"id":"cmpl-evil","completion_tokens": 99,"model":"x"'}]}
    line = b"data: " + json.dumps(said).encode() + b"\n\n"
    assert reply.feed(line, len(line)) == 1
    assert (reply.reply_id, reply.model, reply.completion_tokens) == ("", "", None)


def test_nothing_of_the_text_is_kept() -> None:
    wire = Wire()
    wire.move("received", request(body=b'{"prompt":"SECRET"}'))
    wire.move("sent", HEAD + piece("SECRET"))
    assert "SECRET" not in repr(wire.only if wire.heard.ended else wire.heard.begun)
    reply = wire.heard.begun[0].reply
    assert reply is not None
    assert all("SECRET" not in repr(getattr(reply, name)) for name in vars(reply))


def test_what_falls_silent_or_is_too_much_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    wire.move("received", request())
    wire.exchanges.silent(wire.now_ns, wire.heard)
    assert wire.heard.ended == []
    wire.exchanges.silent(wire.now_ns + 1, wire.heard)
    assert wire.only().outcome == "lost" and wire.exchanges.open() == []

    monkeypatch.setattr(exchanges, "MOST_CONNECTIONS", 2)
    many, heard = Exchanges(), Heard()
    for number in range(5):
        moved = Moved("received", number, number + 1, 7, 8, 0, len(request()), request())
        many.hear(moved, heard)
    assert many.given_up == len(heard.ended) == 3 and len(many.open()) == 2


KINDS = st.sampled_from(["received", "sent", "peer closed", "closed"])
PARTS = st.one_of(
    st.sampled_from([request(), HEAD, piece("a"), END, b"data: ", b"\r\n\r\n", request()[:50]]),
    st.binary(max_size=60),
)


@given(st.lists(st.tuples(KINDS, st.integers(0, 3), PARTS, st.integers(0, 1 << 33)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_nothing_raises_and_each_ends_once(calls: list[tuple[Kind, int, bytes, int]]) -> None:
    all_of_them, heard = Exchanges(), Heard()
    for at, (kind, connection, data, hidden) in enumerate(calls, 1):
        moved = Moved(kind, connection, at, 7, 8, 0, len(data) + hidden, data, data[-8:])
        all_of_them.hear(moved, heard)
        all_of_them.client_left(at - 5, heard)
        all_of_them.silent(at - 20, heard)
    numbers = [exchange.number for exchange in heard.ended]
    assert len(numbers) == len(set(numbers))
    assert {e.number for e in all_of_them.open()} | set(numbers) == {e.number for e in heard.begun}
    for exchange in heard.ended:
        assert exchange.ended_ns is not None and exchange.ended_ns >= exchange.received_ns
        if exchange.reply is not None:
            assert len(exchange.reply._line) <= MOST_LINE_BYTES
