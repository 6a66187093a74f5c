"""Pushes metrics to Prometheus' remote-write receiver, with native histograms.

A scrape of Prometheus 2.x cannot carry those in text; a push can. Version 0.1.0 of the protocol:
prompb.WriteRequest, written by hand (the agent has no class for it), in Snappy's block format.
Items are time series.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.metrics.aggregate import Aggregate
from dsagent.agent.metrics.exponential import ExponentialPoint
from dsagent.agent.metrics.metric import prometheus_label
from dsagent.agent.metrics.series import Exemplar, Family, HistogramPoint, Labels
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.resource import resource_attributes
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.otlp_config import Endpoint
from dsagent.agent.sinks.otlp_delivery import Delivery
from dsagent.agent.sinks.otlp_wire import field, varint
from dsagent.agent.sinks.outbox import Body, Pulse
from dsagent.agent.slo import Limits
from dsagent.instrumentation import names

INTERVAL_S = 10.0
HEADERS = {
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
MAX_SCHEMA, MIN_SCHEMA = 8, -4  # of Prometheus: what is finer is made coarser
ZERO_THRESHOLD = 2.0**-128  # the one Prometheus itself uses
_DOUBLE = struct.Struct("<d")
_LITERAL_BYTES = 1 << 16

Pairs = tuple[tuple[str, str], ...]


class RemoteWriteSink:
    """See Sink."""

    name = "remote_write"

    def __init__(
        self,
        endpoint: Endpoint,
        limits: Limits,
        *,
        sampler: Sampler | None = None,
        resource: Mapping[str, str] | None = None,
        slo: SloFigures | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`endpoint`: remote_write_endpoint()'s; the rest as for OtlpSink."""
        self._overrides = dict(resource or {})
        self._aggregate = Aggregate(
            limits, sampler or Sampler(), self._overrides, slo, exponential=True
        )
        self._lock = threading.Lock()
        self._anchor: ClockAnchor | None = None
        self._whose: Pairs = ()
        self._pushed: dict[tuple[str, Labels], int] = {}  # exemplars up to when, by series
        pulse = Pulse(self._body, interval_s)
        self._way = Delivery("metrics", endpoint, pulse, name=self.name)

    def start(self) -> None:
        self._way.start()

    def take(self, batch: Explained) -> None:
        with self._lock:
            if self._anchor is None:
                resource = resource_attributes(batch.target, self._overrides)
                self._whose = (
                    ("instance", str(resource[names.SERVICE_INSTANCE_ID])),
                    ("job", str(resource[names.SERVICE_NAME])),
                )
            self._anchor = batch.anchor
            self._aggregate.add(batch)

    def status(self) -> SinkStatus:
        return self._way.ledger.status()

    def stop(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        self._way.begin_to_end(deadline)
        self._way.end(deadline)

    def _body(self) -> Body | None:
        with self._lock:
            anchor, families = self._anchor, self._aggregate.collect()
        if anchor is None:
            return None  # nothing has come yet
        now_ms = anchor.unix(time.monotonic_ns()) // 1_000_000
        series = list(time_series(families, self._whose, now_ms, self._pushed))
        self._way.ledger.made(len(series))
        return Body(snappy(b"".join([field(1, one) for one in series])), len(series))


def time_series(
    families: Iterable[Family], whose: Pairs, now_ms: int, pushed: dict[tuple[str, Labels], int]
) -> Iterator[bytes]:
    """Each as a TimeSeries message. Histograms are native ones, without the classic buckets, with
    the exemplars that are newer than `pushed` says, and not before the series' second push:
    Prometheus looks at exemplars first, and drops those of a series that it does not know yet."""
    at = varint(now_ms)
    for family in families:
        name = family.metric.prometheus
        for number in family.numbers:
            sample = b"\x09" + _DOUBLE.pack(number.value) + b"\x10" + at
            yield _labels(name, number.labels, whose) + field(2, sample)
        for point in family.histograms:
            if point.exponential is None or point.exponential.scale < MIN_SCHEMA:
                continue  # a range that no schema of Prometheus holds
            series = (name, point.labels)
            since_ns = pushed.setdefault(series, -1)
            new = [e for e in point.exemplars if e is not None and e.unix_ns > since_ns >= 0]
            new.sort(key=lambda e: e.unix_ns)  # it takes them only in the order of time
            pushed[series] = new[-1].unix_ns if new else max(since_ns, 0)
            exemplars = [field(3, _exemplar(each)) for each in new]
            yield b"".join(
                [
                    _labels(name, point.labels, whose),
                    *exemplars,
                    field(4, _histogram(point, point.exponential, now_ms)),
                ]
            )


def _labels(name: str, labels: Labels, whose: Pairs) -> bytes:
    pairs = [("__name__", name), *whose]
    pairs += [(prometheus_label(label), value) for label, value in labels]
    return b"".join([field(1, _label(*pair)) for pair in sorted(pairs)])


def _label(name: str, value: str) -> bytes:
    return field(1, name.encode()) + field(2, value.encode("utf-8", "replace"))


def _exemplar(exemplar: Exemplar) -> bytes:
    ids = (
        _label("trace_id", f"{exemplar.trace_id:032x}"),
        _label("span_id", f"{exemplar.span_id:016x}"),
    )
    labels = b"".join([field(1, label) for label in ids])
    time_ms = varint(exemplar.unix_ns // 1_000_000)
    return labels + b"\x11" + _DOUBLE.pack(exemplar.value) + b"\x18" + time_ms


def _histogram(point: HistogramPoint, exponential: ExponentialPoint, now_ms: int) -> bytes:
    schema, first, counts = buckets(exponential)
    pieces = [
        b"\x08" + varint(sum(point.counts)),
        b"\x19" + _DOUBLE.pack(point.sum),
        b"\x20" + varint(_zigzag(schema)),
        b"\x29" + _DOUBLE.pack(ZERO_THRESHOLD),
        b"\x30" + varint(exponential.zero_count),
    ]
    if counts:
        deltas = [counts[0], *(b - a for a, b in pairwise(counts))]
        pieces.append(field(11, b"\x08" + varint(_zigzag(first)) + b"\x10" + varint(len(counts))))
        pieces.append(field(12, b"".join([varint(_zigzag(delta)) for delta in deltas])))
    pieces.append(b"\x78" + varint(now_ms))
    return b"".join(pieces)


def buckets(point: ExponentialPoint) -> tuple[int, int, list[int]]:
    """The schema, the first bucket's index, and counts, as Prometheus has them: its bucket i ends
    where OpenTelemetry's bucket i - 1 does."""
    by = max(0, point.scale - MAX_SCHEMA)
    if not point.counts:
        return point.scale - by, 0, []
    first = point.offset >> by
    counts = [0] * ((point.offset + len(point.counts) - 1 >> by) - first + 1)
    for index, count in enumerate(point.counts, point.offset):
        counts[(index >> by) - first] += count
    return point.scale - by, first + 1, counts


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else (-number << 1) - 1


def snappy(data: bytes) -> bytes:
    """Snappy's block format without its compression: a receiver cannot tell, and the bodies are
    small. An encoder in Python would cost more than it saves."""
    pieces = [varint(len(data))]
    for start in range(0, len(data), _LITERAL_BYTES):
        chunk = data[start : start + _LITERAL_BYTES]
        pieces += [b"\xf4", (len(chunk) - 1).to_bytes(2, "little"), chunk]
    return b"".join(pieces)
