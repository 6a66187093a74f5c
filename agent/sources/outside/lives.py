"""From exchanges and steps to the records that an engine with hooks would have written. Pure.

Ids: the request id is the reply's own where it has one; the trace is the
caller's where a traceparent came, and a random one otherwise.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dsagent.agent.facts import Readings
from dsagent.agent.host.procfs import escape
from dsagent.agent.sources.outside.exchanges import Exchange, Heard
from dsagent.agent.sources.outside.steps import Life, Mark, Steps
from dsagent.instrumentation.context import TraceContext, request_context
from dsagent.instrumentation.records import RequestOpen, RequestRecord, request_key

HOLD_NS = 3_000_000_000  # a request that has ended waits for its steps at most so long
MOST_LIVES = 4096
ARRIVALS = 64
ONE_OUTPUT_NS = 1_000_000  # what the core sends closer together is the output of one step

MarkedBy = Literal["function", "sends", "text"]


@dataclass(slots=True)
class _Held:
    life: Life
    context: TraceContext
    name: str  # until the reply says another


@dataclass(slots=True)
class Totals:
    """What was seen, to be held against what the engine itself counts."""

    requests: int = 0  # that ended with an answer below 400
    failed: int = 0
    left: int = 0  # by their client
    tokens: int = 0
    steps: int = 0
    steps_with_text: int = 0


class Lives:
    """All requests of one engine that were seen from outside."""

    def __init__(self, engine_id: int) -> None:
        self._engine_id = engine_id
        self._held: OrderedDict[int, _Held] = OrderedDict()  # by the exchange's number
        self._arrivals: deque[int] = deque(maxlen=ARRIVALS)  # from received to a first step
        self.steps = Steps(engine_id)
        self.totals = Totals()
        self.given_up = 0
        self.marked_by: MarkedBy = "function"
        self._next_step = 0
        self._sent_in_step: set[int] = set()
        self._last_send_ns = 0

    def hear(
        self,
        heard: Heard,
        marks: Iterable[Mark],
        readings: Readings,
        sends: Sequence[Mark] = (),
    ) -> None:
        """A batch of what happened, each kind in order of time. `sends`: what the engine's core
        sent to its front end, which ends a step; not numbered."""
        for exchange in heard.begun:
            self._begin(exchange, readings)
        if self.marked_by == "text":
            self._mark_by_text(heard)
        elif self.marked_by == "sends":
            self._mark_by_sends(heard, sends)
        else:
            for mark in marks:
                self._next_step = max(self._next_step, mark.step_id)
                self.steps.mark(mark)
        for at_ns, exchange in sorted(heard.tokens, key=lambda each: each[0]):
            held = self._held.get(exchange.number)
            if held is not None:
                self.steps.text(at_ns, held.life)

    def tell(self, now_ns: int, readings: Readings) -> None:
        """The steps, and the requests, about which nothing more is to be expected."""
        lives = [held.life for held in self._held.values()]
        told = self.steps.tell(lives, now_ns)
        if self.marked_by != "function":  # the last one sent marks a step that never comes
            told = [step for step in told if step.shares]
        readings.steps += told
        self.totals.steps += len(told)
        self.totals.steps_with_text += sum(
            any(share.output_tokens for share in step.shares) for step in told
        )
        busy_until = self.steps.oldest_waiting_ns
        for number, held in list(self._held.items()):
            ended_ns = held.life.exchange.ended_ns
            if ended_ns is None:
                continue
            if busy_until is None or busy_until >= ended_ns or now_ns - ended_ns > HOLD_NS:
                del self._held[number]
                self._close(held, readings)

    @property
    def at_rest(self) -> bool:
        """Nothing is open, and all is told."""
        return not self._held and self.steps.oldest_waiting_ns is None

    @property
    def open(self) -> int:
        """Requests that have begun and not ended."""
        return len(self.open_trace_ids)

    @property
    def open_trace_ids(self) -> list[int]:
        return [
            held.context.trace_id
            for held in self._held.values()
            if held.life.exchange.ended_ns is None
        ]

    def oldest_open_ns(self) -> int | None:
        return min(
            (
                held.life.exchange.received_ns
                for held in self._held.values()
                if held.life.exchange.ended_ns is None
            ),
            default=None,
        )

    def _begin(self, exchange: Exchange, readings: Readings) -> None:
        context = request_context(exchange.headers.get("traceparent"))
        name = f"http-{exchange.pid}-{exchange.number}"
        life = Life(exchange, request_key(name))
        self._held[exchange.number] = _Held(life, context, name)
        readings.opened.append(
            RequestOpen(
                request_key=life.request_key,
                request_id=name,
                trace_id=context.trace_id,
                span_id=context.span_id,
                parent_span_id=context.parent_span_id,
                sampled=context.sampled,
                received_ns=exchange.received_ns,
                pid=exchange.pid,
                tid=exchange.tid,
                inferred=True,
            )
        )
        while len(self._held) > MOST_LIVES:
            _, dropped = self._held.popitem(last=False)
            readings.forgotten.append(dropped.life.request_key)
            self.given_up += 1

    def _mark_by_text(self, heard: Heard) -> None:
        """A step begins with a request that finds the engine idle, and when the text of the one
        before is sent; that is over when a request sends again."""
        moments: list[tuple[int, int | None, Exchange]] = [
            (e.received_ns, None, e) for e in heard.begun
        ]
        moments += [(at_ns, e.number, e) for at_ns, e in heard.tokens]
        for at_ns, number, exchange in sorted(moments, key=lambda each: each[0]):
            if number is None:
                if self._idle_but_for(exchange):
                    self._made(at_ns, exchange.pid, exchange.tid)
                    self._sent_in_step = set()
            elif number in self._sent_in_step or not self._sent_in_step:
                self._made(at_ns, exchange.pid, exchange.tid)
                self._sent_in_step = {number}
            else:
                self._sent_in_step.add(number)

    def _mark_by_sends(self, heard: Heard, sends: Sequence[Mark]) -> None:
        """A step begins with a request that finds the engine idle, and when the output of the one
        before has been sent."""
        moments = [
            Mark(0, exchange.received_ns, exchange.pid, exchange.tid)
            for exchange in heard.begun
            if self._idle_but_for(exchange)
        ]
        for mark in sorted([*moments, *sends], key=lambda each: each.start_ns):
            if mark.start_ns - self._last_send_ns > ONE_OUTPUT_NS:
                self._made(mark.start_ns, mark.pid, mark.tid)
            self._last_send_ns = mark.start_ns

    def _idle_but_for(self, exchange: Exchange) -> bool:
        """Whether no other request was open when this one came."""
        at_ns = exchange.received_ns
        return not any(
            held.life.exchange.ended_ns is None or held.life.exchange.ended_ns > at_ns
            for other, held in self._held.items()
            if other != exchange.number and held.life.exchange.received_ns <= at_ns
        )

    def _made(self, at_ns: int, pid: int, tid: int) -> None:
        self._next_step += 1
        self.steps.mark(Mark(self._next_step, at_ns + 1, pid, tid))

    def _close(self, held: _Held, readings: Readings) -> None:
        record = self._record(held)
        readings.closed.append(record)
        if record.error is not None:
            self.totals.failed += 1
        elif record.finish_reason == "abort":
            self.totals.left += 1
        else:
            self.totals.requests += 1
        self.totals.tokens += record.output_tokens

    def _record(self, held: _Held) -> RequestRecord:
        life, exchange = held.life, held.life.exchange
        reply = exchange.reply
        sent_ns = max(exchange.ended_ns or 0, exchange.received_ns + 1)
        first_ns = exchange.first_token_ns if exchange.status < 400 else None
        tokens = len(exchange.tokens_ns)
        if reply is not None:
            tokens += reply.hidden_tokens
            tokens = tokens if reply.completion_tokens is None else reply.completion_tokens
        error = None
        reason = (reply.finish_reason if reply is not None else "") or None
        if exchange.outcome == "left by the client":
            reason = "abort"
        elif exchange.status >= 400:
            error, reason = str(exchange.status), None
        elif exchange.outcome != "complete":
            error = "broken_off" if exchange.outcome == "broken off by the server" else "lost"
        return RequestRecord(
            request_key=life.request_key,
            request_id=escape(reply.reply_id) if reply and reply.reply_id else held.name,
            trace_id=held.context.trace_id,
            span_id=held.context.span_id,
            parent_span_id=held.context.parent_span_id,
            sampled=held.context.sampled,
            operation=exchange.operation,
            model=escape(reply.model) if reply is not None else "",
            tenant=None,
            external_id=escape(exchange.headers["x-request-id"])
            if "x-request-id" in exchange.headers
            else None,
            pid=exchange.pid,
            tid=exchange.tid,
            received_ns=exchange.received_ns,
            tokenised_ns=None,
            queued_ns=self._queued_ns(life, sent_ns),
            first_scheduled_ns=_within(life.first_step_ns, exchange.received_ns, sent_ns),
            first_token_ns=_within(life.prefill_ended_ns, exchange.received_ns, sent_ns),
            first_sent_ns=_within(first_ns, exchange.received_ns, sent_ns),
            finished_ns=_within(life.last_end_ns, exchange.received_ns, sent_ns),
            sent_ns=sent_ns,
            prompt_tokens=None if reply is None else reply.prompt_tokens,
            output_tokens=tokens,
            cached_tokens=None if reply is None else reply.cached_tokens,
            max_tokens=None,
            temperature=None,
            top_p=None,
            finish_reason=reason,
            error=error,
            inferred=True,
        )

    def _queued_ns(self, life: Life, sent_ns: int) -> int | None:
        """When the engine had it. Where it was idle, the first step began at once: what went
        before is the front end's. Where a step was running, the front end took as long as it
        usually does."""
        first_ns = life.first_step_ns
        if first_ns is None:
            return None
        received_ns = life.exchange.received_ns
        if not life.found_busy:
            self._arrivals.append(first_ns - received_ns)
            return min(first_ns, sent_ns)
        usual_ns = round(statistics.median(self._arrivals)) if self._arrivals else 0
        return min(received_ns + usual_ns, first_ns, sent_ns)


def _within(at_ns: int | None, low_ns: int, high_ns: int) -> int | None:
    return None if at_ns is None else min(max(at_ns, low_ns), high_ns)
