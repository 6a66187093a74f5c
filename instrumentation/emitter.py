"""Spans from the engine's own process, made in a thread of their own.

The engine's threads only append to a bounded queue; all the rest happens here,
after a request has ended.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol

from dsagent.instrumentation.assemble import SpanAssembler
from dsagent.instrumentation.records import RequestRecord
from dsagent.instrumentation.rows import ShareRow, StepHead, step_from_rows
from dsagent.instrumentation.spans import Span

_log = logging.getLogger(__name__)

MAX_QUEUED = 20_000  # steps and ended requests not yet looked at
_POLL_S = 0.2
# A request may be closed a little before its last step is reported.
_SETTLE_NS = 1_000_000_000

P = ParamSpec("P")
_StepRow = tuple[StepHead, tuple[ShareRow, ...], int]


class Pipeline(Protocol):
    """Where finished spans go; the emitter's thread calls it."""

    def keeps(self, record: RequestRecord) -> bool:
        """Whether the spans of this request are wanted."""

    def emit(self, spans: Sequence[Span]) -> None: ...

    def stop(self, deadline_s: float) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class EmitterCounts:
    dropped: int  # steps and requests that found the queue full
    given_up: int  # steps let go before all the requests they served had ended
    errors: int  # failures in this thread, which goes on


class SpanEmitter:
    """An `Exporter` for the observer of an engine."""

    def __init__(self, pipeline: Pipeline, *, engine_id: int, max_queued: int = MAX_QUEUED) -> None:
        self._pipeline = pipeline
        self._engine_id = engine_id
        self._max_queued = max_queued
        self._queue: deque[_StepRow | RequestRecord] = deque()
        self._settling: deque[tuple[int, RequestRecord]] = deque()  # (time it came, record)
        self._assembler = SpanAssembler()
        self._dropped = 0
        self._errors = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsagent-spans", daemon=True)
        self._thread.start()

    def offer_step(self, head: StepHead, shares: tuple[ShareRow, ...], tid: int) -> None:
        self._offer((head, shares, tid))

    def offer_request(self, record: RequestRecord) -> None:
        self._offer(record)

    def _offer(self, item: _StepRow | RequestRecord) -> None:
        if len(self._queue) < self._max_queued:
            self._queue.append(item)
        else:
            self._dropped += 1

    def counts(self) -> EmitterCounts:
        return EmitterCounts(self._dropped, self._assembler.given_up, self._errors)

    def stop(self, deadline_s: float) -> None:
        """Emit what is there, for at most so long; a back end that hangs is left hanging."""
        end_s = time.monotonic() + deadline_s
        self._stopping.set()
        self._thread.join(deadline_s)
        self._pipeline.stop(max(0.0, end_s - time.monotonic()))
        counts = self.counts()
        if counts.dropped or counts.given_up or counts.errors:
            _log.warning("spans lost on the way out: %s", counts)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(_POLL_S)
            self._drain(settle_ns=0 if stopping else _SETTLE_NS)
        self._guarded(self._assembler.flush)

    def _guarded(self, make: Callable[P, list[Span]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Emit what `make` makes; a failure is counted and the thread goes on."""
        try:
            self._pipeline.emit(make(*args, **kwargs))
        except Exception:  # noqa: BLE001  nobody above could do better
            self._errors += 1
            if self._errors == 1:
                _log.exception("cannot make spans; further failures are only counted")

    def _drain(self, settle_ns: int) -> None:
        """Take in what came; end the requests that came at least `settle_ns` ago."""
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, RequestRecord):
                self._settling.append((time.monotonic_ns(), item))
            else:
                self._guarded(self._add_step, item)
        settled_ns = time.monotonic_ns() - settle_ns
        while self._settling and self._settling[0][0] <= settled_ns:
            self._guarded(self._end_request, self._settling.popleft()[1])

    def _add_step(self, row: _StepRow) -> list[Span]:
        head, shares, tid = row
        step = step_from_rows(head, shares, engine_id=self._engine_id, pid=os.getpid(), tid=tid)
        return self._assembler.add_step(step)

    def _end_request(self, record: RequestRecord) -> list[Span]:
        # This process is the one that exports the SERVER span, not one beside it.
        record = dataclasses.replace(record, self_exported=False)
        return self._assembler.end_request(record, kept=self._pipeline.keeps(record))
