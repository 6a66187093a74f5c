"""Which series of which objective a request counts in, and whether it met the objective. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsagent.agent.attribution.account import Account
from dsagent.agent.slo.limits import Limit, Limits, Objective, has_failed, measured
from dsagent.instrumentation.records import RequestRecord

OTHER = "~other"  # alike in the catalogue: what a label says once its cap is reached
MAX_VALUES = 64  # different models, and different tenants
MAX_SERIES = 256


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """One objective of one entry of the file, for one model, tenant and class. A tenant or class
    that the entry does not split by, or that a request did not have, is None."""

    slo: str
    objective: Objective
    model: str
    tenant: str | None = None
    prompt_class: str | None = None

    def labels(self) -> dict[str, str]:
        """Without the model, whose label has a standard name. Absent is absent."""
        optional = {"tenant": self.tenant, "prompt_class": self.prompt_class}
        return {
            "slo": self.slo,
            "objective": self.objective,
            **{name: value for name, value in optional.items() if value is not None},
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """`over_ns`: by how much the value was above the limit; None where the request failed."""

    key: SeriesKey
    limit: Limit
    is_bad: bool
    value_ns: float | None = None
    over_ns: float | None = None


class Judge:
    """Turns accounts into verdicts, with bounded numbers of models, tenants and series."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._models: set[str] = set()
        self._tenants: set[str] = set()
        self._keys: set[SeriesKey] = set()

    def verdicts(self, account: Account) -> Iterator[Verdict]:
        """None for partial and unfinished requests, nor for those that match no entry."""
        record = account.record
        limit = self._limits.of(record)
        if limit is None or account.partial or not account.finished:
            return
        values = measured(limit, account)
        failed = has_failed(record)
        exceeded = False
        for name, value, bound in values:
            if record.error is not None:
                continue  # its times are those of a failure
            exceeded |= value > bound
            key = self._key(limit, name, record)
            yield Verdict(key, limit, value > bound, value, max(0.0, value - bound))
        if record.error is not None and not failed:
            return  # the client's own doing
        if limit.errors_objective_ratio is not None:
            yield Verdict(self._key(limit, "errors", record), limit, failed)
        if limit.goodput_objective_ratio is not None:
            over_ns = max((value - bound for _, value, bound in values), default=0.0)
            yield Verdict(
                self._key(limit, "goodput", record),
                limit,
                failed or exceeded,
                account.e2e_ns,
                None if failed else max(0.0, over_ns),
            )

    def _key(self, limit: Limit, objective: Objective, record: RequestRecord) -> SeriesKey:
        served = record.first_scheduled_ns is not None
        key = SeriesKey(
            limit.label,
            objective,
            # A client may ask for any model: only a request that was served makes a new label.
            _capped(record.model, self._models, makes_new=served),
            tenant=(
                _capped(record.tenant, self._tenants, makes_new=True)
                if "tenant" in limit.by and record.tenant is not None
                else None
            ),
            prompt_class=(
                self._limits.prompt_class(record.prompt_tokens)
                if "prompt_class" in limit.by
                else None
            ),
        )
        return self._bounded(key)

    def of_unfinished(self) -> tuple[Limit, str] | None:
        """By which limit to judge a request that has not ended, and its model. Known only where one
        model has been served so far and its limit depends on nothing else."""
        if len(self._models) != 1:
            return None
        (model,) = self._models
        limit = self._limits.of_any(model)
        return None if limit is None else (limit, model)

    def key_of(self, limit: Limit, objective: Objective, model: str) -> SeriesKey:
        """Of a limit that `of_unfinished` gave."""
        return self._bounded(SeriesKey(limit.label, objective, model))

    def _bounded(self, key: SeriesKey) -> SeriesKey:
        if key in self._keys or len(self._keys) < MAX_SERIES:
            self._keys.add(key)
            return key
        rest = replace(key, model=OTHER, tenant=None if key.tenant is None else OTHER)
        return replace(rest, prompt_class=None)


def _capped(value: str, known: set[str], *, makes_new: bool) -> str:
    if value in known:
        return value
    if not makes_new or len(known) >= MAX_VALUES:
        return OTHER
    known.add(value)
    return value
