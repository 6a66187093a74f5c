"""Requests that go on beyond a limit: they violate it now, not when they end. Pure.

What is certain before a request has ended: it had no output within the limit of TTFT, or has not
ended within that of e2e. Its time per output token may still become anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from dsagent.agent.slo.limits import Limit, Objective
from dsagent.agent.slo.verdicts import SeriesKey
from dsagent.instrumentation.records import RequestOpen, Step

GRACE_NS = 1_000_000_000  # an end or an output that was in time has been read by then
MOST_OPEN = 20_000
MOST_JUDGED = 20_000


class Unfinished:
    """The requests under way, and what they have been judged by already. One that is only inferred
    is left out: seen from outside, a connection that is kept open looks like a request."""

    __slots__ = ("_judged", "_until_end", "_until_output")

    def __init__(self) -> None:
        # By key, in the order in which they came: the first is the oldest.
        self._until_output: OrderedDict[int, RequestOpen] = OrderedDict()
        self._until_end: OrderedDict[int, RequestOpen] = OrderedDict()
        self._judged: OrderedDict[int, set[SeriesKey]] = OrderedDict()

    def see(
        self, opened: Iterable[RequestOpen], ended: Iterable[int], steps: Iterable[Step]
    ) -> None:
        """What has come since the last call; `ended`: request keys."""
        for each in opened:
            if not each.inferred:
                self._until_output[each.request_key] = each
                self._until_end[each.request_key] = each
        if self._until_output:
            for step in steps:
                for share in step.shares:
                    if share.output_tokens:
                        self._until_output.pop(share.request_key, None)
        for key in ended:
            self._until_output.pop(key, None)
            self._until_end.pop(key, None)
        for waiting in (self._until_output, self._until_end):
            while len(waiting) > MOST_OPEN:
                waiting.popitem(last=False)

    def overdue(
        self, limit: Limit, attached_ns: int, now_ns: int
    ) -> Iterator[tuple[RequestOpen, Objective, int]]:
        """Each that is new: the request, what it violates, and by how many ns so far; goodput for
        each limit. Partial requests violate nothing."""
        due: tuple[tuple[OrderedDict[int, RequestOpen], Objective, int | None], ...] = (
            (self._until_output, "ttft", limit.ttft_ns),
            (self._until_end, "e2e", limit.e2e_ns),
        )
        for waiting, objective, limit_ns in due:
            if limit_ns is None:
                continue
            while waiting:
                key, request = next(iter(waiting.items()))
                over_ns = now_ns - request.received_ns - limit_ns
                if over_ns < GRACE_NS:
                    break
                del waiting[key]
                if request.received_ns < attached_ns:
                    continue
                yield request, objective, over_ns
                if limit.goodput_objective_ratio is not None:
                    yield request, "goodput", over_ns

    def judge(self, request: RequestOpen, series: SeriesKey) -> bool:
        """It counts as bad there; whether for the first time."""
        judged = self._judged.setdefault(request.request_key, set())
        while len(self._judged) > MOST_JUDGED:
            self._judged.popitem(last=False)
        is_new = series not in judged
        judged.add(series)
        return is_new

    def take_judged(self, key: int) -> frozenset[SeriesKey]:
        """Where the request that has now ended was counted before."""
        return frozenset(self._judged.pop(key, ()))
