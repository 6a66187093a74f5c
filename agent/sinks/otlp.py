"""Sends traces, metrics and logs as OTLP, and counts itself what became of them.

The session's thread makes spans and log lines and adds up metrics; threads of the sink's own post
them, one for each signal (otlp_delivery.py). Between them are bounded queues, so a back end that
hangs costs bounded memory and counted drops, and traces that hang do not hold up metrics. Items
are spans, points of metrics, and log records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from dsagent.agent.attribution.account import Account
from dsagent.agent.errors import DsagentError
from dsagent.agent.facts import ClockAnchor, Target
from dsagent.agent.masking import mask
from dsagent.agent.metrics.aggregate import UNATTRIBUTED, Aggregate, provider
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.resource import resource_attributes
from dsagent.agent.session.log_lines import LogLine, LogLines
from dsagent.agent.session.sampling import Decision, Sampler
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.delivery_ledger import DeliveryLedger, summed
from dsagent.agent.sinks.held_steps import HeldSteps
from dsagent.agent.sinks.otlp_config import OtlpConfig
from dsagent.agent.sinks.otlp_delivery import Delivery, QueueOptions
from dsagent.agent.sinks.otlp_encode import items_body, log_message, metrics_request
from dsagent.agent.sinks.otlp_span import span_bytes
from dsagent.agent.sinks.outbox import Body, Outbox, Pulse
from dsagent.agent.slo import Limits
from dsagent.agent.slo.alert import Alert
from dsagent.instrumentation import names
from dsagent.instrumentation.spans import Span, StepSpans, request_spans

T = TypeVar("T")

MAX_ALERTS = 256  # held until the next tick


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
        queue: QueueOptions | None = None,
        masked: bool = True,
        slo: SloFigures | None = None,
    ) -> None:
        """`sampler`: the one that decides for all sinks; `resource`: resource_overrides();
        `queue`: on disk, where people want one; `masked`: free text that others wrote is freed of
        what looks like personal data (masking.py); `slo`: figures of objectives, if any."""
        self._limits = limits
        self._sampler = sampler or Sampler()
        self._overrides = dict(resource or {})
        self._step_spans: StepSpans = step_spans
        self._mask: Callable[[str], str] = mask if masked else str
        is_exponential = config.histograms == "base2_exponential_bucket_histogram"
        self._aggregate = Aggregate(
            limits, self._sampler, self._overrides, slo, exponential=is_exponential
        )
        self._held = HeldSteps()
        self._given_up = 0  # of the steps held, as told to the ledger
        self._lines = LogLines(masked=masked)
        self._alerts: list[Alert] = []  # told, and not yet among the logs
        self._resource: dict[str, str | int] | None = None  # once there is a target
        self._anchor: ClockAnchor | None = None
        self._lock = threading.Lock()
        self._is_stopping = False
        self._spans = Outbox(self._seal)
        self._logs = Outbox(self._seal)
        self._traces_way = self._metrics_way = self._logs_way = None
        if config.traces is not None:
            self._traces_way = Delivery("traces", config.traces, self._spans, queue)
        if config.metrics is not None:
            pulse = Pulse(self._metrics_body, config.interval_s)
            self._metrics_way = Delivery("metrics", config.metrics, pulse, queue)
        if config.logs is not None:
            self._logs_way = Delivery("logs", config.logs, self._logs, queue)
        ways = (self._traces_way, self._metrics_way, self._logs_way)
        self._ways = [way for way in ways if way is not None]

    def start(self) -> None:
        """Raises DsagentError: certificates or the queue's folder cannot be used."""
        try:
            for way in self._ways:
                way.start()
        except DsagentError:
            self.stop(0.0)  # those that did begin
            raise

    def take(self, batch: Explained) -> None:
        with self._lock:
            if self._is_stopping:
                return
            self._anchor = batch.anchor
            if self._resource is None:
                self._resource = resource_attributes(batch.target, self._overrides)
            if self._metrics_way is not None:
                self._aggregate.add(batch)
            if self._logs_way is not None:
                self._add_alerts(batch.anchor, batch.now_ns, self._logs_way.ledger)
                self._add_logs(batch, self._logs_way.ledger)
            if self._traces_way is None:
                return
            for step in batch.steps:
                self._held.add(step)
            for account in batch.accounts:
                self._add_account(account, batch.anchor, batch.target)
            self._enqueue(self._held.due(batch.now_ns), batch.anchor)
            self._tell_given_up(self._traces_way.ledger)

    def tell(self, alert: Alert) -> None:
        """An alert, to go out with the logs of this tick or of the end. Never raises."""
        with self._lock:
            if self._logs_way is not None:
                self._logs_way.ledger.made(1)
                if len(self._alerts) < MAX_ALERTS:
                    self._alerts.append(alert)
                else:
                    self._logs_way.ledger.dropped(1, "queue_full", "more alerts than are held")

    def status(self) -> SinkStatus:
        return summed(self.name, [way.ledger.status() for way in self._ways])

    def stop(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        with self._lock:
            if self._is_stopping:
                return
            if self._anchor is not None and self._traces_way is not None:
                self._enqueue(self._held.flush(), self._anchor)
            if self._anchor is not None and self._logs_way is not None:
                self._add_alerts(self._anchor, time.monotonic_ns(), self._logs_way.ledger)
            self._is_stopping = True
        for way in self._ways:
            way.begin_to_end(deadline)
        for way in self._ways:
            way.end(deadline)

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
            self._enqueue([self._marked(spans[0], decision), *spans[1:]], anchor)
        kept = decision.keep and not _engine_exports_steps(account, target)
        self._held.end_request(record, kept=kept)

    def _marked(self, root: Span, decision: Decision) -> Span:
        attributes = {**root.attributes, names.SAMPLING_REASON: decision.reason}
        if root.error is None:
            return replace(root, attributes=attributes)
        attributes[names.ERROR_TYPE] = error = self._mask(root.error)
        return replace(root, attributes=attributes, error=error)

    def _add_alerts(self, anchor: ClockAnchor, now_ns: int, ledger: DeliveryLedger) -> None:
        lines = [self._lines.of_alert(alert) for alert in self._alerts]
        self._alerts.clear()
        self._put_lines(lines, anchor, now_ns, ledger)

    def _add_logs(self, batch: Explained, ledger: DeliveryLedger) -> None:
        self._lines.opened(batch.opened)
        lines: list[LogLine] = [self._lines.of_event(event) for event in batch.events]
        for account in batch.accounts:
            self._lines.ended(account)
            decision = self._sampler.decide(account, self._limits.violated(account))
            line = self._lines.of_request(account, decision)
            if line is not None:
                lines.append(line)
        ledger.made(len(lines))
        self._put_lines(lines, batch.anchor, batch.now_ns, ledger)

    def _put_lines(
        self, lines: Sequence[LogLine], anchor: ClockAnchor, now_ns: int, ledger: DeliveryLedger
    ) -> None:
        def encode(line: LogLine) -> bytes:
            message: bytes = log_message(line, anchor, now_ns).SerializeToString()
            return message

        _put(self._logs, _serialised(lines, encode, ledger), ledger)

    def _enqueue(self, spans: Sequence[Span], anchor: ClockAnchor) -> None:
        if spans and self._traces_way is not None:
            ledger = self._traces_way.ledger
            ledger.made(len(spans))
            made = _serialised(spans, lambda span: span_bytes(span, anchor), ledger)
            _put(self._spans, made, ledger)

    def _tell_given_up(self, ledger: DeliveryLedger) -> None:
        new = self._held.given_up - self._given_up
        self._given_up += new
        ledger.made(new)
        ledger.dropped(new, "steps_given_up", "more steps than are held until their requests end")

    def _seal(self, items: Sequence[bytes]) -> bytes:
        return items_body(items, self._resource or {})

    def _metrics_body(self) -> Body | None:
        with self._lock:
            anchor, start_unix_ns = self._anchor, self._aggregate.start_unix_ns
            families = self._aggregate.collect()
            resource = self._resource or {}
        if anchor is None or start_unix_ns is None or self._metrics_way is None:
            return None  # nothing has come yet
        now_unix_ns = anchor.unix(time.monotonic_ns())
        request, points = metrics_request(families, resource, start_unix_ns, now_unix_ns)
        self._metrics_way.ledger.made(points)
        return Body(request.SerializeToString(), points)


def _serialised(
    items: Sequence[T], encode: Callable[[T], bytes], ledger: DeliveryLedger
) -> list[bytes]:
    """Those that OTLP can hold."""
    made = []
    for item in items:
        try:
            made.append(encode(item))
        except (ValueError, OverflowError) as error:  # numbers another process made up
            ledger.dropped(1, "cannot_encode", f"something that OTLP cannot hold: {error}")
    return made


def _put(outbox: Outbox, made: Sequence[bytes], ledger: DeliveryLedger) -> None:
    ledger.dropped(outbox.put(made), "queue_full", "more than the back end takes")


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
