"""A real Prometheus scrapes the sink and stores the exemplar with the trace id."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import MS, account, batch, record

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.sinks.prometheus import PrometheusSink
from dsagent.agent.slo import Limit, Limits

DEADLINE_S = 40.0


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    made = PrometheusSink("127.0.0.1", 0, Limits((Limit("*", ttft_ns=450 * MS),)))
    made.start()
    yield made
    made.stop(5.0)


@pytest.fixture
def prometheus(sink: PrometheusSink, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes `sink` every second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus here (apt install prometheus)")
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "dsagent", "static_configs": [{"targets": [f"127.0.0.1:{sink.port}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(
            [
                binary,
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=log,
        )
    yield address
    child.terminate()
    child.wait(10)


def ask(address: str, path: str, **query: str) -> list[Any]:
    """The `data` of an API answer; empty until Prometheus is up."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            data = json.load(response)["data"]
    except OSError:
        return []
    result = data["result"] if isinstance(data, dict) else data
    assert isinstance(result, list)
    return result


def until(address: str, path: str, **query: str) -> list[Any]:
    """Asks until there is something to see."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := ask(address, path, **query):
            return found
        time.sleep(0.2)
    raise AssertionError(f"{path} {query} stayed empty")


def test_prometheus_stores_the_exemplar(sink: PrometheusSink, prometheus: str) -> None:
    now_ns, unix_ns = time.monotonic_ns(), time.time_ns()
    kept = account("kept", sampled=True, start_ns=now_ns - 1000 * MS)
    anchor = ClockAnchor(now_ns, unix_ns, 1000)
    sink.take(replace(batch(now_ns, accounts=(kept,)), anchor=anchor))
    family = "gen_ai_server_time_to_first_token_seconds"
    window = {"start": str(unix_ns / 1e9 - 600), "end": str(unix_ns / 1e9 + 600)}
    (series,) = until(prometheus, "query_exemplars", query=f"{family}_bucket", **window)
    (exemplar,) = series["exemplars"]
    assert exemplar["labels"]["trace_id"] == f"{record('kept').trace_id:032x}"
    assert float(exemplar["value"]) == pytest.approx(0.3)
    # The configured limit is a bound, so the share of good requests is exact.
    (good,) = until(prometheus, "query", query=f'{family}_bucket{{le="0.45"}}')
    assert good["value"][1] == "1"
    (cause,) = until(
        prometheus, "query", query="topk(1, sum by (cause) (dsagent_request_cause_seconds_total))"
    )
    assert cause["metric"] == {"cause": "cpu.runqueue"}
    assert sink.status().sent >= 1
