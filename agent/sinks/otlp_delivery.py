"""One signal's way out: from a feeder, over the disk where there is a queue, to the back end."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from dsagent.agent.sinks.delivery_ledger import DeliveryLedger, WhyFailed
from dsagent.agent.sinks.disk_queue import DiskQueue
from dsagent.agent.sinks.otlp_config import Endpoint
from dsagent.agent.sinks.otlp_post import Answer, Poster, Signal
from dsagent.agent.sinks.outbox import Body, Feeder

UNREACHED_S = 2.0  # how long the end waits for a back end that does not even take a connection
ABANDONED_S = 1.0  # how long a post that was broken off may take to notice
DEFAULT_QUEUE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """A queue on disk: where, and how large the folder may grow, for each signal."""

    directory: Path
    max_bytes: int = DEFAULT_QUEUE_BYTES


class Delivery:
    """Posts what the feeder gives, in a thread of its own. With a queue on disk another thread
    stores first: then nothing is given up because the back end is away, until the queue is full
    or a day has passed."""

    def __init__(
        self,
        signal: Signal,
        endpoint: Endpoint,
        feeder: Feeder,
        queue: QueueOptions | None = None,
        *,
        name: str | None = None,
    ) -> None:
        """`name`: of the ledger and the folder, the signal's unless given."""
        name = name or signal
        self.ledger = DeliveryLedger(name)
        self._name = name
        self._signal: Signal = signal
        self._endpoint = endpoint
        self._feeder = feeder
        self._poster: Poster | None = None
        self._disk = (
            None
            if queue is None
            else DiskQueue(queue.directory / name, queue.max_bytes, self.ledger)
        )
        self._on_its_way = 0  # items of the body being posted
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Raises DsagentError: certificates or the queue's folder cannot be used."""
        self._poster = Poster(self._endpoint, self._signal)
        if self._disk is not None:
            self._disk.open()
        loops = {"store": self._store, "post": self._post_stored} if self._disk else {}
        for what, loop in (loops or {"post": self._post}).items():
            thread = threading.Thread(
                target=loop, name=f"sink-otlp-{self._name}-{what}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def begin_to_end(self, deadline_s: float) -> None:
        """What is waiting still goes out, until this time of time.monotonic()."""
        self._feeder.end()
        if self._poster is not None:
            unreached_s = time.monotonic() + UNREACHED_S
            self._poster.end_by(
                deadline_s if self._poster.is_reached else min(deadline_s, unreached_s)
            )

    def end(self, deadline_s: float) -> None:
        """After `begin_to_end`: waits until then, breaks off what hangs, closes the ledger."""
        poster = self._poster
        if poster is None:
            return
        unreached_s = min(deadline_s, time.monotonic() + UNREACHED_S)
        for thread in self._threads:
            thread.join(max(0.0, unreached_s - time.monotonic()))
            if poster.is_reached:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            poster.abandon()
            for thread in self._threads:
                thread.join(ABANDONED_S / len(self._threads))
        if self._disk is not None:
            self._disk.close()
        self.ledger.close(self._on_its_way, is_kept=self._disk is not None)

    def _post(self) -> None:
        assert self._poster is not None
        while (body := self._feeder.next()) is not None:
            self._on_its_way = body.items
            self._count(self._poster.post(body.data), body)
            self._on_its_way = 0
        self._poster.close()

    def _store(self) -> None:
        assert self._disk is not None
        while (body := self._feeder.next()) is not None:
            self._disk.put(body)
        self._disk.end()

    def _post_stored(self) -> None:
        assert self._disk is not None
        assert self._poster is not None
        while (taken := self._disk.take()) is not None:
            entry, body = taken
            answer = self._poster.post(body.data)
            if answer.result != "unreachable":
                self._count(answer, body)
                self._disk.settle(entry)
                continue
            self.ledger.trouble(answer.reason)
            if self._poster.is_ending:
                break  # the next run sends it
        self._poster.close()

    def _count(self, answer: Answer, body: Body) -> None:
        rejected, reason = body.items, answer.reason
        why: WhyFailed = "refused" if answer.result == "refused" else "unreachable"
        if answer.result == "accepted":
            rejected, reason = rejected_items(answer.body, body.items, self._signal)
            why = "rejected"
        self.ledger.answered(body.items - rejected, rejected, why, reason)


def rejected_items(answer: bytes, items: int, signal: Signal) -> tuple[int, str]:
    """How many items the back end did not take though it answered success, and why."""
    try:
        if signal == "traces":
            traces = ExportTraceServiceResponse.FromString(answer).partial_success
            rejected, message = traces.rejected_spans, traces.error_message
        elif signal == "metrics":
            metrics = ExportMetricsServiceResponse.FromString(answer).partial_success
            rejected, message = metrics.rejected_data_points, metrics.error_message
        else:
            logs = ExportLogsServiceResponse.FromString(answer).partial_success
            rejected, message = logs.rejected_log_records, logs.error_message
    except DecodeError:
        return items, "an answer that is not OTLP: nothing tells that the items were taken"
    return min(max(rejected, 0), items), message[:200]
