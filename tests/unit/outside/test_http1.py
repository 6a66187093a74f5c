"""HTTP messages cut out of what calls moved: any bytes, any split."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from dsagent.agent.sources.outside.http1 import (
    MOST_HEAD_BYTES,
    Body,
    End,
    Event,
    Head,
    Lost,
    Messages,
    Side,
)

POST = (
    b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\ntraceparent: 00-"
    + b"1" * 32
    + b"-"
    + b"2" * 16
    + b"-01\r\nContent-Length: 5\r\n\r\nhello"
)
GET = b"GET /health HTTP/1.1\r\n\r\n"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'9\r\ndata: 1\n\n\r\n9;ext="x"\r\ndata: 2\n\n\r\n0\r\nTrailer: y\r\n\r\n'
)
PLAIN = b"HTTP/1.0 404 Not Found\r\ncontent-length: 3\r\n\r\nno!"


def fed(side: Side, data: bytes, cuts: list[int]) -> list[Event]:
    """`data` in calls that end at `cuts`; bodies that follow one another are joined."""
    reader = Messages(side)
    found: list[Event] = []
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for low, high in itertools.pairwise(bounds):
        for event in reader.feed(data[low:high], high - low):
            last = found[-1] if found else None
            if isinstance(event, Lost):  # it begins again with a call: where depends on the split
                return [*found, event]
            if isinstance(event, Body) and isinstance(last, Body):
                found[-1] = Body(last.data + event.data, last.length + event.length)
            else:
                found.append(event)
    return found


def test_a_request_and_the_next_one_behind_it() -> None:
    first, body, end, second, over = fed("request", POST + GET, [])
    assert isinstance(first, Head) and isinstance(second, Head)
    assert (first.method, first.path) == ("POST", "/v1/completions")
    assert first.headers["traceparent"].startswith("00-1111")
    assert body == Body(b"hello", 5)
    assert (second.method, second.path) == ("GET", "/health")
    assert end == over == End()


def test_replies_by_chunks_and_by_length() -> None:
    head, body, end, plain, text, over = fed("response", CHUNKED + PLAIN, [])
    assert isinstance(head, Head) and head.headers["content-type"] == "text/event-stream"
    assert body == Body(b"data: 1\n\ndata: 2\n\n", 18)
    assert isinstance(plain, Head) and plain.status == 404
    assert text == Body(b"no!", 3)
    assert end == over == End()


def test_a_reply_up_to_the_end_of_the_connection() -> None:
    reader = Messages("response")
    events = list(reader.feed(b"HTTP/1.0 200 OK\r\n\r\nsome", 23))
    assert events[-1] == Body(b"some", 4)
    assert list(reader.close()) == [End()]


def test_the_answer_to_head_has_no_body() -> None:
    reader = Messages("response")
    reader.bodiless = True
    events = list(reader.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + PLAIN, 79))
    assert events[1] == End()
    assert isinstance(events[2], Head) and events[2].status == 404


def test_a_body_is_skipped_without_being_copied() -> None:
    reader = Messages("request")
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100000\r\n\r\n"
    list(reader.feed(head + b"x" * 10, len(head) + 50_000))
    assert list(reader.feed(b"y" * 10, 50_000)) == [
        Body(b"y" * 10, 10),
        Body(b"", 49_990),
        End(),
    ]


def test_what_hides_the_next_chunk_loses_the_way_until_a_call_begins_with_one() -> None:
    reader = Messages("response")
    list(reader.feed(CHUNKED[: CHUNKED.index(b"9\r\n")], CHUNKED.index(b"9\r\n")))
    assert list(reader.feed(b"9\r\ndata", 40)) == [Body(b"data", 4), Body(b"", 5), Lost()]
    assert list(reader.feed(b"4\r\nabcd\r\n", 9)) == [Body(b"abcd", 4)]
    assert list(reader.feed(b"9\r\nda", 40, b"\r\n0\r\n\r\n"))[-1] == End()


def test_a_head_that_was_cut_tells_what_it_can() -> None:
    reader = Messages("request")
    head, lost = reader.feed(
        b"POST /v1/completions HTTP/1.1\r\nX-Request-Id: a\r\nCookie: zz", 9000
    )
    assert isinstance(head, Head) and not head.whole
    assert head.headers == {"x-request-id": "a"}
    assert lost == Lost()
    assert next(reader.feed(GET, len(GET))) == Head("GET", "/health")


def test_contradicting_lengths_are_not_believed() -> None:
    text = b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"
    assert isinstance(fed("request", text, [])[-1], Lost)


MESSAGES = {
    "request": [
        POST,
        GET,
        b"\r\n" + GET,
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
    "response": [CHUNKED, PLAIN, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n"],
}
SIDES = st.sampled_from(["request", "response"])
CUTS = st.lists(st.integers(0, 1 << 16), max_size=12)


@given(SIDES, st.data(), CUTS)
@settings(max_examples=150, deadline=None)
def test_any_split_says_the_same(side: Side, data: st.DataObject, cuts: list[int]) -> None:
    parts = data.draw(st.lists(st.sampled_from(MESSAGES[side]), min_size=1, max_size=4))
    whole = bytearray(b"".join(parts))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=2)):
        whole[at] = data.draw(st.integers(0, 255))  # what it does to the meaning, it does always
    assert fed(side, bytes(whole), cuts) == fed(side, bytes(whole), [])


@given(
    SIDES,
    st.lists(st.tuples(st.binary(max_size=300), st.integers(0, 1 << 40), st.binary(max_size=8))),
)
@settings(max_examples=150, deadline=None)
def test_no_bytes_raise_or_pile_up(side: Side, calls: list[tuple[bytes, int, bytes]]) -> None:
    reader = Messages(side)
    for data, hidden, tail in calls:
        list(reader.feed(data, len(data) + hidden, tail))
        assert len(reader._kept) <= MOST_HEAD_BYTES
    list(reader.close())


def test_an_endless_head_is_given_up() -> None:
    reader = Messages("request")
    for _ in range(100):
        list(reader.feed(b"A" * 1000, 1000))
        assert len(reader._kept) <= MOST_HEAD_BYTES
    assert next(reader.feed(GET, len(GET))) == Head("GET", "/health")
