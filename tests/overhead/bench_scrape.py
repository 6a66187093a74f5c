"""A scrape of 5,000 series over HTTP: what Prometheus waits for, while the agent takes a load.

The sink that `attach --prometheus` uses, filled by accounts of many models and causes; a client on
the same machine that opens a connection for each scrape, as a Prometheus that has been restarted
does. Beside a still agent, one that takes a batch of 50 steps and 8 requests before each scrape.

    python tests/overhead/bench_scrape.py [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from made import account, batch
from otlp_load import seconds_of_load

from dsagent.agent.attribution.account import CAUSES, Part
from dsagent.agent.sinks.base import Explained
from dsagent.agent.sinks.prometheus import PrometheusSink
from dsagent.agent.slo import Limits

SERIES = 5000
SCRAPES = 200
ACCEPT = {
    "text": "text/plain;version=0.0.4",
    "OpenMetrics": "application/openmetrics-text;version=1.0.0",
}


def of_model(number: int) -> Explained:
    """One request, with a part of each cause, each known in each way: some 200 series."""
    one = account(f"r{number}", model=f"m{number}")
    share_ns = one.e2e_ns // (3 * len(CAUSES))
    parts = tuple(
        Part(cause, share_ns, how)
        for cause in CAUSES
        for how in ("measured", "modelled", "assumed")
    )
    rest_ns = one.e2e_ns - share_ns * len(parts)
    return batch(accounts=(replace(one, parts=parts, unattributed_ns=rest_ns),))


def scrape(port: int, accept: str) -> tuple[float, int, int]:
    """Milliseconds until the last byte, series in it, bytes."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": ACCEPT[accept]}
    )
    began_s = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as response:
        body = response.read()
    took_ms = (time.perf_counter() - began_s) * 1e3
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    return took_ms, series, len(body)


def filled() -> PrometheusSink:
    sink = PrometheusSink("127.0.0.1", 0, Limits())
    sink.start()
    for number in itertools.count():
        sink.take(of_model(number))
        if scrape(sink.port, "text")[1] >= SERIES:
            return sink
    raise AssertionError


def times(sink: PrometheusSink, accept: str, before: Callable[[], None]) -> dict[str, float]:
    took = []
    for _ in range(SCRAPES):
        before()
        took.append(scrape(sink.port, accept)[0])
    ordered = sorted(took)
    return {
        "p50_ms": statistics.median(ordered),
        "p99_ms": ordered[-1 - len(ordered) // 100],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    sink = filled()
    loads: Iterator[Explained] = itertools.cycle(list(seconds_of_load(60)))
    try:
        _, series, size_bytes = scrape(sink.port, "OpenMetrics")
        found = {
            (accept, what): times(sink, accept, before)
            for accept in ACCEPT
            for what, before in (
                ("still", lambda: None),
                ("under load", lambda: sink.take(next(loads))),
            )
        }
    finally:
        sink.stop(5.0)
    if arguments.json:
        document = [
            {"format": accept, "agent": what, **figures}
            for (accept, what), figures in found.items()
        ]
        print(json.dumps({"scrape": document, "series": series, "bytes": size_bytes}))
        return 0
    print(f"{series} series, {size_bytes / 1e3:.0f} kB, {SCRAPES} scrapes each; the bar is 50 ms")
    print(f"{'format':<14}{'the agent':<14}{'p50 ms':>8}{'p99 ms':>8}")
    for (accept, what), figures in found.items():
        print(f"{accept:<14}{what:<14}{figures['p50_ms']:>8.1f}{figures['p99_ms']:>8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
