"""What a request usually pays for each cause, learnt from the last ones: the yardstick by which
an account says why *this* one was slow. Pure."""

from __future__ import annotations

from dataclasses import replace

from dsagent.agent.attribution.account import USUAL_FACT, Account, Evidence, Part
from dsagent.agent.attribution.recent import Recent

KEPT = 256
ENOUGH = 32
# Own decode compute is bounded by the model already, and sharing a step with others' decodes is
# what the load costs: neither is ever more than usual.
ALWAYS_USUAL = frozenset({"decode.compute", "batch.decode_sharing"})
# Its own prefill among them: a prompt that is longer than others, or found less of itself in the
# cache, is a reason to be slow.
BY_REQUEST = frozenset({"frontend.in", "frontend.out", "prefill.compute"})
BY_STEP = frozenset({"engine.host"})
# What the machine does to a request may be so all day: it is a reason to be slow all the same,
# beyond this share of e2e.
MOST_USUAL_RATIO = 0.1
OF_THE_MACHINE = ("cpu.", "memory.", "lock.", "io.", "net.", "process.", "gpu.", "engine.stalled")


def _measure(cause: str, account: Account) -> float:
    """What the cause's nanoseconds are to be divided by, to compare requests of any size."""
    if cause in BY_REQUEST:
        return 1.0
    if cause in BY_STEP:
        return float(max(1, len(account.step_ids)))
    return float(max(1, account.e2e_ns))


class Norms:
    """The medians over the last 256 requests that ended well, once 32 are known."""

    def __init__(self) -> None:
        self._prices: dict[str, Recent] = {}
        self._seen = 0

    def judge(self, account: Account) -> Account:
        """`account` with what is usual among each part's evidence; then learns from it."""
        judged = account
        if self._seen >= ENOUGH:
            judged = replace(
                account, parts=tuple(self._with_usual(part, account) for part in account.parts)
            )
        if account.finished and not account.partial and account.record.error is None:
            self._learn(account)
        return judged

    def _with_usual(self, part: Part, account: Account) -> Part:
        prices = self._prices.get(part.cause)
        price = 0.0 if prices is None else prices.median
        usual_ns = round(price * _measure(part.cause, account))
        if part.cause in ALWAYS_USUAL:
            usual_ns = part.ns
        elif part.cause.startswith(OF_THE_MACHINE):
            usual_ns = min(usual_ns, round(MOST_USUAL_RATIO * account.e2e_ns))
        usual = Evidence("norms", USUAL_FACT, min(usual_ns, part.ns), "ns")
        return Part(part.cause, part.ns, part.how, (*part.evidence, usual), part.culprits)

    def _learn(self, account: Account) -> None:
        paid = {part.cause: part.ns / _measure(part.cause, account) for part in account.parts}
        for cause in paid.keys() - self._prices.keys():
            # The requests before paid nothing for it.
            self._prices[cause] = Recent(KEPT, [0.0] * min(self._seen, KEPT))
        for cause, prices in self._prices.items():
            prices.append(paid.get(cause, 0.0))
        self._seen += 1
