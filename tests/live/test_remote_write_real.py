"""A real Prometheus takes native histograms and exemplars by remote-write."""

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
from made import until as happens

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.sinks.otlp_config import remote_write_endpoint
from dsagent.agent.sinks.remote_write import HEADERS, RemoteWriteSink
from dsagent.agent.slo import Limits

FAMILY = "gen_ai_server_time_to_first_token_seconds"


def ask(address: str, path: str, **query: str) -> list[Any]:
    """The result of an API answer; empty while there is none."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            data = json.load(response)["data"]
    except OSError:
        return []
    found: list[Any] = data["result"] if isinstance(data, dict) else data
    return found


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus here (apt install prometheus)")
    (tmp_path / "prometheus.yml").write_text("{}")
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
                "--web.enable-remote-write-receiver",
                "--enable-feature=exemplar-storage,native-histograms",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        happens(lambda: bool(ask(address, "query", query="vector(1)")))
        yield address
    finally:
        child.terminate()
        child.wait(20)


def test_prometheus_takes_native_histograms(prometheus: str) -> None:
    now_ns, unix_ns = time.monotonic_ns(), time.time_ns()
    ttfts_ms = [300 + 7 * number for number in range(100)]
    accounts = tuple(
        account(
            f"r{number}",
            sampled=number % 50 == 0,
            start_ns=now_ns - 2000 * MS,
            first_sent_ns=now_ns - 2000 * MS + ttft_ms * MS,
            sent_ns=now_ns - (100 - number) * MS,
        )
        for number, ttft_ms in enumerate(ttfts_ms)
    )
    endpoint = remote_write_endpoint(f"http://{prometheus}/api/v1/write", HEADERS)
    sink = RemoteWriteSink(endpoint, Limits(), interval_s=0.2)
    sink.start()
    batch_now = batch(now_ns, accounts=accounts)
    sink.take(replace(batch_now, anchor=ClockAnchor(now_ns, unix_ns, 1000)))
    happens(lambda: sink.status().acknowledged > 0)
    sink.stop(10.0)
    status = sink.status()
    assert status.acknowledged == status.made, status.reason
    (count,) = ask(prometheus, "query", query=f"histogram_count({FAMILY})")
    assert float(count["value"][1]) == 100
    assert count["metric"]["job"] == "reference"
    assert len(count["metric"]["instance"]) == 36
    (total,) = ask(prometheus, "query", query=f"histogram_sum({FAMILY})")
    assert float(total["value"][1]) == pytest.approx(sum(ttfts_ms) / 1e3)
    # The buckets are half a per cent wide: no classic ones know it so well.
    for quantile in (0.5, 0.9):
        (found,) = ask(prometheus, "query", query=f"histogram_quantile({quantile}, {FAMILY})")
        exact_s = sorted(ttfts_ms)[round(quantile * 100) - 1] / 1e3
        assert float(found["value"][1]) == pytest.approx(exact_s, rel=0.02)
    (requests,) = ask(prometheus, "query", query="dsagent_requests_total")
    assert requests["value"][1] == "100"
    window = {"start": str(unix_ns / 1e9 - 600), "end": str(unix_ns / 1e9 + 600)}
    (series,) = ask(prometheus, "query_exemplars", query=FAMILY, **window)
    kept = {f"{record(name).trace_id:032x}" for name in ("r0", "r50")}
    assert {e["labels"]["trace_id"] for e in series["exemplars"]} == kept


def test_a_prometheus_without_the_receiver_is_said(tmp_path: Path) -> None:
    endpoint = remote_write_endpoint("http://127.0.0.1:1/api/v1/write", HEADERS)
    sink = RemoteWriteSink(endpoint, Limits())
    sink.start()
    sink.take(batch(accounts=(account(),)))
    sink.stop(0.5)
    status = sink.status()
    assert status.made is not None
    assert status.failed + status.dropped == status.made > 0
    assert "refused" in status.reason
