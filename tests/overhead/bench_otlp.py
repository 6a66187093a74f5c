"""OTLP: from records to bytes, beside the SDK's own path; memory with the back end hanging, that of
remote-write too.

A benchmark, not a test. Spans are those of requests (6 or 7 attributes, at most one link) and of
engine steps with many links. The hour of load runs on a clock of its own; the back end takes
connections and never answers.

    python tests/overhead/bench_otlp.py [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from made import ANCHOR, MS, S, record, step
from otlp_load import hanging_back_end, resident_bytes, seconds_of_load

from dsagent.agent.metrics.catalog import MODEL, REQUEST_CAUSE, TIME_TO_FIRST_TOKEN
from dsagent.agent.metrics.series import Store
from dsagent.agent.sinks.base import Sink
from dsagent.agent.sinks.openmetrics import render
from dsagent.agent.sinks.otlp import OtlpSink
from dsagent.agent.sinks.otlp_config import otlp_config, remote_write_endpoint
from dsagent.agent.sinks.otlp_delivery import QueueOptions
from dsagent.agent.sinks.otlp_encode import items_body, metrics_request
from dsagent.agent.sinks.otlp_span import span_bytes
from dsagent.agent.sinks.remote_write import HEADERS, RemoteWriteSink
from dsagent.agent.slo import Limits
from dsagent.instrumentation.records import RequestRecord, Step
from dsagent.instrumentation.spans import Span, request_link, request_spans, step_span

SPANS_PER_BODY = 512
ROUNDS = 7
RESOURCE = {"service.name": "reference", "service.instance.id": "x" * 36}
HOUR_S = 3600
SERIES = 5000


def rate(make: Callable[[], int]) -> float:
    """Items a second of CPU: the median of some rounds, each of at least half a second."""
    rates = []
    for _ in range(ROUNDS):
        began_s, items = time.process_time(), 0
        while time.process_time() - began_s < 0.5:
            items += make()
        rates.append(items / (time.process_time() - began_s))
    return statistics.median(rates)


def to_body(spans: list[Span]) -> int:
    """What OtlpSink does with spans, up to the bytes that are posted."""
    body = items_body([span_bytes(span, ANCHOR) for span in spans], RESOURCE)
    assert body
    return len(spans)


def of_requests() -> int:
    """Requests of 11 spans: their own, queue, decode, its slowest steps with a link each."""
    spans: list[Span] = []
    while len(spans) < SPANS_PER_BODY:
        spans += request_spans(REQUEST, STEPS, parts=PARTS)
    return to_body(spans)


def of_steps(links: int) -> Callable[[], int]:
    names = tuple(f"r{number}" for number in range(links))
    records = [record(name) for name in names]
    served = step(1, names)

    def make() -> int:
        spans = [
            step_span(
                served,
                [request_link(r, share) for r, share in zip(records, served.shares, strict=True)],
            )
            for _ in range(64)
        ]
        return to_body(spans)

    return make


class Encodes(SpanExporter):
    """The SDK's own encoder, a body of 512 spans at a time."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def export(self, spans: list[ReadableSpan]) -> SpanExportResult:  # type: ignore[override]
        self._spans += spans
        if len(self._spans) >= SPANS_PER_BODY:
            assert encode_spans(self._spans).SerializeToString()
            self._spans = []
        return SpanExportResult.SUCCESS


def by_sdk(links: int) -> Callable[[], int]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Encodes()))
    tracer = provider.get_tracer("bench")
    attributes = {f"dsagent.step.attribute{n}": n for n in range(6)}
    context = trace.SpanContext(1, 1, is_remote=False)
    linked = [trace.Link(context, attributes if links > 1 else None) for _ in range(links)]

    def make() -> int:
        for _ in range(SPANS_PER_BODY):
            tracer.start_span("decode step", attributes=attributes, links=linked).end()
        return SPANS_PER_BODY

    return make


def series() -> Store:
    """5,000 time series: numbers by cause, and histograms."""
    store = Store()
    histograms = 63
    for number in range(histograms):
        store.observe(TIME_TO_FIRST_TOKEN, 0.01 * number, {MODEL: f"m{number}"})
    for number in range(SERIES - histograms * (len(TIME_TO_FIRST_TOKEN.bounds) + 3)):
        labels = {MODEL: f"m{number % 63}", "cause": f"c{number // 63 % 63}", "how": "measured"}
        store.increase(REQUEST_CAUSE, 1.5, labels)
    return store


def push(store: Store) -> bytes:
    body: bytes = metrics_request(store.collect(), RESOURCE, 1, 2)[0].SerializeToString()
    return body


def milliseconds(call: Callable[[], object]) -> float:
    costs = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        call()
        costs.append(time.process_time() - began_s)
    return statistics.median(costs) * 1e3


def by_otlp(port: int, queue: QueueOptions | None = None) -> Sink:
    config = otlp_config({}, f"http://127.0.0.1:{port}")
    assert config is not None
    return OtlpSink(config, Limits(), queue=queue)


def by_remote_write(port: int) -> Sink:
    """It pushes by the real clock, as often as the one that hangs lets it."""
    endpoint = remote_write_endpoint(f"http://127.0.0.1:{port}/api/v1/write", HEADERS)
    return RemoteWriteSink(endpoint, Limits(), interval_s=0.05)


def hour(make: Callable[[int], Sink]) -> dict[str, float | int]:
    """What an hour of load leaves in memory when nothing can be delivered; `make` is given the
    port of a back end that takes connections and never answers."""
    logging.disable()
    with hanging_back_end() as port:
        sink = make(port)
        sink.start()
        at: dict[int, int] = {}
        for second, load in enumerate(seconds_of_load(HOUR_S), 1):
            sink.take(load)
            if second % 600 == 0:
                at[second] = resident_bytes()
        sink.stop(1.0)
    status = sink.status()
    assert (status.made or 0) == status.queued + status.sent + status.dropped
    return {
        "mb_after_20_min": round(at[1200] / 1e6, 1),
        "mb_after_40_min": round(at[2400] / 1e6, 1),
        "mb_after_60_min": round(at[3600] / 1e6, 1),
        "made": status.made or 0,
        "queued": status.queued,
        "failed": status.failed,
        "dropped": status.dropped,
    }


STEPS: list[Step] = [step(k, ("kept",), start_ns=2300 * S + k * 25 * MS) for k in range(1, 9)]
REQUEST: RequestRecord = record("kept")
PARTS = {"cpu.runqueue": 1, "decode.compute": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    rates = {
        "requests' spans, at most 1 link": (rate(of_requests), rate(by_sdk(1))),
        "step spans, 16 links": (rate(of_steps(16)), rate(by_sdk(16))),
        "step spans, 64 links": (rate(of_steps(64)), rate(by_sdk(64))),
    }
    store = series()
    scrape_ms = milliseconds(lambda: render(store.collect(), openmetrics=True))
    push_ms = milliseconds(lambda: push(store))
    in_memory = hour(by_otlp)
    with tempfile.TemporaryDirectory() as folder:
        queue = QueueOptions(Path(folder), 32 << 20)
        on_disk = hour(lambda port: by_otlp(port, queue))
    remote_write = hour(by_remote_write)
    if arguments.json:
        document = {
            "spans_per_second": {
                name: {"ours": round(ours), "sdk": round(sdk)}
                for name, (ours, sdk) in rates.items()
            },
            "scrape_5000_series_ms": scrape_ms,
            "otlp_5000_series_ms": push_ms,
            "hanging_hour": {
                "in_memory": in_memory,
                "on_disk": on_disk,
                "remote_write": remote_write,
            },
        }
        print(json.dumps({"otlp": document}))
        return 0
    print(f"{'spans a second of one core, records to bytes':<46}{'ours':>10}{'SDK':>10}")
    for name, (ours, sdk) in rates.items():
        print(f"  {name:<44}{ours:>10,.0f}{sdk:>10,.0f}")
    print(f"{SERIES} series as OpenMetrics text: {scrape_ms:.1f} ms; as OTLP: {push_ms:.1f} ms")
    print("an hour at 50 steps/s, batch 16, the back end hanging:")
    for what, found in (
        ("OTLP, in memory", in_memory),
        ("OTLP, 32 MiB on disk", on_disk),
        ("remote-write", remote_write),
    ):
        memory = " ".join(f"{found[f'mb_after_{m}_min']:.0f}" for m in (20, 40, 60))
        print(
            f"  {what:<22} {memory} MB resident after 20, 40, 60 min; "
            f"{found['made']:,} made, {found['queued']:,} queued, {found['failed']:,} failed, "
            f"{found['dropped']:,} dropped"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
