"""A real VictoriaMetrics takes our metrics by OTLP, and gives back what we sent: each number, and
histograms, exponential ones too."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import MS, TARGET, account, batch, step, until
from otlp_back_ends import free_port

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.aggregate import Aggregate
from dsagent.agent.metrics.metric import prometheus_label
from dsagent.agent.resource import resource_attributes
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.base import Explained
from dsagent.agent.sinks.otlp import OtlpSink
from dsagent.agent.sinks.otlp_config import otlp_config
from dsagent.agent.slo import Limits

# Where `make setup` puts Debian 13's: that of Debian 12 does not take OTLP.
UNPACKED = Path(__file__).resolve().parents[2] / "build" / "debian13" / "victoria-metrics"
TTFTS_MS = [300 + 7 * number for number in range(100)]
OF_RESOURCE = {prometheus_label(name) for name in resource_attributes(TARGET, {})}


def ask(address: str, query: str) -> list[dict[str, Any]]:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as response:
        found: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return found


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture
def victoria(tmp_path: Path) -> Iterator[str]:
    binary = str(UNPACKED) if UNPACKED.exists() else shutil.which("victoria-metrics")
    if binary is None:
        pytest.skip("no VictoriaMetrics here (make setup)")
    address = f"127.0.0.1:{free_port()}"
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(
            [
                binary,
                f"-httpListenAddr={address}",
                f"-storageDataPath={tmp_path}/data",
                "-opentelemetry.usePrometheusNaming",
                "-search.latencyOffset=0s",  # asked at once
                "-memory.allowedBytes=64MB",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: child.poll() is not None or is_healthy(address))
        assert child.poll() is None, (tmp_path / "log").read_text()
        yield address
    finally:
        child.terminate()
        child.wait(20)


def load() -> Explained:
    now_ns = time.monotonic_ns()
    accounts = tuple(
        account(
            f"r{number}",
            start_ns=now_ns - 2000 * MS,
            first_sent_ns=now_ns - 2000 * MS + ttft_ms * MS,
            sent_ns=now_ns - (100 - number) * MS,
        )
        for number, ttft_ms in enumerate(TTFTS_MS)
    )
    steps = tuple(step(number, start_ns=now_ns - number * 20 * MS) for number in range(1, 24))
    made = batch(now_ns, accounts=accounts, steps=steps)
    return replace(made, anchor=ClockAnchor(now_ns, time.time_ns(), 1000))


def push(address: str, histograms: str, sent: Explained) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://{address}/opentelemetry/v1/metrics",
        "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": histograms,
    }
    config = otlp_config(environ, None)
    assert config is not None
    sink = OtlpSink(config, Limits())
    sink.start()
    sink.take(sent)
    sink.stop(20.0)
    status = sink.status()
    assert status.acknowledged == status.made, status
    assert (status.made or 0) > 0
    # What it took shows in queries some seconds later, unless it is asked to.
    urllib.request.urlopen(f"http://{address}/internal/force_flush", timeout=10).close()


def numbers(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series that VictoriaMetrics holds, without the labels of the resource."""
    return {
        (
            each["metric"]["__name__"],
            frozenset(
                (name, value)
                for name, value in each["metric"].items()
                if name not in OF_RESOURCE | {"__name__"}
            ),
        ): float(each["value"][1])
        for each in ask(address, '{__name__!=""}')
    }


@pytest.mark.parametrize(
    "histograms", ["explicit_bucket_histogram", "base2_exponential_bucket_histogram"]
)
def test_what_was_sent_is_what_comes_back(victoria: str, histograms: str) -> None:
    sent = load()
    push(victoria, histograms, sent)
    until(lambda: bool(ask(victoria, "dsagent_requests_total")))
    held = numbers(victoria)
    aggregate = Aggregate(Limits(), Sampler(), {})
    aggregate.add(sent)
    compared = 0
    for family in aggregate.collect():
        metric = family.metric
        if metric is catalog.TARGET_INFO:  # the resource, in OTLP
            continue
        for point in family.numbers:
            labels = frozenset((prometheus_label(n), v) for n, v in point.labels)
            assert held[metric.prometheus, labels] == pytest.approx(point.value), metric.name
            compared += 1
        for histogram in family.histograms:
            labels = frozenset((prometheus_label(n), v) for n, v in histogram.labels)
            observed = sum(histogram.counts)
            assert held[f"{metric.prometheus}_count", labels] == observed, metric.name
            assert held[f"{metric.prometheus}_sum", labels] == pytest.approx(histogram.sum)
            compared += 2
    assert compared > 30


def test_its_quantiles_of_an_exponential_histogram_are_those_of_the_requests(
    victoria: str,
) -> None:
    push(victoria, "base2_exponential_bucket_histogram", load())
    family = catalog.TIME_TO_FIRST_TOKEN.prometheus
    until(lambda: bool(ask(victoria, f"{family}_count")))
    for quantile in (0.5, 0.9):
        query = f"histogram_quantile({quantile}, sum by (vmrange) ({family}_bucket))"
        (found,) = ask(victoria, query)
        exact_s = sorted(TTFTS_MS)[round(quantile * 100) - 1] / 1e3
        assert float(found["value"][1]) == pytest.approx(exact_s, rel=0.02)
