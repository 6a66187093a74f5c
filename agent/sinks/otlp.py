"""Sends traces and metrics as OTLP over HTTP, and counts itself what became of them.

The session's thread makes spans and adds up metrics; two threads of the sink's
own post them. Between them is a bounded queue, so a back end that hangs costs
bounded memory and counted drops, and traces that hang do not hold up metrics.
Items are spans and points of metrics.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from dsagent.agent.account import Account
from dsagent.agent.aggregate import UNATTRIBUTED, Aggregate, provider
from dsagent.agent.facts import ClockAnchor, Target
from dsagent.agent.resource import resource_attributes
from dsagent.agent.sampling import Decision, Sampler
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.held_steps import HeldSteps
from dsagent.agent.sinks.otlp_config import Endpoint, OtlpConfig
from dsagent.agent.sinks.otlp_encode import metrics_request, span_message, trace_request
from dsagent.agent.sinks.otlp_post import Answer, Poster
from dsagent.agent.slo import Limits
from dsagent.instrumentation import names
from dsagent.instrumentation.spans import Span, StepSpans, request_spans

MAX_QUEUED_SPANS = 20_000
MAX_QUEUED_BYTES = 16 << 20
SPANS_PER_POST = 512
LINGER_S = 1.0  # how long the first span of a post waits for others
UNREACHED_S = 2.0  # how long the end waits for a back end that does not even take a connection


class OtlpSink:
    name = "otlp"

    def __init__(
        self,
        config: OtlpConfig,
        limits: Limits,
        *,
        sampler: Sampler | None = None,
        resource: Mapping[str, str] | None = None,
        step_spans: StepSpans = "worst",
    ) -> None:
        """`sampler`: the one that decides for all sinks; `resource`: resource_overrides()."""
        self._config = config
        self._limits = limits
        self._sampler = sampler or Sampler()
        self._overrides = dict(resource or {})
        self._step_spans: StepSpans = step_spans
        self._aggregate = Aggregate(limits, self._sampler, self._overrides)
        self._held = HeldSteps()
        self._queue: deque[tuple[SpanMessage, int]] = deque()
        self._queued_bytes = 0
        self._resource: dict[str, str | int] | None = None  # once there is a target
        self._anchor: ClockAnchor | None = None
        self._lock = threading.Condition()
        self._status = SinkStatus(self.name)
        self._is_stopping = False
        self._is_stopped = False
        self._workers: list[tuple[threading.Thread, Poster]] = []

    def start(self) -> None:
        loops = (("traces", self._config.traces), ("metrics", self._config.metrics))
        for signal, endpoint in loops:
            if endpoint is not None:
                self._start_worker(signal, endpoint)

    def take(self, batch: Explained) -> None:
        with self._lock:
            if self._is_stopping:
                return
            self._anchor = batch.anchor
            if self._resource is None:
                self._resource = resource_attributes(batch.target, self._overrides)
            self._aggregate.add(batch)
            if self._config.traces is None:
                return
            for step in batch.steps:
                self._held.add(step)
            for account in batch.accounts:
                self._add_account(account, batch.anchor, batch.target)
            self._enqueue(self._held.due(batch.now_ns), batch.anchor)

    def status(self) -> SinkStatus:
        """What is given up of the steps held counts as dropped."""
        with self._lock:
            return replace(self._status, dropped=self._status.dropped + self._held.given_up)

    def stop(self, deadline_s: float) -> None:
        now = time.monotonic()
        deadline, unreached_deadline = now + deadline_s, now + min(deadline_s, UNREACHED_S)
        with self._lock:
            if self._is_stopping:
                return
            if self._anchor is not None:
                self._enqueue(self._held.flush(), self._anchor)
            self._is_stopping = True
            self._lock.notify_all()
        for _, poster in self._workers:
            poster.end_by(deadline if poster.is_reached else unreached_deadline)
        for thread, _ in self._workers:
            thread.join(max(0.0, unreached_deadline - time.monotonic()))
        for thread, poster in self._workers:
            if poster.is_reached:
                thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                poster.abandon()
        with self._lock:
            self._is_stopped = True
            status = self._status
            failed = status.sent - status.acknowledged  # with those not answered for by now
            unanswered = "no answer by the end" if failed > status.failed else ""
            self._status = replace(
                status,
                failed=failed,
                reason=status.reason or unanswered,
                dropped=status.dropped + len(self._queue),
            )
            self._queue.clear()

    def _start_worker(self, signal: str, endpoint: Endpoint) -> None:
        poster = Poster(endpoint)
        loop = self._post_traces if signal == "traces" else self._post_metrics
        thread = threading.Thread(
            target=loop, args=(poster,), name=f"sink-otlp-{signal}", daemon=True
        )
        self._workers.append((thread, poster))
        thread.start()

    def _add_account(self, account: Account, anchor: ClockAnchor, target: Target) -> None:
        record = account.record
        decision = self._sampler.decide(account, self._limits.violated(account))
        if decision.keep:
            steps = self._held.steps_of(account.engine_id, account.step_ids)
            spans = request_spans(
                record,
                steps,
                parts=_parts(account),
                step_spans=self._step_spans,
                provider=provider(target),
            )
            if _has_unknown_engine_span(account, target):
                # Its own span has an id that only the engine knows: ours hangs beside it.
                spans[0] = replace(spans[0], parent_span_id=record.parent_span_id)
                record = replace(record, span_id=spans[0].span_id)
            self._enqueue([_marked(spans[0], decision), *spans[1:]], anchor)
        kept = decision.keep and not _engine_exports_steps(account, target)
        self._held.end_request(record, kept=kept)

    def _enqueue(self, spans: list[Span], anchor: ClockAnchor) -> None:
        for span in spans:
            try:
                message = span_message(span, anchor)
            except (ValueError, OverflowError) as error:  # numbers another process made up
                self._drop(f"a span that OTLP cannot hold: {error}")
                continue
            size = message.ByteSize()
            is_full = len(self._queue) >= MAX_QUEUED_SPANS
            if is_full or self._queued_bytes + size > MAX_QUEUED_BYTES:
                self._drop("more spans than the back end takes")
                continue
            self._queue.append((message, size))
            self._queued_bytes += size
        if len(self._queue) >= SPANS_PER_POST:
            self._lock.notify_all()

    def _drop(self, reason: str) -> None:
        status = self._status
        self._status = replace(status, dropped=status.dropped + 1, reason=status.reason or reason)

    def _post_traces(self, poster: Poster) -> None:
        while True:
            with self._lock:
                if len(self._queue) < SPANS_PER_POST and not self._is_stopping:
                    self._lock.wait(LINGER_S)
                count = min(len(self._queue), SPANS_PER_POST)
                taken = [self._queue.popleft() for _ in range(count)]
                self._queued_bytes -= sum(size for _, size in taken)
                resource = self._resource or {}
                if not taken and self._is_stopping:
                    break
            if taken:
                request = trace_request((message for message, _ in taken), resource)
                self._count_sent(len(taken))
                answer = poster.post(request.SerializeToString())
                self._count_answer(answer, len(taken), ExportTraceServiceResponse())
        poster.close()

    def _post_metrics(self, poster: Poster) -> None:
        is_last = False
        due = time.monotonic() + self._config.interval_s
        while not is_last:
            with self._lock:
                while not self._is_stopping and (left := due - time.monotonic()) > 0:
                    self._lock.wait(left)
                is_last = self._is_stopping
                anchor, start_unix_ns = self._anchor, self._aggregate.start_unix_ns
                families = self._aggregate.collect()
                resource = self._resource or {}
            due = time.monotonic() + self._config.interval_s
            if anchor is None or start_unix_ns is None:
                continue  # nothing has come yet
            now_unix_ns = anchor.unix(time.monotonic_ns())
            request, points = metrics_request(families, resource, start_unix_ns, now_unix_ns)
            self._count_sent(points)
            answer = poster.post(request.SerializeToString())
            self._count_answer(answer, points, ExportMetricsServiceResponse())
        poster.close()

    def _count_sent(self, items: int) -> None:
        with self._lock:
            self._status = replace(self._status, sent=self._status.sent + items)

    def _count_answer(
        self,
        answer: Answer,
        items: int,
        response: ExportTraceServiceResponse | ExportMetricsServiceResponse,
    ) -> None:
        """`response`: an empty one of the kind that the back end should have sent."""
        rejected, reason = items, answer.reason
        if answer.result == "accepted":
            rejected, reason = rejected_items(answer.body, items, response)
        with self._lock:
            if self._is_stopped:
                return  # already counted as not answered for
            self._status = replace(
                self._status,
                acknowledged=self._status.acknowledged + items - rejected,
                failed=self._status.failed + rejected,
                reason=reason or self._status.reason,
            )


def _engine_exports_steps(account: Account, target: Target) -> bool:
    """Our own SDK in the engine exports the steps with the requests; other engines that export a
    span of the request know nothing of steps."""
    if account.engine_span is not None:
        return account.engine_span.scope == names.SCOPE
    return account.record.self_exported and target.engine == "reference"


def _has_unknown_engine_span(account: Account, target: Target) -> bool:
    """The engine exports a span of the request, which was not received here."""
    is_sdk = target.engine == "reference"  # our own, which gives it the id that the record says
    return account.record.self_exported and account.engine_span is None and not is_sdk


def _parts(account: Account) -> dict[str, int]:
    """Nanoseconds by cause, with the rest, so that they add up to the span's duration."""
    parts: dict[str, int] = {}
    for part in account.parts:
        parts[part.cause] = parts.get(part.cause, 0) + part.ns
    parts[UNATTRIBUTED] = account.unattributed_ns
    return parts


def _marked(root: Span, decision: Decision) -> Span:
    attributes = {**root.attributes, names.SAMPLING_REASON: decision.reason}
    return replace(root, attributes=attributes)


def rejected_items(
    body: bytes, items: int, response: ExportTraceServiceResponse | ExportMetricsServiceResponse
) -> tuple[int, str]:
    """How many items the back end did not take though it answered 2xx, and why."""
    try:
        response.ParseFromString(body)
    except DecodeError:
        return items, "an answer that is not OTLP: nothing tells that the items were taken"
    partial = response.partial_success
    if isinstance(response, ExportTraceServiceResponse):
        rejected = response.partial_success.rejected_spans
    else:
        rejected = response.partial_success.rejected_data_points
    return min(max(rejected, 0), items), partial.error_message[:200]
