"""The engine's own span of a request, joined to our account of it instead of doubling it.

An engine that is traced itself exports a SERVER span for each request (vLLM: `llm_request`). It
comes by OTLP some seconds after the request's end, since exporters send in batches. Until then
the account is held back from the sinks (`explain` has it at once). With it, our span becomes one
below the engine's, and the engine's figures are compared with ours. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from dsagent.agent.attribution.account import Account, EngineSpanFigure, JoinedEngineSpan
from dsagent.agent.facts import ClockAnchor, EngineSpan, Sample
from dsagent.instrumentation.records import RequestRecord

K = TypeVar("K")
_Caller = tuple[int, int | None]  # trace id, and the caller's span

HOLD_NS = 7_000_000_000  # the SDK's batches leave every 5 s, unless told otherwise
KEEP_SPAN_NS = 5_000_000_000  # a span may come before the account of its request is made
MOST_SPANS = 4096
MOST_HELD = 20_000
MOST_ALIKE = 64  # of one id, or one trace and caller: among more, none is looked for
TOLERANCE_NS = 50_000_000  # between the engine's wall clock and ours, for what is one request
BOUND_NS = 5_000_000  # figures may differ by this, or by BOUND_RATIO if that is more
BOUND_RATIO = 0.02


class Claims:
    """Who may have a span that fits a request: here whoever asks, since there is one engine."""

    counts_unmatched = (
        True  # spans that nobody has had in the end are counted by who was shown them
    )

    def take(self, span: EngineSpan, *, is_named: bool, now_ns: int) -> bool:
        """Whether the span is the asker's from now on. `is_named`: it fits by the engine's request
        id, and not only by trace, caller and time. May be asked again after a no."""
        return True


class EngineSpans:
    """Accounts in, accounts out: joined ones as soon as both sides are known, the others once
    they have been held for `hold_ns`."""

    def __init__(self, claims: Claims | None = None, hold_ns: int = HOLD_NS) -> None:
        self._claims = claims or Claims()
        self._hold_ns = hold_ns
        self._held: OrderedDict[int, Account] = OrderedDict()  # by order of coming
        self._due: OrderedDict[int, int] = OrderedDict()
        self._by_request: dict[str, set[int]] = {}
        self._by_caller: dict[_Caller, set[int]] = {}
        self._early: OrderedDict[int, tuple[int, EngineSpan]] = OrderedDict()  # by span id
        self._to_ask: set[int] = set()  # span ids: new, or refused by the claims so far
        self._changed: set[str | _Caller] = set()  # names and callers whose requests are others now
        self._next = 0
        self._let_all_go = False
        self.outcomes: Counter[str] = Counter()  # of spans: joined, unmatched, repeated
        self.figures: Counter[tuple[str, bool]] = Counter()  # (attribute, whether it agrees)

    def let_go(self) -> None:
        """It ends: no account is held any longer."""
        self._let_all_go = True

    def pass_on(
        self,
        accounts: Iterable[Account],
        spans: Iterable[EngineSpan],
        anchor: ClockAnchor,
        now_ns: int,
    ) -> list[Account]:
        """Takes what is new and gives back the accounts that need not be held any longer."""
        for account in accounts:
            self._hold(account, now_ns)
        for span in spans:
            if span.span_id in self._early:
                self.outcomes["repeated"] += 1
            else:
                self._early[span.span_id] = (now_ns, span)
                self._to_ask.add(span.span_id)
        out: list[Account] = []
        for span in self._worth_a_look():
            number, is_named = self._request_of(span, anchor)
            if number is None:
                self._to_ask.discard(span.span_id)
            elif self._claims.take(span, is_named=is_named, now_ns=now_ns):
                self._forget(span.span_id)
                out.append(self._join(self._release(number), span))
            else:
                self._to_ask.add(span.span_id)
        while self._early:
            span_id, (came_ns, _) = next(iter(self._early.items()))
            if now_ns - came_ns <= KEEP_SPAN_NS and len(self._early) <= MOST_SPANS:
                break
            self._forget(span_id)
            self._unmatched()
        while self._due and (
            self._let_all_go
            or len(self._held) > MOST_HELD
            or next(iter(self._due.values())) <= now_ns
        ):
            out.append(self._release(next(iter(self._due))))
        return out

    def _worth_a_look(self) -> list[EngineSpan]:
        """Spans for which there may be another answer than the last time."""
        changed, self._changed = self._changed, set()
        if not changed and not self._to_ask:
            return []
        return [
            span
            for span_id, (_, span) in self._early.items()
            if span_id in self._to_ask
            or (span.trace_id, span.parent_span_id) in changed
            or not changed.isdisjoint(_ids(span))
        ]

    def _forget(self, span_id: int) -> None:
        del self._early[span_id]
        self._to_ask.discard(span_id)

    def _unmatched(self) -> None:
        if self._claims.counts_unmatched:
            self.outcomes["unmatched"] += 1

    def samples(self, now_ns: int) -> list[Sample]:
        """What has been counted so far, by the catalogue's names."""
        outcomes = [
            Sample("dsagent.engine_span.spans", count, now_ns, {"outcome": outcome})
            for outcome, count in self.outcomes.items()
        ]
        figures = [
            Sample(
                "dsagent.engine_span.figures",
                count,
                now_ns,
                {"figure": figure, "agrees": "true" if agrees else "false"},
            )
            for (figure, agrees), count in self.figures.items()
        ]
        return outcomes + figures

    def _hold(self, account: Account, now_ns: int) -> None:
        number = self._next
        self._next += 1
        self._held[number] = account
        self._due[number] = now_ns + self._hold_ns
        names, caller = _names(account.record), _caller(account.record)
        for name in names:
            self._by_request.setdefault(name, set()).add(number)
        self._by_caller.setdefault(caller, set()).add(number)
        self._changed |= {*names, caller}

    def _release(self, number: int) -> Account:
        account = self._held.pop(number)
        del self._due[number]
        names, caller = _names(account.record), _caller(account.record)
        for name in names:
            _discard(self._by_request, name, number)
        _discard(self._by_caller, caller, number)
        self._changed |= {*names, caller}
        return account

    def _request_of(self, span: EngineSpan, anchor: ClockAnchor) -> tuple[int | None, bool]:
        """The held request that is the span's: by the engine's request id (True), else as the only
        one of its trace and caller. Ids repeat, and clients choose some: the times must fit, too.
        """
        start_ns = anchor.mono_ns + span.start_unix_ns - anchor.unix_ns
        end_ns = anchor.mono_ns + span.end_unix_ns - anchor.unix_ns

        def fits(number: int) -> bool:
            record = self._held[number].record
            overlaps = (
                start_ns <= record.sent_ns + TOLERANCE_NS
                and end_ns >= record.received_ns - TOLERANCE_NS
            )
            return overlaps and (record.trace_id == span.trace_id or _is_rootless(record))

        found = set[int]().union(*(self._by_request.get(each, ()) for each in _ids(span)))
        named = [n for n in found if fits(n)] if len(found) <= MOST_ALIKE else []
        if len(named) > 1:  # one client's id for several requests: each has its own caller's span
            named = [n for n in named if self._held[n].record.parent_span_id == span.parent_span_id]
        if named:
            return (named[0] if len(named) == 1 else None), True
        alike = self._by_caller.get((span.trace_id, span.parent_span_id), ())
        siblings = [n for n in alike if fits(n)] if len(alike) <= MOST_ALIKE else []
        return (siblings[0] if len(siblings) == 1 else None), False

    def _join(self, account: Account, span: EngineSpan) -> Account:
        """Our span of the request becomes one below the engine's; so it is in the engine's trace
        where the request brought no context, and the trace id was made up."""
        self.outcomes["joined"] += 1
        record = account.record
        compared = tuple(_compare(record, span))
        for each in compared:
            self.figures[each.figure, each.agrees] += 1
        joined = JoinedEngineSpan(
            span_id=f"{span.span_id:016x}",
            name=span.name,
            scope=span.scope,
            figures=compared,
            replaced_trace_id=None if span.trace_id == record.trace_id else account.trace_id,
        )
        record = replace(
            record,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_span_id=span.parent_span_id,
            self_exported=True,
        )
        return replace(account, record=record, engine_span=joined)


def _ids(span: EngineSpan) -> set[str]:
    """A completion's prompts are numbered; clients, and so we, see the first one's without."""
    shown = span.request_id.removesuffix("-0")
    return {span.request_id, shown} if shown.startswith("cmpl-") else {span.request_id}


def _caller(record: RequestRecord) -> _Caller:
    return record.trace_id, record.parent_span_id


def _names(record: RequestRecord) -> set[str]:
    """What the engine may call the request. vLLM adds eight random hexadecimal digits to its ids
    inside, and exports them without."""
    names = {record.request_id}
    if record.external_id:
        names.add(record.external_id)
    stem, dash, tail = record.request_id.rpartition("-")
    if dash and len(tail) == 8 and all(c in "0123456789abcdef" for c in tail):
        names.add(stem)
    return names


def _is_rootless(record: RequestRecord) -> bool:
    """It came without trace context: each side made up a trace id of its own."""
    return record.sampled is None and record.parent_span_id is None


def _discard(index: dict[K, set[int]], key: K, number: int) -> None:
    numbers = index.get(key, set())
    numbers.discard(number)
    if not numbers:
        index.pop(key, None)


def _compare(record: RequestRecord, span: EngineSpan) -> Iterator[EngineSpanFigure]:
    """Each of the engine's figures that we have, too."""
    ours_ns = {
        # Its own e2e ends where the last output was known, before that was sent.
        "gen_ai.latency.e2e": _between(record.received_ns, record.finished_ns),
        "gen_ai.latency.time_to_first_token": _between(record.received_ns, record.first_token_ns),
        "gen_ai.latency.time_in_queue": _between(record.queued_ns, record.first_scheduled_ns),
        "gen_ai.latency.time_in_model_prefill": _between(
            record.first_scheduled_ns, record.first_token_ns
        ),
        "gen_ai.latency.time_in_model_decode": _between(record.first_token_ns, record.finished_ns),
        "gen_ai.latency.time_in_model_inference": _between(
            record.first_scheduled_ns, record.finished_ns
        ),
    }
    for figure, own_ns in ours_ns.items():
        seconds = span.figures.get(figure)
        if seconds is not None and own_ns is not None:
            engine_ns = round(seconds * 1e9)
            bound_ns = max(BOUND_NS, BOUND_RATIO * max(engine_ns, own_ns))
            agrees = abs(engine_ns - own_ns) <= bound_ns
            yield EngineSpanFigure(figure, engine_ns, own_ns, "ns", agrees)
    ours = {
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
    }
    for figure, own in ours.items():
        tokens = span.figures.get(figure)
        if tokens is not None and own is not None:
            yield EngineSpanFigure(figure, round(tokens), own, "tokens", round(tokens) == own)


def _between(start_ns: int | None, end_ns: int | None) -> int | None:
    return None if start_ns is None or end_ns is None else end_ns - start_ns
