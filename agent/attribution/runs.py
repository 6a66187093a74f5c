"""A request's part of many steps at once, in arrays. Pure: no I/O, no clock.

Most of a request's life is a run of steps that it takes part in from end to
end. What the request pays in such a step is what all of the batch pay alike
(`Alike`, made when the step was joined) and its part of the forward pass,
which the clean-step model splits. Both are summed here for a whole run: to the
nanosecond what attribute.py says of each step alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dsagent.agent.attribution.account import How
from dsagent.agent.attribution.model import CleanStepModel
from dsagent.agent.attribution.pieces import Alike, Blame, Delay, Piece
from dsagent.agent.attribution.sheet import UNATTRIBUTED, Charge
from dsagent.instrumentation.records import Phase, Share

Whole = npt.NDArray[np.int64]
# Beyond these a product might not fit into 64 bits: such a step is looked at alone.
MOST_FORWARD_NS = 2_000_000_000
MOST_WEIGHT = 4_000_000_000
MOST_TOKENS = 1 << 24
LEAST_RUN = 4


@dataclass(frozen=True, slots=True)
class Split:
    """Forward passes, one a row: what each cost the request, and for what."""

    own_ns: Whole
    decodes_ns: Whole
    prefills_ns: Whole
    rest_ns: Whole  # nobody's
    other_decodes: Whole  # tokens
    other_prefill: Whole
    decoding: npt.NDArray[np.bool_]
    modelled: npt.NDArray[np.bool_]
    is_safe: bool  # False: the numbers are too large for it


def split_forward(pieces: Sequence[Piece], shares: Sequence[Share], model: CleanStepModel) -> Split:
    """Of each piece, which has its price, and the request's share of it."""
    forward_ns = _whole([piece.alike.forward_ns for piece in pieces if piece.alike is not None])
    whole, *of_kinds, bands, is_fitted = zip(
        *[piece.price for piece in pieces if piece.price is not None], strict=True
    )
    whole_ns = _whole([-1 if ns is None else ns for ns in whole])
    decode_ns, prefill_ns, decodes, prefills = map(_whole, of_kinds)
    fitted, bands_ratio = np.array(is_fitted), np.array(bands)
    _, phase, scheduled, _, in_context, _, _ = zip(*shares, strict=True)
    decoding = _whole(phase) == Phase.DECODE
    tokens, context = _whole(scheduled), _whole(in_context)
    other_decodes = decodes - np.where(decoding, tokens, 0)
    other_prefill = prefills - np.where(decoding, 0, tokens)
    middle = tokens * (context + tokens // 2)
    alone_ns = model.predict_each_ns(
        tokens, np.where(decoding, 0, middle), np.where(decoding, context, 0)
    )
    predicted = whole_ns >= 0
    if alone_ns is None:
        alone_ns, predicted = np.zeros_like(whole_ns), np.zeros_like(decoding)
    kin_ns = np.where(decoding, decode_ns, prefill_ns)
    by_kin, by_rest = np.maximum(kin_ns - alone_ns, 0), np.maximum(whole_ns - kin_ns, 0)
    by_decodes = np.where(decoding, by_kin, by_rest)
    by_prefill = np.where(decoding, by_rest, by_kin)
    priced = (
        alone_ns,
        np.where(other_decodes != 0, by_decodes, 0),
        np.where(other_prefill != 0, by_prefill, 0),
    )
    weights = np.where(predicted, priced, (tokens, other_decodes, other_prefill))
    limit_ns = np.rint(weights.sum(axis=0) * (1 + bands_ratio)).astype(np.int64)
    spent_ns = np.where(predicted, np.minimum(forward_ns, limit_ns), forward_ns)
    own_ns, decodes_ns, prefills_ns = split_each(spent_ns, weights)
    return Split(
        own_ns,
        decodes_ns,
        prefills_ns,
        forward_ns - own_ns - decodes_ns - prefills_ns,
        other_decodes,
        other_prefill,
        decoding,
        predicted & fitted,
        bool(weights.max(initial=0) < MOST_WEIGHT),
    )


def _whole(numbers: Sequence[int]) -> Whole:
    return np.array(numbers, np.int64)


def split_each(totals: Whole, weights: Whole) -> Whole:
    """`pieces.split` of each column of `weights` (rows × totals)."""
    positive = np.maximum(weights, 0)
    whole = positive.sum(axis=0).astype(np.float64)
    nothing = (whole <= 0) | (totals <= 0)
    exact = np.where(nothing, 0, totals) * positive / np.where(nothing, 1, whole)
    parts = exact.astype(np.int64)
    rest = np.where(nothing, 0, totals - parts.sum(axis=0))
    order = np.argsort(parts - exact, axis=0, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(len(weights))[:, None], axis=0)
    parts += ranks < rest
    return parts


class Runs:
    """The pieces of one request that need no look at each alone."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        own: Sequence[int],
        key: int,
        model: CleanStepModel,
        *,
        held_ns: int,
        stall_ns: int,
        cut_ns: int | None,
    ) -> None:
        """`own`: indices of the pieces that the request takes part in; it is held until
        `held_ns`; no run reaches beyond `cut_ns`."""
        self._pieces = pieces
        self._cut_ns = cut_ns
        chosen = []
        self._shares = []
        for i in own:
            piece = pieces[i]
            share = piece.shares[key]
            if self._is_plain(piece, share, held_ns, stall_ns):
                chosen.append(i)
                self._shares.append(share)
        self._rows = {index: row for row, index in enumerate(chosen)}
        self._split: Split | None = None
        if chosen:
            split = split_forward([pieces[i] for i in chosen], self._shares, model)
            if split.is_safe:
                self._split = split
            else:
                self._rows = {}

    def _is_plain(self, piece: Piece, share: Share, held_ns: int, stall_ns: int) -> bool:
        alike = piece.alike
        return (
            alike is not None
            and piece.price is not None
            and not share.recompute
            and piece.start_ns < piece.end_ns <= held_ns
            and (self._cut_ns is None or not piece.start_ns < self._cut_ns < piece.end_ns)
            and alike.longest_ns <= stall_ns
            and alike.forward_ns < MOST_FORWARD_NS
            and share.scheduled_tokens < MOST_TOKENS
            and share.context_tokens < MOST_TOKENS
        )

    def end(self, first: int) -> int:
        """The index behind the run that begins with piece `first`; `first` where none does, or one
        so short that its pieces are quicker looked at one by one."""
        rows, pieces, cut_ns = self._rows, self._pieces, self._cut_ns
        last, reached_ns = first, pieces[first].start_ns
        while last in rows and pieces[last].start_ns == reached_ns:
            reached_ns = pieces[last].end_ns
            last += 1
            if reached_ns == cut_ns:
                break
        return last if last - first >= LEAST_RUN else first

    def charges(
        self,
        first: int,
        end: int,
        blame: Callable[[int, Piece, Share], dict[int, int]],
    ) -> Iterator[Charge]:
        """Of the run of pieces [first, end). `blame`: who else's prefill took those nanoseconds."""
        pieces = self._pieces[first:end]
        alikes = [piece.alike for piece in pieces if piece.alike is not None]
        gaps = [alike.gap_ns for alike in alikes if alike.gap_ns]
        yield Charge("engine.gap", sum(gaps), stretches=len(gaps))
        hosts = sum(alike.hosts for alike in alikes)
        yield Charge("engine.host", sum(alike.host_ns for alike in alikes), stretches=hosts)
        yield from _delays(alikes)
        low = self._rows[first]
        yield from self._forward(slice(low, low + end - first), pieces, blame)

    def _forward(
        self,
        rows: slice,
        pieces: Sequence[Piece],
        blame: Callable[[int, Piece, Share], dict[int, int]],
    ) -> Iterator[Charge]:
        split = self._split
        assert split is not None
        modelled, decoding = split.modelled[rows], split.decoding[rows]
        own_ns, decodes_ns = split.own_ns[rows], split.decodes_ns[rows]
        tokens = split.other_decodes[rows]
        ways: tuple[tuple[How, npt.NDArray[np.bool_]], ...] = (
            ("modelled", modelled),
            ("assumed", ~modelled),
        )
        for how, so in ways:
            if not so.any():
                continue
            for cause, phase in (("decode.compute", decoding), ("prefill.compute", ~decoding)):
                yield _sum(cause, how, own_ns[so & phase])
            with_others = so & (decodes_ns > 0)
            yield _sum("batch.decode_sharing", how, decodes_ns[so], tokens[with_others])
        prefills_ns = split.prefills_ns[rows]
        for row in np.flatnonzero(prefills_ns).tolist():
            ns = int(prefills_ns[row])
            yield Charge(
                "batch.prefill_interference",
                ns,
                "modelled" if modelled[row] else "assumed",
                blame(ns, pieces[row], self._shares[rows.start + row]),
                tokens=int(split.other_prefill[rows][row]),
            )
        yield _sum(UNATTRIBUTED, "measured", split.rest_ns[rows])


def _delays(alikes: Sequence[Alike]) -> Iterator[Charge]:
    """All delays of these steps, a charge a cause."""
    by_cause: dict[str, list[Delay]] = {}
    for alike in alikes:
        for delay in alike.delays:
            alike_ones = by_cause.get(delay.cause)
            if alike_ones is None:
                by_cause[delay.cause] = [delay]
            else:
                alike_ones.append(delay)
    for cause, delays in by_cause.items():
        by_task: dict[tuple[int, int], int] = {}
        for delay in delays:
            for pid, tid, ns in delay.blames:
                by_task[pid, tid] = by_task.get((pid, tid), 0) + ns
        yield Charge(
            cause,
            sum([delay.ns for delay in delays]),
            blames=tuple([Blame(pid, tid, ns) for (pid, tid), ns in by_task.items()]),
            facts=sum([delay.facts for delay in delays]),
            stretches=len(delays),
        )


def _sum(cause: str, how: How, ns: Whole, tokens: Whole | None = None) -> Charge:
    return Charge(
        cause,
        int(ns.sum()),
        how,
        tokens=0 if tokens is None else int(tokens.sum()),
        stretches=int(np.count_nonzero(ns)),
    )
