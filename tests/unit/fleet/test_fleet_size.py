"""Sizing follows from what was measured by the rules it names; nothing is made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.fleet.measured import Measured, expected_line, load_measured, parse_measured
from dsagent.agent.fleet.size import Fleet, figure, size
from dsagent.agent.metrics.cardinality import estimate

PAGE = Path(__file__).resolve().parents[3] / "docs" / "fleet.md"
ROUND = replace(
    load_measured(),
    requests_per_s=10.0,
    kept_ratio=0.01,
    series=300,
    points_per_push=100.0,
    spans_per_kept_request=20.0,
    span_raw_bytes=500.0,
    span_wire_bytes=100.0,
    logs_per_request=0.001,
    log_wire_bytes=300.0,
    pushes_per_s=0.2,
    push_wire_bytes=1500.0,
    metrics_wire_bytes_per_s=500.0,
    rolled_bytes_per_s=1000.0,
    hourly_bytes=10_000,
)


def values(one: Measured, fleet: Fleet) -> dict[tuple[str, str], float]:
    return {(line.who, line.what): line.value for line in size(one, fleet)}


def test_the_arithmetic() -> None:
    found = values(ROUND, Fleet(10_000))
    assert found["the pods", "time series"] == 3_000_000
    assert found["the pods", "samples, scraped"] == 200_000
    assert found["the pods", "points by OTLP"] == 100_000
    assert found["the pods", "spans"] == pytest.approx(20_000)
    assert found["the pods", "log records"] == pytest.approx(100)
    # 20,000 spans of 100 bytes, 100 records of 300, 500 bytes of metrics from each pod
    assert found["the pods", "OTLP on the wire"] == pytest.approx(2 + 0.03 + 5)
    # 10,000 pods × 300 bytes/s, and none of it through the Collector
    assert found["the pods", "profiles on the wire"] == pytest.approx(3)
    assert found["Collector", "cores, one of them spare"] == 7 + 1  # 1.33 + 5 + 0.01, rounded up
    assert found["Prometheus", "disk for 15 days"] == pytest.approx(200_000 * 2 * 15 * 86400 / 1e12)
    assert found["Mimir, instead", "ingesters' cores, each with 2.5 GB"] == 30
    assert found["Tempo", "distributors of 2 cores, 2 GB"] == 1  # 10 MB/s
    assert found["Tempo", "live-stores of 1 core, 4 to 20 GB"] == 2
    assert found["the store", "raw, 7 days"] == pytest.approx(10_000 * 1000 * 7 * 86400 / 1e12)


def test_load_moves_spans_and_the_store_but_no_series() -> None:
    before, after = values(ROUND, Fleet(100)), values(ROUND, Fleet(100, requests_per_s=50))
    for what in ("spans", "log records", "rolled into the store"):
        assert after["the pods", what] == pytest.approx(5 * before["the pods", what])
    assert after["the pods", "time series"] == before["the pods", "time series"]
    assert values(ROUND, Fleet(100, kept_ratio=1))["the pods", "spans"] == pytest.approx(20_000)
    assert values(ROUND, Fleet(100, kept_ratio=0))["the pods", "spans"] == 0


def test_every_line_says_its_rule_and_source() -> None:
    for line in size(load_measured(), Fleet(10_000)):
        assert line.rule
        assert line.source == "measured" or line.source.startswith("https://")
        assert line.json()["value"] >= 0


def test_what_the_agent_says_at_its_start_is_near_what_was_measured() -> None:
    """Never less: an estimate of series is for who has to pay for them."""
    measured = load_measured()
    assert measured.series <= estimate(0, has_slo=False) <= 2 * measured.series
    assert f"{measured.spans_per_kept_request:.0f} spans" in expected_line()


def test_the_page_shows_the_figures_that_come_with_it() -> None:
    text = PAGE.read_text()
    for line in size(load_measured(), Fleet(10_000)):
        row = f"| {line.who} | {line.what} | {figure(line.value)} {line.unit}".rstrip()
        assert row in text, f"docs/fleet.md does not show: {row}; run scripts/docs.py"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (4760000, "4,760,000"),
        (0.1834, "0.183"),
        (12.34, "12.3"),
        (1.0, "1"),
        (99.96, "100"),
    ],
)
def test_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "nonsense", '{"load": 1}', "[" * 100_000],
)
def test_what_is_no_measurement_is_one_clear_line(text: str) -> None:
    with pytest.raises(DsagentError, match="fleet measure") as caught:
        parse_measured("x.json", text.encode())
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "7", True, None])
def test_a_figure_that_cannot_be_is_refused(value: object) -> None:
    document = load_measured().json() | {"series": value}
    with pytest.raises(DsagentError, match="series"):
        parse_measured("x.json", json.dumps(document).encode())
