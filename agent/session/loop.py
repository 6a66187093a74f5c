"""The attach loop: sources → accountant → ledger and sinks, until someone or something ends it."""

from __future__ import annotations

import functools
import os
import selectors
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.attribution.engine_spans import Claims, EngineSpans
from dsagent.agent.errors import CANNOT_ATTACH, DsagentError
from dsagent.agent.facts import (
    Event,
    Readings,
    Sample,
    Source,
    SourceStatus,
    Target,
    facts_complete_ns,
    one_array,
)
from dsagent.agent.host import procfs
from dsagent.agent.host.clock import Clock
from dsagent.agent.host.target import check_alive
from dsagent.agent.listening.control import ControlServer, TakenElsewhere
from dsagent.agent.listening.question import Question, parse_question
from dsagent.agent.probes import Tier
from dsagent.agent.session.calls import Calls
from dsagent.agent.session.feeds import Feeds
from dsagent.agent.session.guard import attempt
from dsagent.agent.session.ledger import Ledger
from dsagent.agent.session.normal_keeper import NormalKeeper
from dsagent.agent.session.outlets import Outlets
from dsagent.agent.session.report import Counts, Live, agent_status, engine_status, summary
from dsagent.agent.session.sink_news import SinkNews
from dsagent.agent.session.thrift import TICK_NS, Thrift
from dsagent.agent.session.ticker import Ticker
from dsagent.agent.session.waker import Waker
from dsagent.agent.sinks.base import Explained, Sink

if TYPE_CHECKING:
    from dsagent.agent.anomalies.watch import AnomalyWatch

T = TypeVar("T")

CATCH_UP_NS = 10_000_000  # until the next tick, where one has left something in the rings
MAX_LAG_NS = 5_000_000_000  # further behind than this, accounts do not wait for the steps
STATUS_NS = 1_000_000_000
SINK_DEADLINE_S = 5.0
SETTLE_NS = 500_000_000  # after the end, facts still to come are waited for at most this long
READ_ON_NS = 2_000_000_000  # and what still lies in the rings is read for at most this long
SETTLE_TICK_S = 0.02
GIVE_UP_NS = 10_000_000_000  # beyond any patience: accounts are made of what there is


class Session:
    """One attachment. `run` blocks in the calling thread; `stop` may come from any thread or a
    signal handler."""

    def __init__(
        self,
        target: Target,
        sinks: Sequence[Sink] = (),
        *,
        receiver: Source | None = None,
        claims: Claims | None = None,
        has_profiles: bool = False,
        duration_s: float | None = None,
        max_overhead_ratio: float = 0.01,
        tier: Tier = "default",
        without: Collection[str] = (),
        normal: NormalKeeper | None = None,
        ledger: Ledger | None = None,
        is_asked_elsewhere: bool = False,
        anomalies: AnomalyWatch | None = None,
        on_attached: Callable[[], None] = lambda: None,
        on_live: Callable[[Live], None] = lambda _live: None,
        on_trouble: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.target = target
        self.ledger = Ledger() if ledger is None else ledger
        self.counts = Counts()
        self.accounting_failures = 0
        self._duration_s = duration_s
        self._is_asked_elsewhere = is_asked_elsewhere
        self._on_attached = on_attached
        self._on_live = on_live
        self._on_trouble = on_trouble
        self._feeds = Feeds(
            target,
            without,
            receiver,
            tier=tier,
            profiles_within=max_overhead_ratio if has_profiles else None,
        )
        self._max_overhead_ratio = max_overhead_ratio
        self._tier: Tier = tier
        self._engine_spans = None if receiver is None else EngineSpans(claims)
        self._outlets = Outlets(sinks)
        self._normal = normal
        self._anomalies = anomalies
        self._served: str | None = None  # the name of the model, once a request has told it
        self._clock = Clock()
        self._waker = Waker()
        self._calls = Calls(self._waker)
        self._stopping = False
        self.target_ended = False
        self.detached = False  # it was asked to end, by `dsagent detach`

    def stop(self) -> None:
        """Once it has ended, this does nothing."""
        self._stopping = True
        self._waker.wake()

    @property
    def unfinished(self) -> int:
        """Requests seen to begin and not to end; once the target has ended, those it took along.
        In the session's own thread, or after it."""
        return self._feeds.steps.unfinished

    @property
    def unfinished_trace_ids(self) -> list[int]:
        """Of those, but for some where they are many."""
        return self._feeds.steps.unfinished_trace_ids

    def sources(self) -> tuple[SourceStatus, ...]:
        return self._feeds.statuses()

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """Has the session's thread do it, after it has read what there is, and returns what came of
        it. From another thread only. Raises what `work` raises, and TimeoutError."""
        return self._calls.ask(work, timeout_s)

    def run(self) -> dict[str, Any]:
        """The `attach` document. Raises DsagentError where attaching fails."""
        with closing(self._waker), selectors.DefaultSelector() as selector:
            pidfd = self._watch_target(selector)
            try:
                selector.register(self._waker.fd, selectors.EVENT_READ, self._on_wake)
                control = self._listen(selector)
                try:
                    return self._attached(selector, control)
                finally:
                    if control is not None:
                        control.close()
                    self._feeds.stop()
                    self._outlets.stop(0.0)
                    self._calls.do()
            finally:
                os.close(pidfd)

    def _listen(self, selector: selectors.BaseSelector) -> ControlServer | None:
        """Also claims the target. None where a pod in the same network has a process with that
        pid, and questions come another way."""
        try:
            return ControlServer(self.target.pid, selector, self._answer)
        except TakenElsewhere:
            if not self._is_asked_elsewhere:
                raise
            return None

    def _on_wake(self, _mask: int) -> None:
        self._waker.take()
        if self._calls.are_there:
            self._tick(time.monotonic_ns())
            self._calls.do()

    def _watch_target(self, selector: selectors.BaseSelector) -> int:
        try:
            pidfd = os.pidfd_open(self.target.pid)
        except ProcessLookupError as error:
            raise DsagentError(
                f"cannot attach: process {self.target.pid} ended while attaching",
                exit_code=CANNOT_ATTACH,
            ) from error
        selector.register(pidfd, selectors.EVENT_READ, self._on_target_end)
        return pidfd

    def _on_target_end(self, _mask: int) -> None:
        self.target_ended = True

    def _attached(
        self, selector: selectors.BaseSelector, control: ControlServer | None
    ) -> dict[str, Any]:
        self._outlets.start()
        self._feeds.start()
        check_alive(self.target)
        self._begin(time.monotonic_ns())
        self._on_attached()
        ticker = Ticker(TICK_NS, self._attached_ns)
        next_ns = ticker.deadline_ns
        while not self._stopping and not self.target_ended:
            now_ns = time.monotonic_ns()
            until_ns = min(next_ns, self._end_ns)
            for key, mask in selector.select(max(0, until_ns - now_ns) / 1e9):
                key.data(mask)
            now_ns = time.monotonic_ns()
            if now_ns >= self._end_ns:
                break
            if now_ns < next_ns:
                continue
            if now_ns >= ticker.deadline_ns:
                self._feeds.lag_ns = ticker.advance(now_ns)
            ticker.interval_ns = self._tick(now_ns)
            if control is not None:
                control.expire(now_ns)
            next_ns = ticker.deadline_ns
            if self._feeds.steps.behind:
                next_ns = min(next_ns, time.monotonic_ns() + CATCH_UP_NS)
        return self._finish()

    def _begin(self, now_ns: int) -> None:
        self._attached_ns = self._feeds.steps.attached_ns = now_ns
        self._end_ns = (
            1 << 62 if self._duration_s is None else now_ns + round(self._duration_s * 1e9)
        )
        self._next_status_ns = now_ns
        self._accountant = Accountant(now_ns)
        for feed in self._feeds.all:
            if not feed.runs:
                self._accountant.source_off(feed.name)
        self._thrift = Thrift(
            self._feeds, self._accountant, self.target.pid, self._max_overhead_ratio, self._tier
        )
        self._pending_events: list[Event] = []
        self._sink_news = SinkNews(self._on_trouble)

    def _tick(self, now_ns: int) -> int:
        """Moves what has come; returns when to tick again, in ns from now."""
        cpu_ns = time.thread_time_ns()
        self._pass_on(now_ns)
        self.ledger.expire(now_ns)
        return self._thrift.ticked(time.thread_time_ns() - cpu_ns)

    def _pass_on(self, now_ns: int, *, gives_up: bool = False) -> None:
        brought = self._poll(now_ns)
        due_ns = now_ns + GIVE_UP_NS if gives_up else self._due_ns(now_ns)
        accounts = self._accounting(now_ns, lambda: self._accountant.due(due_ns)) or []
        view = self._accountant.view
        for account in accounts:
            self._accounting(now_ns, functools.partial(self.ledger.add, account))
            self.counts.requests += account.record.sent_ns >= self._attached_ns
            if account.record.first_scheduled_ns is not None:
                self._served = account.record.model
        self._compare_with_normal(now_ns)
        samples = [sample for readings in brought for sample in readings.samples]
        samples += self._measure(now_ns)
        anchor = self._clock.anchor(now_ns)
        if self._engine_spans is not None:
            spans = [span for readings in brought for span in readings.engine_spans]
            join = functools.partial(
                self._engine_spans.pass_on, tuple(accounts), spans, anchor, now_ns
            )
            accounts = self._accounting(now_ns, join) or []
            for account in accounts:
                self._accounting(now_ns, functools.partial(self.ledger.renew, account))
            samples += self._engine_spans.samples(now_ns)
        opened = tuple(opened for readings in brought for opened in readings.opened)
        steps = tuple(step for readings in brought for step in readings.steps)
        events = [event for readings in brought for event in readings.events]
        if self._anomalies is not None:
            look = functools.partial(self._anomalies.look, opened, steps, accounts, now_ns)
            found = self._accounting(now_ns, look) or []
            for event in found:
                self._on_trouble(event.message)
            events += found
            sampled = functools.partial(self._anomalies.samples, now_ns)
            samples += self._accounting(now_ns, sampled) or []
        events += self._pending_events
        self._pending_events = []
        sinks = self._outlets.statuses()
        events += self._sink_news.of(sinks, now_ns)
        self._outlets.take(
            Explained(
                target=self.target,
                anchor=anchor,
                now_ns=now_ns,
                attached_ns=self._attached_ns,
                due_ns=due_ns,
                facts_complete_ns=facts_complete_ns(brought),
                view=view,
                opened=opened,
                ended=tuple(key for readings in brought for key in readings.ended),
                accounts=tuple(accounts),
                steps=steps,
                rank_steps=tuple(step for readings in brought for step in readings.rank_steps),
                facts=one_array(brought),
                names={pid: name for readings in brought for pid, name in readings.names.items()},
                samples=tuple(samples),
                events=tuple(events),
                sources=self._feeds.statuses(),
                sinks=sinks,
                uncounted_losses=self._feeds.steps.uncounted_losses,
                otlp_bodies=tuple(body for readings in brought for body in readings.otlp_bodies),
                profiles=tuple(run for readings in brought for run in readings.profiles),
            )
        )

    def _compare_with_normal(self, now_ns: int, *, is_last: bool = False) -> None:
        """What there is to tell is told to people, and to the sinks as events."""
        if self._normal is None:
            return
        look = self._normal.end if is_last else self._normal.look
        model, served = self._accountant.model, self._served
        events = self._accounting(now_ns, lambda: look(model, served, now_ns)) or []
        for event in events:
            self._on_trouble(event.message)
        self._pending_events += events

    def _due_ns(self, now_ns: int) -> int:
        """While steps still lie unread, the accountant's time is that of the last one read: what
        is there already is not waited for in vain."""
        steps = self._feeds.steps
        if not steps.behind or steps.last_step_end_ns is None:
            return now_ns
        return max(now_ns - MAX_LAG_NS, min(now_ns, steps.last_step_end_ns))

    def _poll(self, now_ns: int) -> list[Readings]:
        brought = self._feeds.poll(now_ns)
        for name in self._feeds.take_failed():
            self._accountant.source_off(name)
        for readings in brought:
            self._accounting(now_ns, functools.partial(self._accountant.add, readings))
            self._thrift.add_facts(readings.facts)
            for step in readings.steps:
                if step.end_ns >= self._attached_ns:
                    self.counts.steps += 1
                    self.counts.shares += len(step.shares)
                    self.counts.tokens += sum(share.output_tokens for share in step.shares)
        return brought

    def _accounting(self, now_ns: int, call: Callable[[], T]) -> T | None:
        """A fault of ours must not end what goes on without it: counted, and told the first
        time."""
        result, why = attempt(call)
        if why:
            self.accounting_failures += 1
            if self.accounting_failures == 1:
                message = f"accounting failed, some requests will be missing: {why}"
                self._pending_events.append(Event("agent.failed", now_ns, message))
        return result

    def _measure(self, now_ns: int) -> list[Sample]:
        """Once a second: what we cost; steps down where that is too much; shows progress."""
        if now_ns < self._next_status_ns:
            return []
        self._next_status_ns = now_ns + STATUS_NS
        self._pending_events += self._thrift.keep(self.counts, now_ns)
        self._on_live(
            Live(
                (now_ns - self._attached_ns) / 1e9,
                self.counts,
                self._feeds.statuses(),
                self._thrift.overhead.ratio,
            )
        )
        if self._thrift.overhead.window is None:
            return []
        return [Sample("dsagent.agent.overhead", self._thrift.overhead.window.ratio, now_ns)]

    def look_into_kernel(self, why_not: str | None) -> None:
        """From now on, or not for that reason. In the session's own thread only."""
        self._thrift.look_into_kernel(why_not)

    def _settle(self) -> None:
        """The last readings: the facts that ended requests still wait for come within half a
        second, or are done without."""
        ended_ns = now_ns = time.monotonic_ns()
        self._feeds.steps.look_again()
        self._pass_on(now_ns)
        while self._feeds.steps.behind and now_ns < ended_ns + READ_ON_NS:
            now_ns = time.monotonic_ns()
            self._pass_on(now_ns)
        while self._accountant.waiting and now_ns < ended_ns + SETTLE_NS:
            time.sleep(SETTLE_TICK_S)
            now_ns = time.monotonic_ns()
            self._pass_on(now_ns)
        while self._accountant.waiting and now_ns < ended_ns + READ_ON_NS:
            now_ns = time.monotonic_ns()
            self._pass_on(now_ns, gives_up=True)
        if self._accountant.waiting:
            left = self._accountant.waiting
            self._on_trouble(f"{left} requests that had ended were too much to account for in time")
        if self._engine_spans is not None:
            self._engine_spans.let_go()
            self._pass_on(now_ns)
        self._feeds.steps.leave_unread()

    def _finish(self) -> dict[str, Any]:
        """The summary, once every account is made that still can be."""
        ended_ns = time.monotonic_ns()
        self._compare_with_normal(ended_ns, is_last=True)
        self._settle()
        self._thrift.measure(self.counts, time.monotonic_ns())
        pss_bytes = procfs.own_pss_bytes()
        self._calls.do()  # sinks may take their time to end
        self._feeds.stop()
        self._outlets.stop(SINK_DEADLINE_S)
        sinks = self._outlets.statuses()
        self._sink_news.of(sinks, ended_ns)
        document = summary(
            self.target,
            self.counts,
            self._feeds,
            self._thrift.overhead,
            sinks,
            duration_ns=ended_ns - self._attached_ns,
            accounting_failures=self.accounting_failures,
            clock_error_ns=self._clock.error_ns,
            pss_bytes=pss_bytes,
        )
        return {**document, **self._found(self._attached_ns)}

    def _found(self, since_ns: int) -> dict[str, Any]:
        """`anomalies`, where they are watched for."""
        if self._anomalies is None:
            return {}
        return {"anomalies": self._anomalies.document(since_ns)}

    def status(self) -> dict[str, Any]:
        """How it stands, as `status` tells it. In the session's own thread only: see `call`."""
        return engine_status(
            self.target,
            self.counts,
            self._feeds,
            self._thrift.overhead,
            self._outlets.statuses(),
            model=self._served,
            attached_unix_ns=self._clock.anchor(time.monotonic_ns()).unix(self._attached_ns),
            accounting_failures=self.accounting_failures,
        )

    def explain(self, question: Question, now_ns: int) -> dict[str, Any]:
        """In the session's own thread only. Raises DsagentError (exit 2) where there is none."""
        return self.ledger.explain(
            question.wanted,
            now_ns=now_ns,
            last_ns=question.last_ns,
            by=question.by,
            unfinished=lambda: self._accountant.open_accounts(now_ns),
            find=lambda wanted: self._accountant.find(wanted, now_ns),
        )

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A question from the control socket. Raises DsagentError (exit 2) for a bad one."""
        question = parse_question(request)
        now_ns = time.monotonic_ns()
        self._tick(now_ns)
        match question.op:
            case "explain":
                return self.explain(question, now_ns)
            case "why":
                answer = self.ledger.why(now_ns=now_ns, last_ns=question.last_ns)
                return {**answer, **self._found(now_ns - question.last_ns)}
            case "status":
                return {**agent_status("attach"), "engines": [self.status()]}
            case "detach":
                self.detached = True
                self.stop()
                return {}
