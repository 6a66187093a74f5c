"""What a scrape gets, read by the official client's own parsers."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
from made import account, batch, record, series_names, step, until
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from dsagent.agent.errors import DsagentError
from dsagent.agent.facts import SourceStatus
from dsagent.agent.listening.pages import MAX_CONNECTIONS
from dsagent.agent.metrics.catalog import CATALOGUE
from dsagent.agent.sinks.base import SinkStatus
from dsagent.agent.sinks.prometheus import PrometheusSink
from dsagent.agent.slo import Limits

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
FULL = batch(
    accounts=(account("kept", sampled=True), account("dropped", model='a "quoted"\nname')),
    steps=(step(),),
    sources=(SourceStatus("steps", "ok"),),
    sinks=(SinkStatus("otlp", 3, 2, 1, 0),),
)


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    made = PrometheusSink("127.0.0.1", 0, Limits())
    made.start()
    made.take(FULL)
    yield made
    made.stop(5.0)


def scrape(
    sink: PrometheusSink, accept: str = "*/*", path: str = "/metrics"
) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=10)
    connection.request("GET", path, headers={"Accept": accept})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, response.headers["Content-Type"], body


def test_openmetrics_with_exemplars(sink: PrometheusSink) -> None:
    status, content_type, body = scrape(sink, OPENMETRICS)
    assert status == 200
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(body)}
    ttft = families["gen_ai_server_time_to_first_token_seconds"]
    exemplars = [s.exemplar for s in ttft.samples if s.exemplar is not None]
    assert [e.labels["trace_id"] for e in exemplars] == [f"{record('kept').trace_id:032x}"]
    assert exemplars[0].value == pytest.approx(0.3)
    causes = families["dsagent_request_cause_seconds"]
    assert {s.labels["cause"] for s in causes.samples} == {
        "cpu.runqueue",
        "decode.compute",
        "unattributed",
    }
    known = {name for metric in CATALOGUE for name in series_names(metric)}
    assert {s.name for family in families.values() for s in family.samples} <= known


def test_classic_text_without_exemplars(sink: PrometheusSink) -> None:
    _, content_type, body = scrape(sink)
    assert content_type.startswith("text/plain; version=0.0.4")
    assert "# {" not in body
    assert "# EOF" not in body
    families = {family.name: family for family in parse_classic(body)}
    assert families["dsagent_request_cause_seconds"].type == "counter"
    models = {s.labels["gen_ai_request_model"] for s in families["dsagent_requests"].samples}
    assert models == {"tiny-llama", 'a "quoted"\\x0aname'}


def test_scrapes_are_counted_and_other_paths_are_not_found(sink: PrometheusSink) -> None:
    assert scrape(sink, path="/")[0] == 404
    scrape(sink)
    scrape(sink)
    # Counted once it is written, which the client may see first.
    until(lambda: sink.status() == SinkStatus("prometheus", 2, 2))


def test_a_crowd_of_silent_clients_keeps_nobody_out_and_is_counted(sink: PrometheusSink) -> None:
    silent = [
        socket.create_connection(("127.0.0.1", sink.port), timeout=10)
        for _ in range(10 * MAX_CONNECTIONS)
    ]
    status, _, _ = scrape(sink)
    assert status == 200
    # Those that came first have made room.
    assert silent[0].recv(1) == b""
    until(lambda: sink.status().dropped == 9 * MAX_CONNECTIONS + 1)
    for connection in silent:
        connection.close()


def test_clients_that_ask_and_do_not_read_keep_nobody_out(sink: PrometheusSink) -> None:
    deaf = []
    for _ in range(2 * MAX_CONNECTIONS):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", sink.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        deaf.append(client)
    assert scrape(sink)[0] == 200
    for connection in deaf:
        connection.close()


def test_a_port_in_use_is_one_clear_line(sink: PrometheusSink) -> None:
    with pytest.raises(DsagentError, match=r"cannot listen on 127\.0\.0\.1:\d+ for Prometheus"):
        PrometheusSink("127.0.0.1", sink.port, Limits()).start()
