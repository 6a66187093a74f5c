"""Which requests' traces are worth keeping, decided when a request has ended.

The precedence, first match counts:

1. The caller's flag: 1 is kept; 0 is not exported, unless the override is on
   and it violated a limit (then it is kept and marked). Recorded and counted
   it is in any case.
2. Without context: every violator of a limit, every error, every outlier.
3. The rest at a rate: fixed, or as high as the error rate of the recent
   requests, within 0.1 % and 5 %.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsagent.agent.attribution.account import Account

MIN_RATE = 0.001
MAX_RATE = 0.05
ERROR_MEMORY = 0.01  # weight of the newest request in the error rate: about the last 100
MAX_MODELS = 32
REMEMBERED = 4096  # decisions


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a request's trace is exported, and why."""

    keep: bool
    reason: str
    slow: bool = False  # it violated a limit or was an outlier, whatever decided


class Sampler:
    """Decides once a request; asked again (another sink, a retry) it answers the same."""

    def __init__(self, *, rate: float | None = None, override_sampled_0: bool = False) -> None:
        """`rate`: a fixed ratio for what nothing else decides; None: adapts to the errors."""
        if rate is not None and not 0 <= rate <= 1:
            raise ValueError(f"a sampling rate is within 0 and 1, not {rate}")
        self._fixed_rate = rate
        self._override_sampled_0 = override_sampled_0
        self._error_ratio = 0.0
        self._usual: OrderedDict[str, _Usual] = OrderedDict()
        self._decided: OrderedDict[tuple[int, int], Decision] = OrderedDict()

    @property
    def rate(self) -> float:
        """The ratio kept of what nothing else decides."""
        if self._fixed_rate is not None:
            return self._fixed_rate
        return min(MAX_RATE, max(MIN_RATE, self._error_ratio))

    def decide(self, account: Account, violated: Sequence[str]) -> Decision:
        """`violated`: what Limits.violated said of it."""
        record = account.record
        key = (record.trace_id, record.span_id)
        if key in self._decided:
            return self._decided[key]
        is_outlier = self._learn(account)
        decision = self._decide(account, violated, is_outlier)
        decision = replace(decision, slow=bool(violated) or is_outlier)
        self._decided[key] = decision
        if len(self._decided) > REMEMBERED:
            self._decided.popitem(last=False)
        return decision

    def _decide(self, account: Account, violated: Sequence[str], is_outlier: bool) -> Decision:
        record = account.record
        if record.sampled:
            return Decision(True, "parent")
        if record.sampled is False:
            if self._override_sampled_0 and violated:
                return Decision(True, f"override:{violated[0]}")
            return Decision(False, "parent")
        return self._decide_here(account, violated, is_outlier)

    def _decide_here(self, account: Account, violated: Sequence[str], is_outlier: bool) -> Decision:
        """Nobody upstream has decided."""
        record = account.record
        if violated:
            return Decision(True, f"slo:{violated[0]}")
        if record.error is not None:
            return Decision(True, "error")
        if is_outlier:
            return Decision(True, "outlier")
        return Decision(is_within_rate(record.trace_id, self.rate), "rate")

    def _learn(self, account: Account) -> bool:
        """Takes the request into the error rate and into what is usual for its model;
        says whether it stood out from those before it."""
        record = account.record
        self._error_ratio += ERROR_MEMORY * ((record.error is not None) - self._error_ratio)
        if account.partial or record.error is not None:
            return False
        usual = self._usual.get(record.model)
        if usual is None:
            usual = self._usual[record.model] = _Usual()
            if len(self._usual) > MAX_MODELS:
                self._usual.popitem(last=False)
        self._usual.move_to_end(record.model)
        stands_out = [
            spread.stands_out(value_ns)
            for spread, value_ns in ((usual.ttft, record.ttft_ns), (usual.tpot, record.tpot_ns))
            if value_ns  # a TPOT of 0: the whole reply went out in one piece
        ]
        return any(stands_out)


def is_within_rate(trace_id: int, rate: float) -> bool:
    """Consistent everywhere: the last 56 bits of the trace id are its randomness (W3C level 2)."""
    return (trace_id & ((1 << 56) - 1)) >= round((1 - rate) * (1 << 56))


class _Spread:
    """A running mean and deviation of log(value): latencies are skewed, their logarithms less."""

    MIN_COUNT = 100  # before that nothing stands out
    DEVIATIONS = 3.0
    MEMORY = 0.005  # about the last 200 values

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._variance = 0.0

    def stands_out(self, value_ns: float) -> bool:
        """Whether it is unusually large, judged by the values before it; then takes it in."""
        value = math.log(max(value_ns, 1.0))
        distance = value - self._mean
        is_known = self._count >= self.MIN_COUNT
        # Five per cent is no outlier, however steady the values are.
        deviation = max(math.sqrt(self._variance), 0.05 / self.DEVIATIONS)
        self._count += 1
        weight = max(1 / self._count, self.MEMORY)
        self._mean += weight * distance
        self._variance = (1 - weight) * (self._variance + weight * distance * distance)
        return is_known and distance > self.DEVIATIONS * deviation


class _Usual:
    def __init__(self) -> None:
        self.ttft = _Spread()
        self.tpot = _Spread()
