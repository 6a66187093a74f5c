"""What is worth a line in a log, with the trace ids of the requests concerned.

Events of the agent (a stalled loop, a lost source), its alerts, and each kept request that was slow
or failed, in the words that `explain` has for it. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dsagent.agent.attribution.account import Account
from dsagent.agent.facts import Event
from dsagent.agent.host.procfs import escape
from dsagent.agent.masking import mask
from dsagent.agent.screens.wording import because, ms
from dsagent.agent.session.sampling import Decision
from dsagent.agent.slo.alert import Alert, alert_line
from dsagent.instrumentation import names
from dsagent.instrumentation.records import RequestOpen

INFO, WARN, ERROR = 9, 13, 17  # OpenTelemetry's numbers of severity
SEVERITY_TEXT = {INFO: "INFO", WARN: "WARN", ERROR: "ERROR"}

SLOW_REQUEST = "dsagent.request.slow"
FAILED_REQUEST = "dsagent.request.failed"
TRACE_IDS = "dsagent.trace_ids"
MAX_OPEN = 4096
MAX_TRACE_IDS = 16
MAX_BODY_CHARS = 2000

# Of the others WARN: an event is something rare that somebody should know.
_SEVERITIES = {
    "engine.stalled": ERROR,
    "source.failed": ERROR,
    "sink.ended": ERROR,
    "agent.failed": ERROR,
    "engine.resumed": INFO,
    "child.started": INFO,
    "child.ended": INFO,
    "source.ok": INFO,
    "anomaly.ended": INFO,
}
_CONCERN_OPEN_REQUESTS = ("engine.stalled", "engine.resumed")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record of a log. Times are CLOCK_MONOTONIC nanoseconds."""

    mono_ns: int
    severity: int
    event_name: str
    text: str
    attributes: Mapping[str, str | int | float | tuple[str, ...]] = field(default_factory=dict)
    trace_id: int | None = None
    span_id: int | None = None


class LogLines:
    """Knows which requests are open, at most MAX_OPEN of them."""

    def __init__(self, *, masked: bool = True) -> None:
        """`masked`: text is freed of what looks like personal data; see masking.py."""
        self._mask: Callable[[str], str] = mask if masked else str
        self._open: OrderedDict[int, RequestOpen] = OrderedDict()

    def _body(self, text: str) -> str:
        """What others named themselves stands in it: one line, whatever shows it."""
        return escape(self._mask(text), limit=MAX_BODY_CHARS)

    def opened(self, requests: Iterable[RequestOpen]) -> None:
        for request in requests:
            self._open[request.request_key] = request
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)

    def ended(self, account: Account) -> None:
        self._open.pop(account.record.request_key, None)

    def of_event(self, event: Event) -> LogLine:
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            name: self._mask(value) if isinstance(value, str) else value
            for name, value in event.attributes.items()
        }
        concerned = list(self._open.values()) if event.name in _CONCERN_OPEN_REQUESTS else []
        if concerned:
            attributes[TRACE_IDS] = tuple(f"{r.trace_id:032x}" for r in concerned[:MAX_TRACE_IDS])
            attributes["dsagent.requests.open"] = len(concerned)
        elif event.trace_ids:
            attributes[TRACE_IDS] = event.trace_ids[:MAX_TRACE_IDS]
        only = concerned[0] if len(concerned) == 1 else None
        trace_id = None if only is None else only.trace_id
        if event.trace_ids:
            trace_id = int(event.trace_ids[0], 16)
        return LogLine(
            event.mono_ns,
            _SEVERITIES.get(event.name, WARN),
            f"dsagent.{event.name}",
            self._body(event.message),
            attributes,
            trace_id,
            None if only is None else only.span_id,
        )

    def of_alert(self, alert: Alert) -> LogLine:
        """One that fires or is resolved, with the trace ids that show it."""
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "dsagent.alert.name": alert.name,
            "dsagent.alert.state": alert.state,
            **{f"dsagent.alert.{name}": value for name, value in alert.labels.items()},
        }
        exemplars = alert.explanation.exemplars[:MAX_TRACE_IDS]
        if exemplars:
            attributes[TRACE_IDS] = tuple(exemplars)
        if alert.status == "resolved":
            severity = INFO
        else:
            severity = WARN if alert.labels.get("severity") == "ticket" else ERROR
        return LogLine(
            alert.now_ns,
            severity,
            f"dsagent.alert.{alert.status}",
            self._mask(alert_line(alert)),
            attributes,
            int(exemplars[0], 16) if len(exemplars) == 1 else None,
        )

    def of_request(self, account: Account, decision: Decision) -> LogLine | None:
        """None unless it is kept, and was slow or failed."""
        record = account.record
        if not decision.keep or not (decision.slow or record.error is not None):
            return None
        is_failed = record.error is not None
        took = f"request {record.request_id} took {ms(account.e2e_ns)}"
        if is_failed:
            took = f"request {record.request_id} failed after {ms(account.e2e_ns)}: {record.error}"
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            names.REQUEST_MODEL: record.model,
            names.REQUEST_ID: record.request_id,
            names.SAMPLING_REASON: decision.reason,
            "dsagent.request.e2e_ns": account.e2e_ns,
        }
        if record.ttft_ns is not None:
            attributes[names.REQUEST_TTFT_NS] = record.ttft_ns
        if account.top is not None:
            attributes["dsagent.request.top_cause"] = account.top.cause
        if record.error is not None:
            attributes[names.ERROR_TYPE] = self._mask(record.error)
        return LogLine(
            record.sent_ns,
            ERROR if is_failed else WARN,
            FAILED_REQUEST if is_failed else SLOW_REQUEST,
            self._body(f"{took}. {because(account.to_json())}"),
            attributes,
            record.trace_id,
            record.span_id,
        )
