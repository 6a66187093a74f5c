"""Passes the spans that the engine exported to us on to the back end, unchanged.

A receiver that swallowed them would take from people what they had before it came.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from dsagent.agent.facts import OtlpBody
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.otlp import rejected_items
from dsagent.agent.sinks.otlp_config import Endpoint
from dsagent.agent.sinks.otlp_post import Poster

MAX_QUEUED_BYTES = 16 << 20
UNREACHED_S = 2.0  # how long the end waits for a back end that does not even take a connection


class OtlpForwardSink:
    """Items are spans. Bodies go out in the order they came, each as it came."""

    name = "otlp_forward"

    def __init__(self, endpoint: Endpoint) -> None:
        self._poster = Poster(endpoint)
        self._queue: deque[OtlpBody] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._status = SinkStatus(self.name)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._post, name="sink-otlp-forward", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, batch: Explained) -> None:
        with self._changed:
            for body in batch.otlp_bodies:
                if self._is_stopping or self._queued_bytes + len(body.data) > MAX_QUEUED_BYTES:
                    self._status = replace(
                        self._status,
                        dropped=self._status.dropped + body.spans,
                        reason=self._status.reason or "more spans than the back end takes",
                    )
                    continue
                self._queue.append(body)
                self._queued_bytes += len(body.data)
            self._changed.notify_all()

    def status(self) -> SinkStatus:
        with self._changed:
            return self._status

    def stop(self, deadline_s: float) -> None:
        now_s = time.monotonic()
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        wait_s = deadline_s if self._poster.is_reached else min(deadline_s, UNREACHED_S)
        self._poster.end_by(now_s + wait_s)
        if self._thread.is_alive():
            self._thread.join(wait_s)
        if self._thread.is_alive():
            self._poster.abandon()
        with self._changed:
            left = sum(body.spans for body in self._queue)
            self._queue.clear()
            unanswered = self._status.sent - self._status.acknowledged
            self._status = replace(
                self._status, dropped=self._status.dropped + left, failed=unanswered
            )

    def _post(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_stopping)
                if not self._queue:
                    break
                body = self._queue.popleft()
                self._queued_bytes -= len(body.data)
                self._status = replace(self._status, sent=self._status.sent + body.spans)
            answer = self._poster.post(body.data)
            rejected, reason = body.spans, answer.reason
            if answer.result == "accepted":
                rejected, reason = rejected_items(
                    answer.body, body.spans, ExportTraceServiceResponse()
                )
            with self._changed:
                self._status = replace(
                    self._status,
                    acknowledged=self._status.acknowledged + body.spans - rejected,
                    failed=self._status.failed + rejected,
                    reason=reason or self._status.reason,
                )
        self._poster.close()
