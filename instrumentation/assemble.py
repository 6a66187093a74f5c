"""Holds steps until the requests they served have ended, then makes the spans of both."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from dsagent.instrumentation.records import RequestRecord, Share, Step
from dsagent.instrumentation.spans import (
    Link,
    Span,
    StepSpans,
    request_link,
    request_spans,
    step_span,
)

MAX_STEPS = 20_000
_ENDED_KEPT = 4_096


@dataclass(slots=True)
class _Held:
    step: Step
    shares: dict[int, Share]
    waiting: set[int]  # request keys that have not ended
    links: list[Link] = field(default_factory=list)

    def resolve(self, record: RequestRecord, kept: bool) -> None:
        self.waiting.discard(record.request_key)
        if kept:
            self.links.append(request_link(record, self.shares[record.request_key]))


class SpanAssembler:
    """Feed it steps and ended requests; each call returns the spans that are complete by then.

    A step's span has links to its kept requests only, and there is none for a step without.
    """

    def __init__(self, *, step_spans: StepSpans = "worst", max_steps: int = MAX_STEPS) -> None:
        self._step_spans: StepSpans = step_spans
        self._max_steps = max_steps
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._steps_of: dict[int, list[int]] = {}
        # A step may come in after the end of an aborted request that it served.
        self._ended: OrderedDict[int, tuple[RequestRecord, bool]] = OrderedDict()
        self.given_up = 0  # steps let go before all their requests had ended

    def add_step(self, step: Step) -> list[Span]:
        shares = {share.request_key: share for share in step.shares}
        held = self._held[step.step_id] = _Held(step, shares, set(shares))
        for key in shares:
            if key in self._ended:
                held.resolve(*self._ended[key])
            else:
                self._steps_of.setdefault(key, []).append(step.step_id)
        spans = self._release(step.step_id)
        if len(self._held) > self._max_steps:
            self.given_up += 1
            spans += self._let_go(next(iter(self._held)))
        return spans

    def end_request(self, record: RequestRecord, *, kept: bool) -> list[Span]:
        key = record.request_key
        self._ended[key] = (record, kept)
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
        step_ids = [id_ for id_ in self._steps_of.pop(key, ()) if id_ in self._held]
        spans: list[Span] = []
        if kept:
            steps = [self._held[step_id].step for step_id in step_ids]
            spans += request_spans(record, steps, parts=None, step_spans=self._step_spans)
        for step_id in step_ids:
            self._held[step_id].resolve(record, kept)
            spans += self._release(step_id)
        return spans

    def flush(self) -> list[Span]:
        """The spans of all steps still held, with the links they have."""
        spans = [span for step_id in list(self._held) for span in self._let_go(step_id)]
        self._steps_of.clear()
        return spans

    def _release(self, step_id: int) -> list[Span]:
        return [] if self._held[step_id].waiting else self._let_go(step_id)

    def _let_go(self, step_id: int) -> list[Span]:
        held = self._held.pop(step_id)
        for key in held.waiting:
            step_ids = self._steps_of.get(key)
            if step_ids is not None and step_ids[0] == step_id:
                step_ids.pop(0)
                if not step_ids:
                    del self._steps_of[key]
        return [step_span(held.step, held.links)] if held.links else []
