"""Measures what one pod sends: the bundled engine under a load, an agent on it, and at the other
end of each of its sinks somebody who counts. Nothing is simulated but the people.

Two agents' worth of traces are sent: one as sampled by default, for the share that is kept, and one
that keeps all, for what a kept request weighs; a minute keeps too few for that.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dsagent.agent.errors import DsagentError
from dsagent.agent.fleet.folder import FolderStore
from dsagent.agent.fleet.layout import HOUR_NS
from dsagent.agent.fleet.measured import Measured
from dsagent.agent.fleet.policy import DAY_NS, Policy
from dsagent.agent.fleet.retain import retain
from dsagent.agent.fleet.roll import Rolled, roll
from dsagent.agent.fleet.weighing import Weighed, weighing_collector
from dsagent.agent.host.children import Child
from dsagent.agent.host.target import resolve
from dsagent.agent.metrics.cardinality import estimate
from dsagent.agent.session.loop import Session
from dsagent.agent.session.overhead import give_way
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.otlp import OtlpSink
from dsagent.agent.sinks.otlp_config import OtlpConfig, otlp_config, pyroscope_endpoint
from dsagent.agent.sinks.prometheus import PrometheusSink
from dsagent.agent.sinks.pyroscope import HEADERS, PATH, PyroscopeSink
from dsagent.agent.sinks.recording import RecordingSink
from dsagent.agent.slo import Limits

if TYPE_CHECKING:
    from dsagent.agent.facts import Target

READY_S = 120.0
SCRAPE_S = 5.0
LOAD = "six people chatting, one asking for summaries of long texts, no trace context"
MAX_OVERHEAD_RATIO = 0.05  # nothing is stepped down: a pod sends what its sources find


class _KeepsAll(OtlpSink):
    name = "otlp-all"


class _Scraper:
    """Asks for /metrics as Prometheus does, and keeps the last answer's size."""

    def __init__(self, sink: PrometheusSink) -> None:
        self._sink = sink
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="scraper", daemon=True)
        self.series = 0
        self.bytes = 0
        self.failed = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(30)

    def _work(self) -> None:
        while not self._end.wait(SCRAPE_S):
            try:
                self._scrape()
            except OSError:
                self.failed += 1

    def _scrape(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._sink.port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read()
        finally:
            connection.close()
        self.bytes = len(page)
        self.series = sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))


def measure(
    model: str, duration_s: float, *, seed: int = 0, tell: Callable[[str], None]
) -> Measured:
    """Raises DsagentError: the engine or the load does not run here."""
    with (
        tempfile.TemporaryDirectory(prefix="dsagent-measure-") as folder,
        weighing_collector() as usual,
        weighing_collector() as everything,
    ):
        tell(f"starting the bundled engine with {model} on a free port")
        arguments = ["--model", model, "--host", "127.0.0.1", "--port", "0"]
        with Child("dsagent.instrumentation.reference", arguments) as engine:
            url = engine.wait_for(r"listening on (http://\S+)", READY_S).group(1)
            target = resolve(engine.pid)
            recording = Path(folder) / "recording"
            prometheus = PrometheusSink("127.0.0.1", 0, Limits())
            scraper = _Scraper(prometheus)
            people: list[Child] = []

            def send_load() -> None:
                tell(f"{duration_s:.0f} s of load: {LOAD}")
                load = [url, "--model", model, "--duration", str(duration_s), "--seed", str(seed)]
                people.append(Child("dsagent.agent.fleet.people", load))
                people[0].on_exit(session.stop)
                give_way()
                scraper.start()

            address = f"http://127.0.0.1:{usual.port}"
            session = Session(
                target,
                [
                    RecordingSink(recording, 4 << 30),
                    prometheus,
                    OtlpSink(_config(usual.port), Limits()),
                    PyroscopeSink(pyroscope_endpoint(address, PATH, HEADERS)),
                    _KeepsAll(_config(everything.port), Limits(), sampler=Sampler(rate=1.0)),
                ],
                max_overhead_ratio=MAX_OVERHEAD_RATIO,
                has_profiles=True,
                on_attached=send_load,
            )
            try:
                session.run()
            finally:
                scraper.stop()
                for child in people:
                    child.stop()
        if not people or people[0].exit_code or not people[0].output:
            raise DsagentError("the load ended by itself, or before it could be counted")
        tally = json.loads(people[0].output[-1])
        if not tally["requests"]:
            raise DsagentError("not one request was served")
        tell("rolling what was recorded")
        store = FolderStore(Path(folder) / "store")
        later_ns = time.time_ns() + 3 * HOUR_NS
        rolled = roll(recording, store, "measured", now_ns=later_ns)
        retain(store, Policy(DAY_NS, DAY_NS), now_ns=later_ns)
        hourly_bytes = sum(found.bytes for found in store.list("hourly"))
        recorded = sum(path.stat().st_size for path in recording.glob("*.parquet"))
        return _document(
            model, target, session, tally, scraper, usual, everything, rolled, recorded,
            hourly_bytes,
        )  # fmt: skip


def _config(port: int) -> OtlpConfig:
    config = otlp_config({}, f"http://127.0.0.1:{port}")
    assert config is not None
    return config


def _document(
    model: str,
    target: Target,
    session: Session,
    tally: dict[str, float],
    scraper: _Scraper,
    usual: Weighed,
    everything: Weighed,
    rolled: Rolled,
    recorded_bytes: int,
    hourly_bytes: int,
) -> Measured:
    seconds = tally["elapsed_s"]
    kept, metrics = usual.signals["traces"], usual.signals["metrics"]
    spans, logs = everything.signals["traces"], usual.signals["logs"]
    profiles = usual.signals["Push"]
    of_all = max(1, spans.requests)
    rows = sum(batch.rows for batch in rolled.batches)
    return Measured(
        load=LOAD,
        engine=f"the bundled engine with {model}, on CPUs",
        sampling="default: 0.1 % rising to 5 % with the error rate, outliers and errors always",
        duration_s=round(seconds, 1),
        requests_per_s=tally["requests"] / seconds,
        steps_per_s=session.counts.steps / seconds,
        series=scraper.series,
        series_estimated=estimate(len(target.gpu_uuids), has_slo=False),
        scrape_bytes=scraper.bytes,
        points_per_push=metrics.items / max(1, metrics.bodies),
        metrics_wire_bytes_per_s=metrics.wire_bytes / seconds,
        kept_requests=kept.requests,
        kept_ratio=kept.requests / of_all,
        spans_per_kept_request=spans.items / of_all,
        span_wire_bytes=spans.wire_bytes / max(1, spans.items),
        span_raw_bytes=spans.raw_bytes / max(1, spans.items),
        logs_per_request=logs.items / of_all,
        log_wire_bytes=logs.wire_bytes / max(1, logs.items),
        pushes_per_s=profiles.items / seconds,
        push_wire_bytes=profiles.wire_bytes / max(1, profiles.items),
        recording_rows_per_s=rows / seconds,
        recording_bytes_per_s=recorded_bytes / seconds,
        rolled_bytes_per_s=sum(batch.bytes for batch in rolled.batches) / seconds,
        hourly_bytes=hourly_bytes,
    )
