"""Whose work it was: what a request waited for, shared out among the other requests in the step.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dsagent.agent.attribution.account import How
from dsagent.agent.attribution.pieces import Piece, split
from dsagent.agent.attribution.sheet import Charge
from dsagent.instrumentation.records import Admission, Phase, Share, Step


def interference(ns: int, piece: Piece, share: Share) -> dict[int, int]:
    """Whose prefill is to blame for `ns` of the forward pass."""
    blamed = [s for s in piece.step.shares if s.phase is Phase.PREFILL and s is not share]
    return _shared_out(ns, blamed, tokens_scheduled)


def by_others(
    cause: str,
    ns: int,
    step: Step,
    key: int,
    weigh: Callable[[Share], int],
    how: How = "measured",
) -> Charge:
    """`ns` of `step` as the work of the others in it, by `weigh`; where there are none, idle."""
    others = [share for share in step.shares if share.request_key != key]
    if not others:
        return Charge("engine.gap", ns)
    tokens = sum(share.scheduled_tokens for share in others)
    return Charge(cause, ns, how, _shared_out(ns, others, weigh), tokens=tokens)


def _shared_out(ns: int, shares: Sequence[Share], weigh: Callable[[Share], int]) -> dict[int, int]:
    """request_key → its part of `ns`, by weight; alike where nobody weighs anything."""
    weights = [weigh(share) for share in shares]
    if not any(weights):
        weights = [1] * len(shares)
    by_request: dict[int, int] = {}
    for share, size in zip(shares, split(ns, weights), strict=True):
        if size:  # a step that names a request twice charges it twice
            by_request[share.request_key] = by_request.get(share.request_key, 0) + size
    return by_request


def tokens_scheduled(share: Share) -> int:
    return share.scheduled_tokens


def tokens_prefilled(share: Share) -> int:
    return share.scheduled_tokens if share.phase is Phase.PREFILL else 0


def tokens_held(share: Share) -> int:
    return share.context_tokens + share.scheduled_tokens


def equally(share: Share) -> int:
    return 1


# Why it waits, by what the scheduler says, and how the blame is shared out.
WAITS: Mapping[Admission, tuple[str, Callable[[Share], int]]] = {
    Admission.NO_KV_BLOCKS: ("queue.kv_blocks", tokens_held),
    Admission.NO_BUDGET: ("batch.not_scheduled", tokens_prefilled),
}
