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

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsagent.agent.attribution.account import Account, Evidence, How, Part
from dsagent.agent.attribution.fact_store import FactStore
from dsagent.agent.attribution.join import Joiner, Watched, no_more_than
from dsagent.agent.attribution.model import CleanStepModel, shape
from dsagent.agent.attribution.others import (
    WAITS,
    by_others,
    equally,
    interference,
    tokens_held,
    tokens_prefilled,
    tokens_scheduled,
)
from dsagent.agent.attribution.pieces import EXECUTING, Blame, Delay, Piece, Section, split
from dsagent.agent.attribution.runs import Runs
from dsagent.agent.attribution.sheet import UNATTRIBUTED, Charge, Stretch, sum_up
from dsagent.instrumentation.records import Phase, RequestRecord, Share

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
    model: CleanStepModel
    engine_id: int = 0

    @property
    def stall_ns(self) -> int:
        """From this length on the loop did not work, it stood still."""
        lengths = sorted(piece.end_ns - piece.start_ns for piece in self.pieces)
        return max(STALL_NS, STALL_STEPS * lengths[len(lengths) // 2]) if lengths else STALL_NS

    def joined(self, section: Section, rank_pid: int | None = None) -> Section:
        """A section that no whole piece has: part of one, or the step that still runs."""
        facts = self.facts.overlapping(section.start_ns, section.end_ns)
        return Joiner(facts, self.watched).section(section, rank_pid)


def last_output_ns(record: RequestRecord, pieces: Sequence[Piece]) -> int | None:
    """The end of the last piece in which the request got a token; None where not all are there."""
    found = 0
    last_ns = None
    for piece in pieces:
        share = piece.shares.get(record.request_key)
        if share is not None and share.output_tokens:
            found += share.output_tokens
            last_ns = piece.end_ns
    return last_ns if found >= record.output_tokens else None


def attribute(view: RequestView) -> Account:
    """The account of one request. Its parts and `unattributed_ns` add up to e2e, those of the
    second partition to TTFT, both to the nanosecond."""
    record = view.record
    stretches = list(_walk(view))
    if record.inferred:
        _label_inferred(stretches)
    parts, unattributed_ns, delayed_by = sum_up(
        stretches, view.names, view.requests, _of_model(view.model)
    )
    ttft_parts: tuple[Part, ...] = ()
    ttft_unattributed_ns: int | None = None
    if record.first_sent_ns is not None:
        first = list(_until_first_token(stretches, view))
        if record.inferred:
            _label_inferred(first)
        ttft_parts, ttft_unattributed_ns, _ = sum_up(
            first, view.names, view.requests, _of_model(view.model)
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
        step_ids=tuple(p.step.step_id for p in view.pieces if key in p.shares),
        engine_id=view.engine_id,
    )


def _label_inferred(stretches: Sequence[Stretch]) -> None:
    """What rests on steps that nobody told is assumed; what the kernel measured stays measured."""
    for stretch in stretches:
        for charge in stretch.charges:
            if charge.how == "measured" and not charge.facts:
                charge.how = "assumed"


def _of_model(model: CleanStepModel) -> list[Evidence]:
    """What modelled parts rest on."""
    evidence = [Evidence("model", "clean steps known", model.clean_steps, "{step}")]
    if model.normal_ratio is not None:
        evidence.append(
            Evidence("model", "clean steps by the last normal", model.normal_ratio, "1")
        )
    return evidence


def _walk(view: RequestView) -> Iterator[Stretch]:
    """The stretches of a life, in order, without a hole."""
    record = view.record
    end_ns = record.sent_ns
    own = [i for i, piece in enumerate(view.pieces) if record.request_key in piece.shares]
    at_ns = record.received_ns
    if at_ns < view.attached_ns:
        unseen_ns = min(view.attached_ns, end_ns)
        yield Stretch(at_ns, unseen_ns, [Charge("unobserved", unseen_ns - at_ns)])
        at_ns = unseen_ns
    queued_ns = min(max(end_ns if record.queued_ns is None else record.queued_ns, at_ns), end_ns)
    if queued_ns > at_ns:
        yield _in_front_end("frontend.in", at_ns, queued_ns, view)
    # The engine holds it until its last output; one that was given up or is not finished, to
    # the end.
    held_ns = end_ns
    if view.finished and not _given_up(record):
        # A front end in another process learns late that it was done.
        told = (record.finished_ns, last_output_ns(record, view.pieces))
        done_ns = min((moment for moment in told if moment is not None), default=queued_ns)
        held_ns = min(max(done_ns, queued_ns), end_ns)
    at_ns = queued_ns
    for stretch in _in_engine(view, own, queued_ns, held_ns):
        yield stretch
        at_ns = stretch.end_ns
    if at_ns < held_ns:
        yield _unseen_engine(view, at_ns, held_ns)
        at_ns = held_ns
    if at_ns < end_ns:
        yield _in_front_end("frontend.out", at_ns, end_ns, view)


def _given_up(record: RequestRecord) -> bool:
    """The client left, or the engine failed it: nothing tells when the engine let it go."""
    return record.queued_ns is not None and (
        record.finished_ns is None or record.finish_reason == "abort"
    )


def _in_engine(
    view: RequestView, own: Sequence[int], queued_ns: int, held_ns: int
) -> Iterator[Stretch]:
    """From the queue to the last output, piece by piece."""
    key = view.record.request_key
    stall_ns = view.stall_ns
    runs = Runs(
        view.pieces,
        own,
        key,
        view.model,
        held_ns=held_ns,
        stall_ns=stall_ns,
        cut_ns=_first_output_ns(view),
    )
    at_ns = queued_ns
    for i, piece in enumerate(view.pieces):
        if piece.end_ns <= at_ns:
            continue
        if at_ns >= held_ns or piece.start_ns >= held_ns:
            return
        if piece.start_ns == at_ns and (end := runs.end(i)) > i:
            until_ns = view.pieces[end - 1].end_ns
            yield Stretch(at_ns, until_ns, list(runs.charges(i, end, interference)))
            at_ns = until_ns
            continue
        if piece.start_ns > at_ns:
            # Between two steps that follow one another nothing is missing: the engine was idle.
            cause = "engine.gap" if piece.follows else "unobserved"
            yield Stretch(at_ns, piece.start_ns, [Charge(cause, piece.start_ns - at_ns)])
            at_ns = piece.start_ns
        share = piece.shares.get(key)
        until_ns = min(piece.end_ns, held_ns)
        for section in _within(piece, at_ns, until_ns, view):
            if _rest_ns(section) > stall_ns and section.kind not in EXECUTING:
                charges = [*_delays(section.delays), Charge("engine.stalled", _rest_ns(section))]
            elif share is not None:
                charges = _own(section, piece, share, view.model)
            elif not own or i < own[0]:
                how: How = "measured" if view.finished else "assumed"
                charges = _waiting(section, piece, queued_ns, key, how)
            else:
                following = own[bisect_right(own, i) :][:1]
                preempted = any(view.pieces[j].shares[key].recompute for j in following)
                charges = _passed_over(section, piece, key, preempted=preempted)
            yield Stretch(section.start_ns, section.end_ns, charges)
        at_ns = until_ns


def _unseen_engine(view: RequestView, at_ns: int, held_ns: int) -> Stretch:
    """Held by the engine with no step that tells of it. Where it ended well the steps are lost.
    Where it did not, the step that runs now has not told yet: what is known of it is what the
    kernel says, and that the loop stands still if it takes far too long."""
    if view.finished and not _given_up(view.record):
        return Stretch(at_ns, held_ns, [Charge("unobserved", held_ns - at_ns)])
    stalled = held_ns - at_ns > view.stall_ns
    section = view.joined(Section("forward", at_ns, held_ns))
    rest = Charge("engine.stalled" if stalled else UNATTRIBUTED, _rest_ns(section))
    return Stretch(at_ns, held_ns, [*_delays(section.delays), rest])


def _until_first_token(stretches: Sequence[Stretch], view: RequestView) -> Iterator[Stretch]:
    """The stretches up to the output of the first token, then the front end up to its sending.
    Of a reply that was sent whole, all of them."""
    record = view.record
    first_sent_ns = record.first_sent_ns
    assert first_sent_ns is not None
    if first_sent_ns >= record.sent_ns:
        yield from stretches
        # A record that contradicts itself: sent first after it was sent.
        rest_ns = first_sent_ns - record.sent_ns
        yield Stretch(record.sent_ns, first_sent_ns, [Charge(UNATTRIBUTED, rest_ns)])
        return
    output_ns = _first_output_ns(view)
    assert output_ns is not None
    at_ns = record.received_ns
    for stretch in stretches:
        if stretch.end_ns > output_ns:
            break
        yield stretch
        at_ns = stretch.end_ns
    if at_ns < first_sent_ns:
        yield _in_front_end("frontend.out", at_ns, first_sent_ns, view)


def _first_output_ns(view: RequestView) -> int | None:
    """Until when the engine made the first token; None where none was sent."""
    first_sent_ns = view.record.first_sent_ns
    if first_sent_ns is None:
        return None
    key = view.record.request_key
    output_ns = next(
        (
            piece.end_ns
            for piece in view.pieces
            if (share := piece.shares.get(key)) is not None and share.output_tokens
        ),
        view.record.first_token_ns,
    )
    return first_sent_ns if output_ns is None else min(output_ns, first_sent_ns)


def _within(piece: Piece, start_ns: int, end_ns: int, view: RequestView) -> Iterator[Section]:
    """The piece's sections within [start_ns, end_ns); one that is cut is laid out anew."""
    for section in piece.sections:
        low, high = max(section.start_ns, start_ns), min(section.end_ns, end_ns)
        if high <= low:
            continue
        if (low, high) == (section.start_ns, section.end_ns):
            yield section
        else:
            rank_pid = None if piece.rank is None else piece.rank.pid
            part = view.joined(Section(section.kind, low, high), rank_pid)
            yield no_more_than(part, section)


def _in_front_end(cause: str, start_ns: int, end_ns: int, view: RequestView) -> Stretch:
    """The front end's own thread counts there."""
    front = Watched(view.record.pid, view.record.tid, frozenset())
    facts = view.facts.overlapping(start_ns, end_ns)
    section = Joiner(facts, front).section(Section("host", start_ns, end_ns))
    charges = _delays(section.delays)
    charges.append(Charge(cause, _rest_ns(section)))
    return Stretch(start_ns, end_ns, charges)


def _waiting(section: Section, piece: Piece, queued_ns: int, key: int, how: How) -> list[Charge]:
    """Queued, in a step (or the gap before one) that it has no part in."""
    charges, rest_ns = _explained(section, piece)
    step = piece.step
    if section.kind == "gap":
        return [*charges, Charge("engine.gap", rest_ns)]
    cause, weigh = WAITS.get(step.admission, ("queue.wait", equally))
    if queued_ns > step.start_ns + step.schedule_ns:
        # It came when this step's batch was already chosen: it waits for those in it.
        cause, weigh = "queue.wait", tokens_scheduled
    return [*charges, by_others(cause, rest_ns, step, key, weigh, how)]


def _passed_over(section: Section, piece: Piece, key: int, *, preempted: bool) -> list[Charge]:
    """Admitted before, but not in this step."""
    charges, rest_ns = _explained(section, piece)
    if preempted:
        return [*charges, by_others("preempted", rest_ns, piece.step, key, tokens_held)]
    if section.kind == "gap":
        return [*charges, Charge("engine.gap", rest_ns)]
    return [*charges, by_others("batch.not_scheduled", rest_ns, piece.step, key, tokens_prefilled)]


def _explained(section: Section, piece: Piece) -> tuple[list[Charge], int]:
    """What was measured in a section of others' step, and how much of it is their work. They are
    not to blame for what their step took beyond its price without evidence: that is nobody's."""
    charges = _delays(section.delays)
    rest_ns = _rest_ns(section)
    price = piece.price
    if section.kind == "forward" and price and price.fitted and price.whole_ns is not None:
        charges.append(Charge(UNATTRIBUTED, max(0, rest_ns - price.most_ns)))
        rest_ns = min(rest_ns, price.most_ns)
    return charges, rest_ns


def _own(section: Section, piece: Piece, share: Share, model: CleanStepModel) -> list[Charge]:
    """In a step that it takes part in."""
    charges = _delays(section.delays)
    rest_ns = _rest_ns(section)
    if section.kind == "gap":
        return [*charges, Charge("engine.gap", rest_ns)]
    if share.recompute:
        return [*charges, Charge("preempted", rest_ns)]
    if section.kind in ("host", "hand-over"):
        return [*charges, Charge("engine.host", rest_ns)]
    if section.kind == "slowest" and piece.rank is not None:
        behind = (Blame(piece.rank.pid, 0, rest_ns),)
        return [*charges, Charge("rank.wait", rest_ns, blames=behind)]
    return [*charges, *_forward(rest_ns, piece, share, model)]


def _forward(rest_ns: int, piece: Piece, share: Share, model: CleanStepModel) -> Iterator[Charge]:
    """Splits what a forward pass took, less its known delay, between the request and the others.

    The prediction for the request alone is its own compute; what the others of its own phase add
    to the prediction, and then those of the other phase, is sharing and interference."""
    price = piece.price or model.price(piece.step.shares)
    decoding = share.phase is Phase.DECODE
    other_decodes = price.decode_tokens - (share.scheduled_tokens if decoding else 0)
    other_prefill = price.prefill_tokens - (0 if decoding else share.scheduled_tokens)
    alone_ns = model.predict_ns(shape([share]))
    limit_ns = rest_ns
    if price.whole_ns is None or alone_ns is None:
        weights = [share.scheduled_tokens, other_decodes, other_prefill]
    else:
        kin_ns = price.decodes_ns if decoding else price.prefills_ns
        by_kin, by_rest = max(0, kin_ns - alone_ns), max(0, price.whole_ns - kin_ns)
        by_decodes, by_prefill = (by_kin, by_rest) if decoding else (by_rest, by_kin)
        # The model may have learnt since the step was priced: nobody is no cause, whatever it says.
        weights = [
            alone_ns,
            by_decodes if other_decodes else 0,
            by_prefill if other_prefill else 0,
        ]
        limit_ns = round(sum(weights) * (1 + price.band_ratio))
    how: How = "modelled" if price.fitted and price.whole_ns is not None else "assumed"
    spent_ns = min(rest_ns, limit_ns)
    own_ns, decodes_ns, prefills_ns = split(spent_ns, weights)
    yield Charge("decode.compute" if decoding else "prefill.compute", own_ns, how)
    yield Charge("batch.decode_sharing", decodes_ns, how, tokens=other_decodes)
    if prefills_ns:
        by_request = interference(prefills_ns, piece, share)
        yield Charge(
            "batch.prefill_interference", prefills_ns, how, by_request, tokens=other_prefill
        )
    yield Charge(UNATTRIBUTED, rest_ns - own_ns - decodes_ns - prefills_ns)


def _rest_ns(section: Section) -> int:
    return section.ns - section.delayed_ns


def _delays(delays: Sequence[Delay]) -> list[Charge]:
    return [Charge(d.cause, d.ns, blames=d.blames, facts=d.facts) for d in delays]
