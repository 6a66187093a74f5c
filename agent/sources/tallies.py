"""The source `experts`: how the experts of a mixture are loaded, and how drafts fare.

Made of the tallies in the engine's rings. What is shown is the last minute; what an engine does not
tell is absent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from dsagent.agent.facts import Readings, Sample, SourceStatus
from dsagent.agent.host.procfs import escape
from dsagent.instrumentation.tally import Tally, What

WINDOW_NS = 60_000_000_000
EVERY_NS = 5_000_000_000
MOST_TALLIES = 65_536  # in the window: 58 layers of 8 workers every 2 s are 14,000
# An expert without a token is dead only where its fair share would have been some: by chance
# alone, one in e**20 gets none.
FAIR_SHARE_TOKENS = 20.0

Counts = npt.NDArray[np.int64]


class TallySource:
    """`take`: the tallies that have come since it was last called."""

    name = "experts"

    def __init__(self, take: Callable[[], Iterable[Tally]]) -> None:
        self._take = take
        self._window: deque[Tally] = deque()
        self._next_ns = 0
        self._dropped = 0
        self._summary = ""
        self._cost_ns = 0

    def start(self) -> None:
        """It needs nothing."""

    def poll(self, now_ns: int) -> Readings:
        started_ns = time.thread_time_ns()
        self._window.extend(self._take())
        while len(self._window) > MOST_TALLIES:
            self._window.popleft()
            self._dropped += 1
        readings = Readings()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + EVERY_NS
            while self._window and self._window[0].end_ns < now_ns - WINDOW_NS:
                self._window.popleft()
            readings.samples.extend(self._expert_samples(now_ns))
            readings.samples.extend(self._draft_samples(now_ns))
        self._cost_ns += time.thread_time_ns() - started_ns
        return readings

    def _expert_samples(self, now_ns: int) -> Iterator[Sample]:
        worst: tuple[float, str, int] | None = None
        for label, tokens in _by_layer(self._window):
            routed = int(tokens.sum())
            if not routed:
                continue
            layer = {"layer": label}
            ratio = float(tokens.max()) * len(tokens) / routed
            yield Sample("dsagent.moe.expert_load.max_ratio", ratio, now_ns, layer)
            dead = 0
            if routed / len(tokens) >= FAIR_SHARE_TOKENS:
                dead = int((tokens == 0).sum())
                yield Sample("dsagent.moe.experts.dead", dead, now_ns, layer)
            if worst is None or ratio > worst[0]:
                worst = ratio, label, dead
        if worst is not None:
            yield Sample("dsagent.moe.expert_load.worst_ratio", worst[0], now_ns)
            dead_text = f", {worst[2]} dead" if worst[2] else ""
            self._summary = escape(f"worst layer {worst[1]}: {worst[0]:.2f} × the mean{dead_text}")

    def _draft_samples(self, now_ns: int) -> Iterator[Sample]:
        drafts, accepted = _drafts(self._window)
        if not drafts:
            return
        length = 1 + sum(accepted) / drafts
        yield Sample("dsagent.spec_decode.acceptance_length", length, now_ns)
        for position, count in enumerate(accepted):
            where = {"position": str(position)}
            yield Sample("dsagent.spec_decode.acceptance_ratio", count / drafts, now_ns, where)

    def status(self) -> SourceStatus:
        if not self._summary and not any(t.what is What.DRAFTS_ACCEPTED for t in self._window):
            reason = (
                "the engine has told of no experts and no drafts: its model has none, it has not "
                "run 32 steps yet, or this version of it, or its way (compiled, CUDA graphs), "
                "cannot be watched"
            )
            return SourceStatus(self.name, "unavailable", reason, cost_ns=self._cost_ns)
        return SourceStatus(self.name, "ok", self._summary, self._dropped, cost_ns=self._cost_ns)

    def stop(self) -> None:
        self._window.clear()


def _by_layer(tallies: Iterable[Tally]) -> Iterator[tuple[str, Counts]]:
    """Tokens by expert, of each layer in the order they run, summed over engines and ranks. A
    label that comes with another number of experts is another model's: counted apart."""
    found: dict[tuple[int, str, int], Counts] = {}
    for tally in tallies:
        if tally.what is What.EXPERT_TOKENS and tally.counts:
            key = (tally.index, tally.label, len(tally.counts))
            counts = np.array(tally.counts, np.int64)
            found[key] = found[key] + counts if key in found else counts
    for (_, label, _), counts in sorted(found.items(), key=lambda item: item[0]):
        yield label, counts


def _drafts(tallies: Iterable[Tally]) -> tuple[int, list[int]]:
    """Drafts, and how many had at least so many tokens accepted."""
    drafts = 0
    accepted: list[int] = []
    for tally in tallies:
        if tally.what is What.DRAFTS_ACCEPTED and tally.counts:
            drafts += tally.counts[0]
            more = len(tally.counts) - 1 - len(accepted)
            accepted += [0] * more
            for position, count in enumerate(tally.counts[1:]):
                accepted[position] += count
    return drafts, accepted
