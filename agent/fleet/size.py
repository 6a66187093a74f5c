"""From what one pod sends to what a fleet's back ends need. Pure.

The rules are the back ends' own published ones, each with its address; they are where to begin, not
what to order. What a back end publishes no rule for is not made up here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dsagent.agent.fleet.measured import Measured

DAY_S = 86_400
COLLECTOR = "https://help.splunk.com (Collector: sizing and scaling)"
PROMETHEUS = "https://prometheus.io/docs/prometheus/latest/storage/#operational-aspects"
MIMIR = "https://grafana.com/docs/mimir/latest/manage/run-production-environment/planning-capacity/"
VICTORIA = "https://docs.victoriametrics.com (Sample size calculations)"
TEMPO = "https://grafana.com/docs/tempo/latest/set-up-for-tracing/setup-tempo/plan/size/"
CLICKHOUSE = "https://clickhouse.com/docs/clickstack/self-configured/architecture"
MEASURED = "measured"
SPANS_PER_CORE, POINTS_PER_CORE, LOGS_PER_CORE = 15_000, 20_000, 10_000
GB_PER_CORE = 2
SAMPLE_BYTES = 2.0  # "1-2"
VICTORIA_SAMPLE_BYTES = 0.4
MIMIR_SAMPLES_PER_CORE, MIMIR_SERIES_PER_CORE, MIMIR_REPLICAS = 25_000, 300_000, 3
DISTRIBUTOR_BYTES_PER_S, LIVE_STORE_BYTES_PER_S, QUERIER_BYTES_PER_S = 10e6, 6e6, 1e6
CLICKHOUSE_RATIO = 10.0  # "at least 10x"


@dataclass(frozen=True, slots=True)
class Fleet:
    pods: int
    requests_per_s: float | None = None  # of a pod; None: as measured
    kept_ratio: float | None = None  # of the requests; None: as measured
    scrape_s: float = 15.0
    push_s: float = 10.0
    metrics_days: float = 15.0
    traces_days: float = 14.0
    raw_days: float = 7.0
    hourly_days: float = 90.0


@dataclass(frozen=True, slots=True)
class Line:
    """`what` of `who` is `value` in `unit`, by `rule`, which `source` says."""

    who: str
    what: str
    value: float
    unit: str
    rule: str
    source: str

    def json(self) -> dict[str, Any]:
        return {
            "who": self.who,
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "rule": self.rule,
            "source": self.source,
        }


def size(one: Measured, fleet: Fleet) -> list[Line]:
    """What the pods send, then what takes it."""
    factor = 1.0
    if fleet.requests_per_s is not None:
        factor = fleet.requests_per_s / one.requests_per_s
    kept = one.kept_ratio if fleet.kept_ratio is None else fleet.kept_ratio
    requests = fleet.pods * one.requests_per_s * factor
    spans = requests * kept * one.spans_per_kept_request
    logs = requests * one.logs_per_request
    series = float(fleet.pods * one.series)
    samples = series / fleet.scrape_s
    points = fleet.pods * one.points_per_push / fleet.push_s
    raw_spans = spans * one.span_raw_bytes
    wire = spans * one.span_wire_bytes + logs * one.log_wire_bytes
    wire += fleet.pods * one.metrics_wire_bytes_per_s
    profiles = fleet.pods * one.pushes_per_s * one.push_wire_bytes
    rolled = fleet.pods * one.rolled_bytes_per_s * factor
    hourly = fleet.pods * one.hourly_bytes * 24.0
    cores = spans / SPANS_PER_CORE + points / POINTS_PER_CORE + logs / LOGS_PER_CORE
    gateways = math.ceil(cores) + 1
    pods = "the pods"
    return [
        Line(pods, "time series", series, "", "pods × series", MEASURED),
        Line(pods, "samples, scraped", samples, "/s", f"every {fleet.scrape_s:g} s", MEASURED),
        Line(pods, "points by OTLP", points, "/s", f"every {fleet.push_s:g} s", MEASURED),
        Line(pods, "spans", spans, "/s", "requests × share kept × spans of one", MEASURED),
        Line(pods, "log records", logs, "/s", "requests × records of one", MEASURED),
        Line(pods, "OTLP on the wire", wire / 1e6, "MB/s", "bodies, gzip", MEASURED),
        Line(pods, "profiles on the wire", profiles / 1e6, "MB/s", "with --pyroscope", MEASURED),
        Line(pods, "rolled into the store", rolled / 1e6, "MB/s", "Parquet, zstd", MEASURED),
        Line(
            *("Collector", "cores, one of them spare", float(gateways), ""),
            "15,000 spans/s, 20,000 points/s or 10,000 records/s a core",
            COLLECTOR,
        ),
        Line("Collector", "memory", gateways * GB_PER_CORE, "GB", "2 GB a core", COLLECTOR),
        Line(
            *("Prometheus", f"disk for {fleet.metrics_days:g} days"),
            samples * SAMPLE_BYTES * fleet.metrics_days * DAY_S / 1e12,
            *("TB", "2 bytes a sample, of the 1 to 2 documented; for each replica", PROMETHEUS),
        ),
        Line(
            *("Mimir, instead", "distributors' cores, each with 1 GB"),
            float(math.ceil(samples / MIMIR_SAMPLES_PER_CORE)),
            *("", "25,000 samples/s a core", MIMIR),
        ),
        Line(
            *("Mimir, instead", "ingesters' cores, each with 2.5 GB"),
            float(math.ceil(series * MIMIR_REPLICAS / MIMIR_SERIES_PER_CORE)),
            *("", "300,000 series a core, each series three times", MIMIR),
        ),
        Line(
            *("VictoriaMetrics, instead", f"disk for {fleet.metrics_days:g} days"),
            samples * VICTORIA_SAMPLE_BYTES * fleet.metrics_days * DAY_S / 1e12,
            *("TB", "0.4 bytes a sample, what its customers see; for each replica", VICTORIA),
        ),
        Line(
            *("Tempo", "distributors of 2 cores, 2 GB"),
            float(math.ceil(raw_spans / DISTRIBUTOR_BYTES_PER_S)),
            *("", "one for each 10 MB/s received", TEMPO),
        ),
        Line(
            *("Tempo", "live-stores of 1 core, 4 to 20 GB"),
            float(math.ceil(raw_spans / LIVE_STORE_BYTES_PER_S)),
            *("", "one for each 6 MB/s, of the 6 to 10 documented", TEMPO),
        ),
        Line(
            *("Tempo", "queriers"),
            float(math.ceil(raw_spans / QUERIER_BYTES_PER_S)),
            *("", "one for each 1 MB/s, of the 1 to 2 documented", TEMPO),
        ),
        Line(
            *("ClickHouse, instead", f"disk for {fleet.traces_days:g} days"),
            raw_spans * fleet.traces_days * DAY_S / CLICKHOUSE_RATIO / 1e12,
            *("TB", "a tenth of what is received; for each replica", CLICKHOUSE),
        ),
        Line(
            *("the store", f"raw, {fleet.raw_days:g} days"),
            rolled * fleet.raw_days * DAY_S / 1e12,
            *("TB", "rolled × days, if every pod records", MEASURED),
        ),
        Line(
            *("the store", f"hourly, {fleet.hourly_days:g} days"),
            hourly * fleet.hourly_days / 1e12,
            *("TB", "an hour's × 24 × days", MEASURED),
        ),
    ]


def figure(value: float) -> str:
    """Three digits, for people."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
