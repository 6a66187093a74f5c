"""Passes the spans that the engine exported to us on to the back end, unchanged.

A receiver that swallowed them would take from people what they had before it came.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from dsagent.agent.facts import OtlpBody
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.otlp_config import Endpoint
from dsagent.agent.sinks.otlp_delivery import Delivery, QueueOptions
from dsagent.agent.sinks.outbox import Body, BodyBox


class OtlpForwardSink:
    """Items are spans. Bodies go out in the order they came, each as it came."""

    name = "otlp_forward"

    def __init__(self, endpoint: Endpoint, queue: QueueOptions | None = None) -> None:
        self._bodies = BodyBox()
        self._way = Delivery("traces", endpoint, self._bodies, queue, name=self.name)

    def start(self) -> None:
        """Raises DsagentError: certificates or the queue's folder cannot be used."""
        self._way.start()

    def take(self, batch: Explained) -> None:
        self.forward(batch.otlp_bodies)

    def forward(self, bodies: Iterable[OtlpBody]) -> None:
        ledger = self._way.ledger
        for body in bodies:
            ledger.made(body.spans)
            if not self._bodies.put(Body(body.data, body.spans)):
                ledger.dropped(body.spans, "queue_full", "more spans than the back end takes")

    def status(self) -> SinkStatus:
        return self._way.ledger.status()

    def stop(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        self._way.begin_to_end(deadline)
        self._way.end(deadline)
