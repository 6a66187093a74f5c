"""A step, or a request, as a vector of features: the attributes of its span that say how long
something took. Pure.

A step's time depends on its batch, a request's on its tokens. So each vector comes with a
*setting*, and is only compared with vectors of the same setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsagent.agent.attribution.account import Account
from dsagent.instrumentation import names
from dsagent.instrumentation.records import Step

Kind = Literal["step", "request"]
Setting = tuple[int | str, ...]

# Durations of whole spans, which have no attribute of their own for it.
STEP_DURATION_NS = "dsagent.step.duration_ns"
REQUEST_E2E_NS = "dsagent.request.e2e_ns"
REQUEST_TPOT_NS = "dsagent.request.tpot_ns"
UNATTRIBUTED = names.part("unattributed")
UNSEEN = "unobserved"  # the agent's own doing, and no feature of a request
PART_PREFIX = names.part("").removesuffix("_ns")

# Of each kind: the feature that the others are parts of.
WHOLE: Mapping[Kind, str] = {"step": STEP_DURATION_NS, "request": REQUEST_E2E_NS}
# These overlap the parts: named only where no part has moved as much.
OVERLAPPING = frozenset(
    {STEP_DURATION_NS, REQUEST_E2E_NS, names.REQUEST_TTFT_NS, REQUEST_TPOT_NS, UNATTRIBUTED}
)
# Not a share of the whole: only compared with itself.
APART = frozenset({REQUEST_TPOT_NS})
UNIT = "ns"  # of every feature


@dataclass(frozen=True, slots=True)
class Observation:
    """One vector. What the engine does not tell is not in `values`."""

    kind: Kind
    setting: Setting
    mono_ns: int  # the end of it
    values: Mapping[str, float]  # by feature, ns
    request_keys: tuple[int, ...]


def of_step(step: Step) -> Observation | None:
    """None of a step that was inferred: its times are not the engine's."""
    duration_ns = step.end_ns - step.start_ns
    if step.inferred or duration_ns <= 0:
        return None
    values: dict[str, float] = {STEP_DURATION_NS: duration_ns}
    for feature, ns in (
        (names.STEP_SCHEDULE_NS, step.schedule_ns),
        (names.STEP_PREPARE_NS, step.prepare_ns),
        (names.STEP_FORWARD_NS, step.forward_ns),
        (names.STEP_SAMPLE_NS, step.sample_ns),
        (names.STEP_OUTPUT_NS, step.output_ns),
    ):
        if ns > 0:  # 0: this engine does not tell it apart
            values[feature] = ns
    context_tokens = sum(share.context_tokens for share in step.shares)
    setting = (
        step.engine_id,
        step.prefill_tokens.bit_length(),
        (len(step.shares) + step.shares_omitted).bit_length(),
        context_tokens.bit_length() // 2,  # a factor of 4
    )
    keys = tuple(share.request_key for share in step.shares)
    return Observation("step", setting, step.end_ns, values, keys)


def of_account(account: Account) -> Observation | None:
    """None of a request whose life is not known whole: partial, unfinished or failed."""
    record = account.record
    if account.partial or not account.finished or record.error is not None or account.e2e_ns <= 0:
        return None
    values: dict[str, float] = {REQUEST_E2E_NS: account.e2e_ns}
    if record.ttft_ns is not None:
        values[names.REQUEST_TTFT_NS] = record.ttft_ns
    if record.tpot_ns is not None:
        values[REQUEST_TPOT_NS] = record.tpot_ns
    if not account.not_looked_at and not any(part.cause == UNSEEN for part in account.parts):
        # Else what is not among the parts may have been there.
        values[UNATTRIBUTED] = account.unattributed_ns
        for part in account.parts:
            feature = names.part(part.cause)
            values[feature] = values.get(feature, 0) + part.ns
    setting = (
        account.engine_id,
        record.model if record.first_scheduled_ns is not None else "",
        (record.prompt_tokens or 0).bit_length() // 2,
        record.output_tokens.bit_length(),
    )
    return Observation("request", setting, record.sent_ns, values, (record.request_key,))
