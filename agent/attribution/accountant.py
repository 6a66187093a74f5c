"""Keeps what the sources bring until each request can be accounted for.

Readings come in out of step: a request is closed by the front end before the
step that ended it is read, and the kernel's facts follow later still. A step
is joined when the facts are complete up to its end, a request accounted for
when its last step is joined; nothing waits longer than `PATIENCE_NS`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict, deque
from dataclasses import replace

import numpy as np

from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.attribute import RequestView, attribute, last_output_ns
from dsagent.agent.attribution.engine_steps import EngineSteps, Surroundings
from dsagent.agent.attribution.fact_store import FactStore
from dsagent.agent.attribution.join import Watched
from dsagent.agent.attribution.model import CleanStepModel
from dsagent.agent.attribution.norms import Norms
from dsagent.agent.attribution.pieces import Piece
from dsagent.agent.facts import Facts, Readings, View
from dsagent.instrumentation.records import RankStep, RequestOpen, RequestRecord, Step

PATIENCE_NS = 1_000_000_000
KEEP_NS = 15_000_000_000  # of what no open request needs any more
MOST_SHARES = 200_000  # in kept steps: about 50 MB
MOST_FACTS = 400_000
MOST_NAMES = 20_000
MOST_OPEN = 20_000  # requests begun, and ended but still waiting for their facts
MOST_UNFINISHED = 8  # accounts of requests that go on, at one asking
MOST_ENGINES = 16
MOST_WORK = 200_000  # shares of steps looked at in one call: a fraction of a second
MOST_RANK_STEPS = 16_384  # whose step has not come yet
MOST_FRONT_ENDS = 256
MOST_VIEWS = 256  # changes of what is looked at


class Accountant:
    """Readings in, accounts out. One thread calls it; times are CLOCK_MONOTONIC nanoseconds."""

    def __init__(self, attached_ns: int) -> None:
        self.attached_ns = attached_ns
        self.given_up = 0  # steps and facts dropped: too many at once, or times that cannot be
        self._engines: dict[int, EngineSteps] = {}
        self._rank_steps: OrderedDict[tuple[int, int], list[RankStep]] = OrderedDict()
        self._open: OrderedDict[int, RequestOpen] = OrderedDict()
        self._closed: list[RequestRecord] = []
        self._requests: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._names: OrderedDict[int, str] = OrderedDict()
        self._facts = FactStore()
        self._norms = Norms()
        self._front_ends: frozenset[int] = frozenset()  # threads that received requests
        self._shares_held = 0
        self._fresh: list[Facts] = []
        self._facts_complete_ns: int | None = None
        self._kernel_off = False
        self._views: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=MOST_VIEWS)

    def looks_at_all_but(self, now_ns: int, names: tuple[str, ...]) -> None:
        """From now on. Their causes stay unattributed, and accounts say so."""
        self._views.append((now_ns, names))

    def _not_looked_at(self, record: RequestRecord) -> tuple[str, ...]:
        names: set[str] = set()
        until_ns = record.sent_ns
        for since_ns, missing in reversed(self._views):
            if since_ns < until_ns and until_ns > record.received_ns:
                names.update(missing)
            until_ns = min(until_ns, since_ns)
        return tuple(sorted(names))

    def source_off(self, name: str) -> None:
        """A source that will bring nothing: the kernel's facts are not waited for any more."""
        if name == "kernel":
            self._kernel_off = True
            self._facts_complete_ns = None

    def source_on(self, name: str) -> None:
        """It brings something again."""
        if name == "kernel":
            self._kernel_off = False

    @property
    def view(self) -> View:
        since_ns, names = self._views[-1] if self._views else (None, ())
        return View(not self._kernel_off, names, since_ns)

    def look(self, view: View) -> None:
        """As another accountant did, whose readings are the next to come."""
        (self.source_on if view.waits_for_kernel else self.source_off)("kernel")
        if view.since_ns is not None and view != self.view:
            self.looks_at_all_but(view.since_ns, view.not_looked_at)

    @property
    def model(self) -> CleanStepModel:
        """Of the engine whose steps were read last; an empty one before any."""
        return max(
            self._engines.values(),
            key=lambda engine: engine.last.end_ns if engine.last else 0,
            default=EngineSteps(0),
        ).model

    def add(self, readings: Readings) -> None:
        """One poll of one source."""
        for opened in readings.opened:
            self._open[opened.request_key] = opened
            self._know(opened.request_key, opened.request_id, opened.trace_id)
        for record in readings.closed:
            self._open.pop(record.request_key, None)
            self._know(record.request_key, record.request_id, record.trace_id)
            self._closed.append(record)
        tids = {opened.tid for opened in readings.opened}
        if not tids <= self._front_ends and len(self._front_ends) < MOST_FRONT_ENDS:
            self._front_ends |= tids
        for key in readings.forgotten:
            self._open.pop(key, None)
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
            self.given_up += 1
        if len(self._closed) > MOST_OPEN:
            self.given_up += len(self._closed) - MOST_OPEN
            del self._closed[:-MOST_OPEN]
        for rank_step in readings.rank_steps:
            self._add_rank_step(rank_step)
        for step in readings.steps:
            self._add_step(step)
        if len(readings.facts):
            self._add_facts(readings.facts)
        if readings.facts_complete_ns is not None:
            self._facts_complete_ns = readings.facts_complete_ns
        for number, name in readings.names.items():
            self._names[number] = name
            self._names.move_to_end(number)
        while len(self._names) > MOST_NAMES:
            self._names.popitem(last=False)

    def due(self, now_ns: int) -> list[Account]:
        """The requests that have ended and can be accounted for. What is too much for one call
        is left for the next: a request that took part in many large steps is work, and nobody
        must be kept waiting by hundreds of them."""
        for engine in self._engines.values():
            self._join(engine, now_ns)
        self._fresh.clear()
        accounts: list[Account] = []
        waiting: list[RequestRecord] = []
        work = 0
        for record in self._closed:
            if work >= MOST_WORK or not self._is_ready(record, now_ns):
                waiting.append(record)
                continue
            work += sum(1 + len(piece.shares) for piece in self._pieces_of(record)[1])
            accounts.append(self._norms.judge(self._account(record, finished=True)))
        self._closed = waiting
        self._prune(now_ns)
        return accounts

    @property
    def waiting(self) -> int:
        """Requests that have ended and are not accounted for yet."""
        return len(self._closed)

    def open_accounts(self, now_ns: int) -> list[Account]:
        """Those of the unfinished requests that have taken longest, up to now: each is work, and
        thousands that never end must not hold up whoever asks for the slowest."""
        begun = [opened for opened in self._open.values() if opened.received_ns < now_ns]
        oldest = heapq.nsmallest(MOST_UNFINISHED, begun, key=self._partial_last)
        return [self._account(_so_far(opened, now_ns), finished=False) for opened in oldest]

    def _partial_last(self, opened: RequestOpen) -> tuple[bool, int]:
        return opened.received_ns < self.attached_ns, opened.received_ns

    def find(self, wanted: str, now_ns: int) -> Account | None:
        """The account of an unfinished request by its request id or trace id (32 hex digits)."""
        for opened in list(self._open.values()):
            if wanted in (opened.request_id, f"{opened.trace_id:032x}"):
                return self._account(_so_far(opened, now_ns), finished=False)
        return None

    def _know(self, key: int, request_id: str, trace_id: int) -> None:
        self._requests[key] = (request_id, f"{trace_id:032x}")
        while len(self._requests) > MOST_NAMES:
            self._requests.popitem(last=False)

    def _add_facts(self, facts: Facts) -> None:
        can_be = (facts["start_ns"] <= facts["end_ns"]) & (facts["ns"] >= 0)
        if not can_be.all():
            self.given_up += int(np.count_nonzero(~can_be))
            facts = facts[can_be]
        self._fresh.append(facts)
        self._facts.add(facts)

    def _add_rank_step(self, rank_step: RankStep) -> None:
        """A rank tells before the scheduler does: it has finished first."""
        key = rank_step.engine_id, rank_step.step_id
        self._rank_steps.setdefault(key, []).append(rank_step)
        if len(self._rank_steps) > MOST_RANK_STEPS:
            self._rank_steps.popitem(last=False)
            self.given_up += 1

    def _add_step(self, step: Step) -> None:
        engine = self._engines.get(step.engine_id)
        if engine is None:
            if len(self._engines) >= MOST_ENGINES:
                self.given_up += 1
                return
            engine = self._engines[step.engine_id] = EngineSteps(step.engine_id)
        ranks = self._rank_steps.pop((step.engine_id, step.step_id), ())
        self.given_up += engine.read(step, ranks)

    def _join(self, engine: EngineSteps, now_ns: int) -> None:
        """Joins the steps up to whose end the facts are complete."""
        engine.see_threads(self._fresh)
        ready: list[Piece] = []
        while engine.waiting and self._facts_reach(engine.waiting[0].step.end_ns, now_ns):
            ready.append(engine.waiting.popleft())
        if not ready:
            return
        facts = self._facts.overlapping(ready[0].start_ns, ready[-1].end_ns)
        around = Surroundings(self.attached_ns, not self._kernel_off, self._front_ends)
        self._shares_held += engine.join(ready, facts, around)

    def _facts_reach(self, moment_ns: int, now_ns: int) -> bool:
        complete_ns = self._facts_complete_ns
        return complete_ns is None or complete_ns >= moment_ns or now_ns - moment_ns > PATIENCE_NS

    def _is_ready(self, record: RequestRecord, now_ns: int) -> bool:
        if now_ns - record.sent_ns > PATIENCE_NS:
            return True
        if not self._facts_reach(record.sent_ns, now_ns):
            return False
        if record.first_scheduled_ns is None or record.finished_ns is None:
            return record.queued_ns is None
        engines = self._engines.values()
        if engines and all(engine.reaches(record.finished_ns) for engine in engines):
            return True
        # Of several engines only the one that served it knows whether all its steps are there.
        engine, pieces = self._pieces_of(record)
        if engine.reaches(record.finished_ns) and any(
            record.request_key in piece.shares for piece in pieces
        ):
            return True
        return last_output_ns(record, pieces) is not None

    def _account(self, record: RequestRecord, *, finished: bool) -> Account:
        engine, pieces = self._pieces_of(record)
        step = pieces[-1].step if pieces else engine.last
        watched = (
            Watched(record.pid, record.tid, engine.gang) if step is None else engine.watched(step)
        )
        view = RequestView(
            record=record,
            finished=finished,
            attached_ns=self.attached_ns,
            pieces=pieces,
            facts=self._facts,
            watched=watched,
            names=self._names,
            requests=self._requests,
            model=engine.model,
            engine_id=engine.engine_id,
        )
        return replace(attribute(view), not_looked_at=self._not_looked_at(record))

    def _pieces_of(self, record: RequestRecord) -> tuple[EngineSteps, list[Piece]]:
        """The engine that served it and the pieces that overlap its life."""
        best: tuple[EngineSteps, list[Piece]] = (
            next(iter(self._engines.values()), EngineSteps(0)),
            [],
        )
        for engine in self._engines.values():
            pieces = engine.pieces_of(record)
            if any(record.request_key in piece.shares for piece in pieces):
                return engine, pieces
            if not best[1]:
                best = (engine, pieces)
        return best

    def _prune(self, now_ns: int) -> None:
        """Drops what no open or waiting request can need; over the caps, the oldest too."""
        needed = [opened.received_ns for opened in self._open.values()]
        needed += [record.received_ns for record in self._closed]
        keep_ns = min([now_ns - KEEP_NS, *needed])
        for engine in self._engines.values():
            unneeded = bisect_right(engine.ends, keep_ns)
            first = 0
            while first < len(engine.ends) and (
                first < unneeded or self._shares_held > MOST_SHARES
            ):
                self._shares_held -= 1 + len(engine.pieces[first].shares)
                first += 1
            self.given_up += max(0, first - unneeded)
            del engine.pieces[:first], engine.ends[:first]
        self.given_up += self._facts.prune(keep_ns, MOST_FACTS)


def _so_far(opened: RequestOpen, now_ns: int) -> RequestRecord:
    """What is known of an unfinished request, as if it ended now."""
    return RequestRecord(
        request_key=opened.request_key,
        request_id=opened.request_id,
        trace_id=opened.trace_id,
        span_id=opened.span_id,
        parent_span_id=opened.parent_span_id,
        sampled=opened.sampled,
        operation="",
        model="",
        tenant=None,
        external_id=None,
        pid=opened.pid,
        tid=opened.tid,
        received_ns=opened.received_ns,
        tokenised_ns=None,
        queued_ns=opened.received_ns,  # all but a moment of it: the front end tells at the end
        first_scheduled_ns=None,
        first_token_ns=None,
        first_sent_ns=None,
        finished_ns=None,
        sent_ns=now_ns,
        prompt_tokens=None,
        output_tokens=0,
        cached_tokens=None,
        max_tokens=None,
        temperature=None,
        top_p=None,
        finish_reason=None,
        error=None,
        inferred=opened.inferred,
    )
