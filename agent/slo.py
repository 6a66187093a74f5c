"""The limits people set: read from a small YAML file, checked against accounts.

slo:
  - model: "deepseek-*"   # a glob; the first entry that matches counts
    ttft_ms: 2000
    tpot_ms: 80
  - model: "*"
    e2e_ms: 30000
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dsagent.agent.account import Account
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named

MAX_ENTRIES = 256
_LIMITS = ("ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True, slots=True)
class Limit:
    """Limits in nanoseconds for the models whose name matches the glob. Absent is None."""

    model: str
    ttft_ns: int | None = None
    tpot_ns: int | None = None
    e2e_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Every configured limit; without any, nobody violates one."""

    entries: tuple[Limit, ...] = ()

    def of(self, model: str) -> Limit | None:
        """The first entry that matches."""
        return next((limit for limit in self.entries if fnmatchcase(model, limit.model)), None)

    def violated(self, account: Account) -> list[str]:
        """Which of ttft, tpot, e2e are above their limit. A value that is absent is not judged,
        and neither is a partial or unfinished request."""
        limit = self.of(account.record.model)
        if limit is None or account.partial or not account.finished:
            return []
        record = account.record
        measured = (
            ("ttft", record.ttft_ns, limit.ttft_ns),
            ("tpot", record.tpot_ns, limit.tpot_ns),
            ("e2e", account.e2e_ns, limit.e2e_ns),
        )
        return [
            name
            for name, value, bound in measured
            if value is not None and bound is not None and value > bound
        ]

    def bounds_s(self, name: str) -> tuple[float, ...]:
        """The limits called `ttft`, `tpot` or `e2e` in seconds, to be bounds of a histogram."""
        values = (getattr(limit, f"{name}_ns") for limit in self.entries)
        return tuple(sorted({value / 1e9 for value in values if value is not None}))


def load_limits(path: str | Path) -> Limits:
    """Reads and validates a file of limits. Raises DsagentError with one clear line."""
    import yaml

    text = read_named(path)
    try:
        document = yaml.safe_load(text)
    except RecursionError as error:
        raise DsagentError(f"{path} is nested too deeply", exit_code=USAGE) from error
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DsagentError(f"{path}: not YAML: {reason}", exit_code=USAGE) from error
    try:
        return _limits(document)
    except ValueError as error:
        raise DsagentError(f"{path}: {error}", exit_code=USAGE) from error


def _limits(document: Any) -> Limits:
    if not isinstance(document, dict):
        raise ValueError("must be a mapping with the key slo")  # noqa: TRY004 - one class for all
    _refuse_unknown(document, ("slo",), "")
    entries = document.get("slo")
    if not isinstance(entries, list) or not entries:
        raise ValueError("slo must be a list of at least one entry")
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"slo has more than {MAX_ENTRIES} entries")
    return Limits(tuple(_limit(entry, f"slo[{i}]") for i, entry in enumerate(entries)))


def _limit(entry: Any, where: str) -> Limit:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping")  # noqa: TRY004 - one class for all
    _refuse_unknown(entry, ("model", *_LIMITS), f"{where}: ")
    model = entry.get("model")
    if not isinstance(model, str) or not model:
        raise ValueError(f"{where}: model must be a name or a glob, such as '*'")
    values = {key: _milliseconds(entry[key], f"{where}: {key}") for key in _LIMITS if key in entry}
    if not values:
        raise ValueError(f"{where}: needs at least one of {', '.join(_LIMITS)}")
    return Limit(
        model,
        ttft_ns=values.get("ttft_ms"),
        tpot_ns=values.get("tpot_ms"),
        e2e_ns=values.get("e2e_ms"),
    )


def _refuse_unknown(mapping: dict[Any, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [str(key)[:40] for key in mapping if key not in known]
    if unknown:
        raise ValueError(f"{where}unknown key {unknown[0]!r} (known: {', '.join(known)})")


def _milliseconds(value: Any, where: str) -> int:
    """A positive number of milliseconds as nanoseconds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1e9:
        raise ValueError(f"{where} must be a number of milliseconds above 0")
    return round(float(value) * 1e6)
