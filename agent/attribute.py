"""Where each nanosecond of one request went, and who is to blame. Pure: no I/O, no clock.

A request's life is walked from its first byte to its last in *stretches*: in
the front end until queued, waiting in pieces of other requests' steps, in its
own steps, in the front end again. Each stretch is charged once: first what the
kernel measured there (already laid on the time line by join.py), the rest to
what the stretch was. In a forward pass the rest is split by the clean-step
model: its own compute, the other decodes, other requests' prefill. A compute
part never exceeds the prediction plus its residual band; what is beyond, and
has no evidence of its own, stays unattributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsagent.agent.account import Account, How, Part
from dsagent.agent.fact_store import FactStore
from dsagent.agent.join import (
    Delay,
    Joiner,
    Piece,
    Section,
    Watched,
    split,
)
from dsagent.agent.model import CleanStepModel, shape
from dsagent.agent.sheet import UNATTRIBUTED, Charge, Stretch, sum_up
from dsagent.instrumentation.records import Admission, Phase, RequestRecord, Share, Step

LEAST_BAND_RATIO = 0.02  # a fit on few steps knows its own noise too well
STALL_NS = 2_000_000_000
STALL_STEPS = 10


@dataclass(frozen=True, slots=True)
class RequestView:
    """All that is known of one request's life."""

    record: RequestRecord  # an unfinished one: sent_ns is now
    finished: bool
    attached_ns: int
    pieces: Sequence[Piece]  # of the engine's steps that overlap its life, in order
    facts: FactStore
    watched: Watched
    names: Mapping[int, str]  # comm by pid or tid
    requests: Mapping[int, tuple[str, str]]  # request_key → id, trace id
    engine_id: int = 0

    def joined(self, section: Section) -> Section:
        """A section that no whole piece has: part of one, or the step that still runs."""
        facts = self.facts.overlapping(section.start_ns, section.end_ns)
        return Joiner(facts, self.watched).section(section)


def attribute(view: RequestView, model: CleanStepModel) -> Account:
    """The account of one request. Its parts and `unattributed_ns` add up to e2e, those of the
    second partition to TTFT, both to the nanosecond."""
    record = view.record
    stretches = list(_walk(view, model))
    parts, unattributed_ns, delayed_by = sum_up(
        stretches, view.names, view.requests, model.clean_steps
    )
    ttft_parts: tuple[Part, ...] = ()
    ttft_unattributed_ns: int | None = None
    if record.first_sent_ns is not None:
        first = list(_until_first_token(stretches, view))
        ttft_parts, ttft_unattributed_ns, _ = sum_up(
            first, view.names, view.requests, model.clean_steps
        )
    key = record.request_key
    return Account(
        record=record,
        partial=record.received_ns < view.attached_ns,
        finished=view.finished,
        e2e_ns=record.e2e_ns,
        parts=parts,
        unattributed_ns=unattributed_ns,
        ttft_parts=ttft_parts,
        ttft_unattributed_ns=ttft_unattributed_ns,
        delayed_by=delayed_by,
        step_ids=tuple(p.step.step_id for p in view.pieces if _share(p.step, key)),
        engine_id=view.engine_id,
    )


def _walk(view: RequestView, model: CleanStepModel) -> Iterator[Stretch]:
    """The stretches of a life, in order, without a hole."""
    record = view.record
    key, end_ns = record.request_key, record.sent_ns
    own = [i for i, piece in enumerate(view.pieces) if _share(piece.step, key)]
    at_ns = record.received_ns
    if at_ns < view.attached_ns:
        unseen_ns = min(view.attached_ns, end_ns)
        yield Stretch(at_ns, unseen_ns, [Charge("unobserved", unseen_ns - at_ns)])
        at_ns = unseen_ns
    queued_ns = record.queued_ns
    if queued_ns is None:
        # Refused before it was queued, or still open: then the engine's records tell.
        queued_ns = end_ns if view.finished or not own else view.pieces[own[0]].step.start_ns
    queued_ns = min(max(queued_ns, at_ns), end_ns)
    if queued_ns > at_ns:
        yield _in_front_end("frontend.in", at_ns, queued_ns, view)
    at_ns = queued_ns
    last = own[-1] if own else len(view.pieces) - 1
    if record.finished_ns is not None and not own:
        last = -1
    for i, piece in enumerate(view.pieces[: last + 1]):
        if piece.end_ns <= at_ns or piece.start_ns >= end_ns:
            continue
        if piece.start_ns > at_ns:
            # Before the first step that was seen the engine was idle; elsewhere steps are missing.
            idle = piece.step.step_id == 1 or piece.follows
            cause = "engine.gap" if idle else "unobserved"
            yield Stretch(at_ns, piece.start_ns, [Charge(cause, piece.start_ns - at_ns)])
            at_ns = piece.start_ns
        until_ns = min(piece.end_ns, end_ns)
        share = _share(piece.step, key)
        next_share = share or next(
            (s for j in own if j > i and (s := _share(view.pieces[j].step, key))), None
        )
        before_first = not own or i < own[0]
        for section in _within(piece, at_ns, until_ns, view):
            if share is not None:
                charges = _own(section, piece.step, share, model)
            elif before_first:
                charges = _waiting(section, piece.step, queued_ns, key)
            else:
                preempted = next_share is not None and next_share.recompute
                charges = _passed_over(section, piece.step, key, preempted=preempted)
            yield Stretch(section.start_ns, section.end_ns, charges)
        at_ns = until_ns
    if at_ns < end_ns:
        yield from _tail(view, at_ns, end_ns, in_engine=bool(own) or record.queued_ns is not None)


def _tail(view: RequestView, at_ns: int, end_ns: int, *, in_engine: bool) -> Iterator[Stretch]:
    """After the last output: the front end sends it; or, of an unfinished request, the step that
    is running now, of which nothing is known but what the kernel says."""
    if view.finished or not in_engine:
        yield _in_front_end("frontend.out", at_ns, end_ns, view)
        return
    lengths = sorted(piece.end_ns - piece.start_ns for piece in view.pieces)
    usual_ns = lengths[len(lengths) // 2] if lengths else 0
    stalled = end_ns - at_ns > max(STALL_NS, STALL_STEPS * usual_ns)
    section = view.joined(Section("forward", at_ns, end_ns))
    rest_ns = section.ns - section.delayed_ns
    charges = _delays(section.delays)
    charges.append(Charge("engine.stalled" if stalled else UNATTRIBUTED, rest_ns))
    yield Stretch(at_ns, end_ns, charges)


def _until_first_token(stretches: Sequence[Stretch], view: RequestView) -> Iterator[Stretch]:
    """The stretches up to the output of the first token, then the front end up to its sending."""
    record = view.record
    first_sent_ns = record.first_sent_ns
    assert first_sent_ns is not None
    key = record.request_key
    output_ns = next(
        (p.end_ns for p in view.pieces if (s := _share(p.step, key)) and s.output_tokens), None
    )
    if output_ns is None:
        output_ns = record.first_token_ns if record.first_token_ns is not None else first_sent_ns
    output_ns = min(max(output_ns, record.received_ns), first_sent_ns)
    at_ns = record.received_ns
    for stretch in stretches:
        if stretch.end_ns > output_ns:
            break
        yield stretch
        at_ns = stretch.end_ns
    if at_ns < first_sent_ns:
        yield _in_front_end("frontend.out", at_ns, first_sent_ns, view)


def _within(piece: Piece, start_ns: int, end_ns: int, view: RequestView) -> Iterator[Section]:
    """The piece's sections within [start_ns, end_ns); one that is cut is laid out anew."""
    for section in piece.sections:
        low, high = max(section.start_ns, start_ns), min(section.end_ns, end_ns)
        if high <= low:
            continue
        if (low, high) == (section.start_ns, section.end_ns):
            yield section
        else:
            yield view.joined(Section(section.kind, low, high))


def _in_front_end(cause: str, start_ns: int, end_ns: int, view: RequestView) -> Stretch:
    """The front end's own thread counts there."""
    front = Watched(view.record.pid, view.record.tid, frozenset())
    facts = view.facts.overlapping(start_ns, end_ns)
    section = Joiner(facts, front).section(Section("host", start_ns, end_ns))
    charges = _delays(section.delays)
    charges.append(Charge(cause, section.ns - section.delayed_ns))
    return Stretch(start_ns, end_ns, charges)


def _waiting(section: Section, step: Step, queued_ns: int, key: int) -> list[Charge]:
    """Queued, in a step (or the gap before one) that it has no part in."""
    charges = _delays(section.delays)
    rest_ns = section.ns - section.delayed_ns
    if section.kind == "gap":
        return [*charges, Charge("engine.gap", rest_ns)]
    if queued_ns > step.start_ns + step.schedule_ns:
        # It came when this step's batch was already chosen: it waits for those in it.
        return [*charges, _by_others("queue.wait", rest_ns, step, key, _scheduled)]
    if step.admission is Admission.NO_KV_BLOCKS:
        return [*charges, _by_others("queue.kv_blocks", rest_ns, step, key, _held)]
    if step.admission is Admission.NO_BUDGET:
        return [*charges, _by_others("batch.not_scheduled", rest_ns, step, key, _prefilled)]
    return [*charges, _by_others("queue.wait", rest_ns, step, key, _one)]


def _passed_over(section: Section, step: Step, key: int, *, preempted: bool) -> list[Charge]:
    """Admitted before, but not in this step."""
    charges = _delays(section.delays)
    rest_ns = section.ns - section.delayed_ns
    if preempted:
        return [*charges, _by_others("preempted", rest_ns, step, key, _held)]
    if section.kind == "gap":
        return [*charges, Charge("engine.gap", rest_ns)]
    return [*charges, _by_others("batch.not_scheduled", rest_ns, step, key, _prefilled)]


def _own(section: Section, step: Step, share: Share, model: CleanStepModel) -> list[Charge]:
    """In a step that it takes part in."""
    charges = _delays(section.delays)
    rest_ns = section.ns - section.delayed_ns
    if share.recompute and section.kind != "gap":
        return [*charges, Charge("preempted", rest_ns)]
    if section.kind == "gap":
        return [*charges, Charge("engine.gap", rest_ns)]
    if section.kind == "host":
        return [*charges, Charge("engine.host", rest_ns)]
    return [*charges, *_forward(rest_ns, step, share, model)]


def _forward(rest_ns: int, step: Step, share: Share, model: CleanStepModel) -> list[Charge]:
    """Splits what a forward pass took, less its known delay, between the request and the others.

    The prediction for the request alone is its own compute; what the others' decodes and the
    others' prefill add to the prediction is sharing and interference."""
    others = [other for other in step.shares if other is not share]
    prefills = [other for other in others if other.phase is Phase.PREFILL]
    decodes = [other for other in others if other.phase is Phase.DECODE]
    kin = decodes if share.phase is Phase.DECODE else prefills
    whole = shape(step.shares)
    how: How = "modelled" if model.is_fitted(whole) else "assumed"
    alone_ns = model.predict_ns(shape([share]))
    with_kin_ns = model.predict_ns(shape([share, *kin]))
    whole_ns = model.predict_ns(whole)
    limit_ns = rest_ns
    if alone_ns is None or with_kin_ns is None or whole_ns is None:
        own, by_decodes, by_prefills = share.scheduled_tokens, _tokens(decodes), _tokens(prefills)
    else:
        by_kin, by_different = max(0, with_kin_ns - alone_ns), max(0, whole_ns - with_kin_ns)
        own = alone_ns
        by_decodes, by_prefills = (
            (by_kin, by_different) if kin is decodes else (by_different, by_kin)
        )
        if how == "modelled":
            band_ratio = max(model.band_ratio, LEAST_BAND_RATIO)
            limit_ns = round((own + by_kin + by_different) * (1 + band_ratio))
    spent_ns = min(rest_ns, limit_ns)
    own_ns, decodes_ns, prefills_ns = split(spent_ns, [own, by_decodes, by_prefills])
    return [
        Charge("prefill.compute" if kin is prefills else "decode.compute", own_ns, how),
        Charge("batch.decode_sharing", decodes_ns, how, tokens=_tokens(decodes)),
        Charge(
            "batch.prefill_interference",
            prefills_ns,
            how,
            _shared_out(prefills_ns, prefills, _scheduled),
            tokens=_tokens(prefills),
        ),
        Charge(UNATTRIBUTED, rest_ns - own_ns - decodes_ns - prefills_ns),
    ]


def _delays(delays: Sequence[Delay]) -> list[Charge]:
    return [Charge(d.cause, d.ns, blames=d.blames, facts=d.facts) for d in delays]


def _by_others(cause: str, ns: int, step: Step, key: int, weigh: Callable[[Share], int]) -> Charge:
    others = [share for share in step.shares if share.request_key != key]
    if not others:
        return Charge("engine.gap", ns)
    return Charge(cause, ns, "measured", _shared_out(ns, others, weigh), tokens=_tokens(others))


def _shared_out(ns: int, shares: Sequence[Share], weigh: Callable[[Share], int]) -> dict[int, int]:
    """request_key → its part of `ns`, by weight; alike where nobody weighs anything."""
    weights = [weigh(share) for share in shares]
    if not any(weights):
        weights = [1] * len(shares)
    sizes = split(ns, weights)
    return {share.request_key: size for share, size in zip(shares, sizes, strict=True) if size}


def _scheduled(share: Share) -> int:
    return share.scheduled_tokens


def _prefilled(share: Share) -> int:
    return share.scheduled_tokens if share.phase is Phase.PREFILL else 0


def _held(share: Share) -> int:
    return share.context_tokens + share.scheduled_tokens


def _one(share: Share) -> int:
    return 1


def _tokens(shares: Sequence[Share]) -> int:
    return sum(share.scheduled_tokens for share in shares)


def _share(step: Step, key: int) -> Share | None:
    return next((share for share in step.shares if share.request_key == key), None)
