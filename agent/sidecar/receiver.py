"""The one OTLP receiver of a sidecar, for the spans that its engines export themselves.

What comes in is passed on to the back end here, whether an engine is watched or not, and shown to
the watches, whose accounts the spans of requests are joined to. Like the listener, it is tried
again where it cannot begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.facts import Readings, SourceStatus
from dsagent.agent.listening.admission import Guard, ListenOptions
from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.aggregate import set_sinks
from dsagent.agent.metrics.series import Family, Store
from dsagent.agent.session.guard import reason_of
from dsagent.agent.session.outlets import OutletOptions, make_forward, make_receiver
from dsagent.agent.sidecar.backoff import Backoff
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.sidecar.processes import Key
from dsagent.agent.sidecar.span_board import OwnerOf, SharedClaims, SpanBoard

if TYPE_CHECKING:
    from dsagent.agent.sinks.otlp_forward import OtlpForwardSink
    from dsagent.agent.sources.otlp_receiver.source import OtlpReceiver

FOLDER = "received"  # of the queue on disk: beside those of the engines
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What decides where it listens and where it sends to."""

    outlets: OutletOptions
    guarded_by: ListenOptions


class ReceivedSource:
    """The source `otlp` of one watch: what has come for it. Used by the watch's thread."""

    name = "otlp"

    def __init__(self, board: SpanBoard, key: Key, state: Callable[[], SourceStatus]) -> None:
        self._board = board
        self._key = key
        self._state = state
        self._next = 0
        self.claims = SharedClaims(board, key)

    def start(self) -> None:
        """What came before has its time, too."""
        self._board.show_to(self._key)

    def poll(self, _now_ns: int) -> Readings:
        spans, self._next = self._board.since(self._next, self._key)
        return Readings(engine_spans=spans)

    def status(self) -> SourceStatus:
        return self._state()

    def stop(self) -> None:
        self._board.show_no_more(self._key)


class Receiver:
    """All but `families` in the sidecar's thread; `attend` once a second."""

    def __init__(self) -> None:
        self._board = SpanBoard()
        self._asked: _Asked | None = None
        self._source: OtlpReceiver | None = None
        self._forward: OtlpForwardSink | None = None
        self._backoff = Backoff()
        self._missed = 0  # spans that the source could not keep until they were fetched
        self.reason = ""

    def set(self, options: SidecarOptions) -> None:
        """What to do from the next `attend` on; what was bound before is let go."""
        asked = _asked(options)
        if asked == self._asked:
            return
        self.stop()
        self._asked = asked
        self._backoff.succeeded()

    def attend(self, now_ns: int, owners: Callable[[], OwnerOf]) -> None:
        """Binds, where that has not been possible so far and it is time to try again; moves what
        has come. `owners`: says of a process which engine it belongs to, as things are now."""
        if self._asked is None:
            return
        if self._source is None and self._backoff.due(now_ns):
            try:
                self._begin(self._asked)
            except Exception as error:  # noqa: BLE001 - such as: no more threads; it is told
                self.stop()
                self._backoff.failed(now_ns)
                why = str(error) if isinstance(error, DsagentError) else reason_of(error)
                self.reason = f"{why}; tried again and again"  # no number: that would be news
        if self._source is not None:
            self._move(self._source, now_ns, owners)
        self._board.expire(now_ns)

    def _begin(self, asked: _Asked) -> None:
        outlets = replace(asked.outlets, guard=Guard(asked.guarded_by))
        self._source = make_receiver(outlets)
        self._missed = 0
        forward = make_forward(outlets)
        if forward is not None:
            forward.start()
            self._forward = forward
        assert self._source is not None
        self._source.start()
        self._backoff.succeeded()
        self.reason = ""

    def _move(self, source: OtlpReceiver, now_ns: int, owners: Callable[[], OwnerOf]) -> None:
        readings = source.poll(now_ns)
        missed = source.status().dropped
        self._board.miss(missed - self._missed)
        self._missed = missed
        if readings.engine_spans:
            self._board.put(readings.engine_spans, owners(), now_ns)
        if self._forward is not None:
            self._forward.forward(readings.otlp_bodies)

    def source_for(self, key: Key) -> ReceivedSource | None:
        """Of one watch; None where nothing is received."""
        return None if self._asked is None else ReceivedSource(self._board, key, self._status)

    def _status(self) -> SourceStatus:
        source = self._source
        if source is None:
            return SourceStatus("otlp", "unavailable", self.reason or "it does not listen")
        return SourceStatus("otlp", "ok", source.status().reason)

    def stop(self) -> None:
        """What has come still goes on. May be called twice."""
        self.reason = ""
        source, self._source = self._source, None
        if source is not None:
            source.stop()
            self._move(source, time.monotonic_ns(), lambda: lambda _pid: None)
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.stop(STOP_S)

    def families(self) -> list[Family]:
        """What it has counted: beside what each engine counts, without an engine's label."""
        source, forward, store = self._source, self._forward, Store()
        if source is not None:
            requests, spans = source.counts()
            for (protocol, code), count in requests.items():
                labels = {"protocol": protocol, "code": code}
                store.set(catalog.OTLP_RECEIVER_REQUESTS, count, labels)
            for of, count in spans.items():
                store.set(catalog.OTLP_RECEIVER_SPANS, count, {"of": of})
        for outcome, count in self._board.counts().items():
            store.set(catalog.ENGINE_SPANS, count, {"outcome": outcome})
        if forward is not None:
            set_sinks(store, [forward.status()])
        return store.collect()

    def describe(self) -> dict[str, Any]:
        """Its part of the document of `status`."""
        source, forward = self._source, self._forward
        state = "off" if self._asked is None else "waiting" if source is None else "ok"
        sent = None if forward is None else forward.status()
        return {
            "http": None if self._asked is None else self._asked.outlets.otlp_receive,
            "grpc": None if self._asked is None else self._asked.outlets.otlp_receive_grpc,
            "ports": [] if source is None else list(source.ports),
            "state": state,
            "reason": self.reason or ("" if source is None else source.status().reason),
            "spans": {} if source is None else source.counts()[1],
            "outcomes": self._board.counts(),
            "passed_on": None
            if sent is None
            else {
                "sent": sent.sent,
                "acknowledged": sent.acknowledged,
                "failed": sent.failed,
                "dropped": sent.dropped,
                "reason": sent.reason,
            },
        }


def _asked(options: SidecarOptions) -> _Asked | None:
    if options.otlp_receive is None and options.otlp_receive_grpc is None:
        return None
    outlets = options.attach.outlets
    queue = outlets.otlp_queue
    return _Asked(
        OutletOptions(
            otlp_endpoint=outlets.otlp_endpoint,
            otlp_protocol=outlets.otlp_protocol,
            otlp_queue=None if queue is None else queue / FOLDER,
            otlp_queue_max_bytes=outlets.otlp_queue_max_bytes,
            otlp_receive=options.otlp_receive,
            otlp_receive_grpc=options.otlp_receive_grpc,
        ),
        options.guarded_by,
    )
