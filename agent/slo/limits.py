"""The limits people set, checked against accounts. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from dsagent.agent.attribution.account import Account
from dsagent.instrumentation.records import RequestRecord

Objective = Literal["ttft", "tpot", "e2e", "errors", "goodput"]
SplitBy = Literal["tenant", "prompt_class"]

DEFAULT_OBJECTIVE_RATIO = 0.99  # MLPerf's limits are those of the 99th percentile
# The client's own doing: no failure of the service.
CLIENT_ERRORS = frozenset(
    {
        "client_disconnect",
        "invalid_request",
        "invalid_request_error",
        "body_too_large",
        "upload_timeout",
    }
)


@dataclass(frozen=True, slots=True)
class Limit:
    """One entry of the file: limits in nanoseconds for the requests that it matches, and which
    ratio of them shall meet each. Absent is None."""

    model: str  # a glob
    ttft_ns: int | None = None
    tpot_ns: int | None = None
    e2e_ns: int | None = None
    name: str = ""
    tenant: str | None = None  # a glob; a request without a tenant matches none
    prompt_class: str | None = None
    objective_ratio: float = DEFAULT_OBJECTIVE_RATIO  # of requests within each limit
    errors_objective_ratio: float | None = None  # of requests that do not fail
    goodput_objective_ratio: float | None = None  # of requests that meet every limit
    by: tuple[SplitBy, ...] = ()

    @property
    def label(self) -> str:
        """What alerts and series call it."""
        return self.name or self.model

    @property
    def objectives(self) -> dict[Objective, float]:
        """Each objective with its ratio, such as 0.99."""
        wanted: dict[Objective, float | None] = {
            "ttft": None if self.ttft_ns is None else self.objective_ratio,
            "tpot": None if self.tpot_ns is None else self.objective_ratio,
            "e2e": None if self.e2e_ns is None else self.objective_ratio,
            "errors": self.errors_objective_ratio,
            "goodput": self.goodput_objective_ratio,
        }
        return {name: ratio for name, ratio in wanted.items() if ratio is not None}

    def matches(self, record: RequestRecord, prompt_class: str | None) -> bool:
        if not fnmatchcase(record.model, self.model):
            return False
        tenant = record.tenant
        if self.tenant is not None and (tenant is None or not fnmatchcase(tenant, self.tenant)):
            return False
        return self.prompt_class is None or self.prompt_class == prompt_class


@dataclass(frozen=True, slots=True)
class Limits:
    """Every configured limit; without any, nobody violates one."""

    entries: tuple[Limit, ...] = ()
    prompt_bounds: tuple[int, ...] = ()  # upper bounds of the classes of prompt lengths, in tokens

    def of(self, record: RequestRecord) -> Limit | None:
        """The first entry that matches."""
        prompt_class = self.prompt_class(record.prompt_tokens)
        return next((each for each in self.entries if each.matches(record, prompt_class)), None)

    def prompt_class(self, prompt_tokens: int | None) -> str | None:
        """le_512 and so on, the last one gt_…; None where no classes are, or no length is known."""
        if prompt_tokens is None or not self.prompt_bounds:
            return None
        return prompt_classes(self.prompt_bounds)[bisect_left(self.prompt_bounds, prompt_tokens)]

    def of_any(self, model: str) -> Limit | None:
        """The entry that counts for every request for this model; None where that depends on whose
        it is or how long, which is not known before it has ended."""
        for each in self.entries:
            if fnmatchcase(model, each.model):
                depends = each.tenant is not None or each.prompt_class is not None or each.by
                return None if depends else each
        return None

    def violated(self, account: Account) -> list[str]:
        """Which of ttft, tpot, e2e are above their limit. A value that is absent is not judged,
        and neither is a partial or unfinished request."""
        limit = self.of(account.record)
        if limit is None or account.partial or not account.finished:
            return []
        return [name for name, value, bound in measured(limit, account) if value > bound]

    def bounds_s(self, name: str) -> tuple[float, ...]:
        """The limits called `ttft`, `tpot` or `e2e` in seconds, to be bounds of a histogram."""
        values = (getattr(limit, f"{name}_ns") for limit in self.entries)
        return tuple(sorted({value / 1e9 for value in values if value is not None}))


def measured(limit: Limit, account: Account) -> list[tuple[Objective, float, int]]:
    """(ttft, tpot or e2e; its value in ns; its limit in ns), where both are known."""
    record = account.record
    all_three: tuple[tuple[Objective, float | None, int | None], ...] = (
        ("ttft", record.ttft_ns, limit.ttft_ns),
        ("tpot", record.tpot_ns, limit.tpot_ns),
        ("e2e", account.e2e_ns, limit.e2e_ns),
    )
    return [
        (name, value, bound)
        for name, value, bound in all_three
        if value is not None and bound is not None
    ]


def has_failed(record: RequestRecord) -> bool:
    """Whether the service failed it; what a client did to its own request is no failure."""
    error = record.error
    if error is None or error in CLIENT_ERRORS:
        return False
    return not (len(error) == 3 and error.isdecimal() and error.startswith("4"))


def prompt_classes(bounds: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the classes that these upper bounds make."""
    return (*(f"le_{bound}" for bound in bounds), f"gt_{bounds[-1]}") if bounds else ()
