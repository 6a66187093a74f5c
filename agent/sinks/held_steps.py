"""Steps, held until it is known which of the requests they served are kept."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dsagent.instrumentation.records import RequestRecord, Step
from dsagent.instrumentation.spans import Span, request_link, step_span

HOLD_NS = 5_000_000_000  # after the last request a step served has ended
MAX_STEPS = 200_000
MAX_BYTES = 32 << 20
ENDED_REMEMBERED = 8192

_Id = tuple[int, int]  # engine_id, step_id


@dataclass(slots=True)
class _Held:
    step: Step
    open_keys: set[int]  # of requests that have not ended
    kept: dict[int, RequestRecord] = field(default_factory=dict)
    last_ended_ns: int = 0

    @property
    def bytes(self) -> int:
        """What it takes in memory, measured once and rounded up: a share is 7 integers."""
        return 600 + 250 * len(self.step.shares)


class HeldSteps:
    """Feed it steps and ended requests; `due` gives back the spans of steps that serve a kept one.
    Bounded in number and bytes: the oldest are given up, and counted."""

    def __init__(self, max_steps: int = MAX_STEPS, max_bytes: int = MAX_BYTES) -> None:
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._held: OrderedDict[_Id, _Held] = OrderedDict()
        self._steps_of: dict[int, list[_Id]] = {}
        self._due: list[tuple[int, _Id]] = []  # heap: when to let go, of which
        # A step may come in after the end of a request that it served; None: not kept.
        self._ended: OrderedDict[int, tuple[RequestRecord, bool]] = OrderedDict()
        self._bytes = 0
        self.given_up = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, step: Step) -> None:
        step_key = (step.engine_id, step.step_id)
        keys = {share.request_key for share in step.shares}
        held = _Held(step, set(keys))
        if step_key in self._held:
            return  # the same record twice
        self._held[step_key] = held
        self._bytes += held.bytes
        for key in keys:
            ended = self._ended.get(key)
            if ended is None:
                self._steps_of.setdefault(key, []).append(step_key)
            else:
                self._resolve(step_key, *ended)
        while len(self._held) > self._max_steps or self._bytes > self._max_bytes:
            self._give_up(next(iter(self._held)))

    def steps_of(self, engine_id: int, step_ids: Iterable[int]) -> list[Step]:
        """Those that are still held."""
        found = (self._held.get((engine_id, step_id)) for step_id in step_ids)
        return [held.step for held in found if held is not None]

    def end_request(self, record: RequestRecord, *, kept: bool) -> None:
        key = record.request_key
        self._ended[key] = (record, kept)
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        for step_key in self._steps_of.pop(key, ()):
            if step_key in self._held:
                self._resolve(step_key, record, kept)

    def due(self, now_ns: int) -> list[Span]:
        """The spans of the steps whose time has come; `now_ns` is monotonic."""
        spans = []
        while self._due and self._due[0][0] <= now_ns:
            _, step_key = heapq.heappop(self._due)
            if step_key in self._held:
                spans += self._let_go(step_key)
        return spans

    def flush(self) -> list[Span]:
        """The spans of all steps that serve a kept request, with the links known by now."""
        spans = [span for step_key in list(self._held) for span in self._let_go(step_key)]
        self._steps_of.clear()
        self._due.clear()
        return spans

    def _resolve(self, step_key: _Id, record: RequestRecord, kept: bool) -> None:
        held = self._held[step_key]
        held.open_keys.discard(record.request_key)
        held.last_ended_ns = max(held.last_ended_ns, record.sent_ns)
        if kept:
            held.kept[record.request_key] = record
        if not held.open_keys:
            heapq.heappush(self._due, (held.last_ended_ns + HOLD_NS, step_key))

    def _let_go(self, step_key: _Id) -> list[Span]:
        held = self._held.pop(step_key)
        self._bytes -= held.bytes
        links = [
            request_link(held.kept[share.request_key], share)
            for share in held.step.shares
            if share.request_key in held.kept
        ]
        return [step_span(held.step, links)] if links else []

    def _give_up(self, step_key: _Id) -> None:
        held = self._held.pop(step_key)
        self._bytes -= held.bytes
        self.given_up += 1
        for key in held.open_keys:
            step_keys = self._steps_of.get(key, [])
            if step_keys and step_keys[0] == step_key:  # the oldest step is the first of each
                step_keys.pop(0)
            if not step_keys:
                self._steps_of.pop(key, None)
