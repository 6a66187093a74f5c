"""The parts of the long runs: the back end that goes, the deck of faults, gauges, the page."""

from __future__ import annotations

import gzip
import http.client
import os
import random
import socket
from pathlib import Path

import pytest
import soak_gauges as gauges
import soak_page
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from soak_back_ends import OtlpReceiver
from soak_faults import FAULTS, Deck

TRACE = bytes(range(16))


def post(port: int) -> int:
    spans = [Span(trace_id=TRACE, name="a"), Span(trace_id=TRACE, name="b")]
    request = ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])]
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        body = gzip.compress(request.SerializeToString())
        connection.request("POST", "/v1/traces", body, {"Content-Encoding": "gzip"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_back_end_goes_and_comes_again_where_it_was() -> None:
    receiver = OtlpReceiver()
    try:
        assert post(receiver.port) == 200
        with receiver.outage(), pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", receiver.port), timeout=10)
        assert post(receiver.port) == 200
    finally:
        receiver.close()
    assert receiver.items == {"traces": 4}
    assert receiver.trace_ids == {TRACE.hex()}
    assert receiver.outages == 1


def test_every_fault_comes_before_any_comes_again() -> None:
    deck = Deck(random.Random(3))
    first = [deck.draw() for _ in FAULTS]
    assert sorted(f.__name__ for f in first) == sorted(f.__name__ for f in FAULTS)
    second = [deck.draw() for _ in FAULTS]
    assert first != second
    assert sum(deck.done.values()) == 2 * len(FAULTS)


def test_descriptors_are_told_by_kind() -> None:
    before = gauges.descriptors(os.getpid())
    file = os.memfd_create("soak")
    try:
        with socket.socket():
            after = gauges.descriptors(os.getpid())
    finally:
        os.close(file)
    assert after - before == {"memory files": 1, "sockets": 1}
    assert gauges.kind_of("anon_inode:bpf-prog") == "probes"


def test_disk_counts_files_below(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 100)
    (tmp_path / "two").write_bytes(b"y" * 23)
    assert gauges.disk_bytes(tmp_path) == 123


def test_a_page_keeps_all_but_what_is_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin = "<!-- tests/soak/soak.py --write -->\n"
    page.write_text(f"before\n{begin}old\n<!-- end soak -->\nafter\n")
    soak_page.write("soak.py", "soak", "new", page)
    assert page.read_text() == f"before\n{begin}new\n<!-- end soak -->\nafter\n"
    with pytest.raises(ValueError, match="has no"):
        soak_page.write("other.py", "soak", "new", page)
