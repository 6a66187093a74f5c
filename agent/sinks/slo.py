"""The agent's own alerting: the evaluator fed with accounts, its alerts carried away."""

from __future__ import annotations

from collections.abc import Callable

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.notify import Message, Notifier
from dsagent.agent.slo.alert import Alert
from dsagent.agent.slo.cache import CircuitChange
from dsagent.agent.slo.evaluator import Evaluator
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.payload import action_body, webhook_body


class SloSink:
    """First among the sinks: those that show the evaluator's figures come after it."""

    name = "slo"

    def __init__(
        self,
        file: SloFile,
        evaluator: Evaluator,
        *,
        on_alert: Callable[[Alert], None] = lambda _alert: None,
    ) -> None:
        """`on_alert`: is told of each, too."""
        self._file = file
        self._evaluator = evaluator
        self._on_alert = on_alert
        self._notifier = Notifier(self.name)
        self._anchor: ClockAnchor | None = None
        self._instance: dict[str, str] = {}
        self._is_ended = False

    def start(self) -> None:
        self._notifier.start()

    def take(self, batch: Explained) -> None:
        self._anchor = batch.anchor
        target = batch.target
        self._instance = {"service": target.service_name, "engine": target.engine}
        self._evaluator.see(batch.opened, batch.ended, batch.steps)
        if batch.due_ns >= batch.now_ns:  # nothing lies unread
            self._evaluator.judge_unfinished(batch.attached_ns, batch.now_ns)
        alerts, changes = self._evaluator.take(batch.accounts, batch.sources, batch.now_ns)
        self._tell(alerts, batch.anchor)
        for change in changes:
            self._act(change, batch.anchor)

    def status(self) -> SinkStatus:
        return self._notifier.status()

    def stop(self, deadline_s: float) -> None:
        if self._anchor is not None and not self._is_ended:
            self._tell(self._evaluator.end("the agent has ended"), self._anchor)
        self._is_ended = True
        self._notifier.stop(deadline_s)

    def _tell(self, alerts: list[Alert], anchor: ClockAnchor) -> None:
        for alert in alerts:
            self._on_alert(alert)
            if self._file.webhook is not None:
                body = webhook_body(alert, anchor, self._instance)
                self._notifier.send(Message(body, url=self._file.webhook))

    def _act(self, change: CircuitChange, anchor: ClockAnchor) -> None:
        body = action_body(change, anchor)
        if change.alert.webhook is not None:
            self._notifier.send(Message(body, url=change.alert.webhook))
        if change.alert.command:
            self._notifier.send(Message(body, command=change.alert.command))
