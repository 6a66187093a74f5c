"""How long each tier of a fleet's store is kept: a TOML file, where an unknown key is an error.

[raw]            # all that the agents recorded
keep_days = 7
[hourly]         # added up by hour
keep_days = 90
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named

MAX_DAYS = 36_500
DAY_NS = 86_400_000_000_000
_TIERS = ("raw", "hourly")


@dataclass(frozen=True, slots=True)
class Policy:
    raw_keep_ns: int
    hourly_keep_ns: int


def load_policy(path: str | Path) -> Policy:
    """Raises DsagentError (exit 2) with one clear line."""
    import tomllib

    try:
        document = tomllib.loads(read_named(path).decode())
        return _policy(document)
    except RecursionError as error:
        raise DsagentError(f"{path} is nested too deeply", exit_code=USAGE) from error
    except tomllib.TOMLDecodeError as error:
        raise DsagentError(f"{path} is not TOML: {error}", exit_code=USAGE) from error
    except ValueError as error:
        raise DsagentError(f"{path}: {error}", exit_code=USAGE) from error


def _policy(document: Mapping[str, Any]) -> Policy:
    _refuse_unknown(document, _TIERS, "")
    raw, hourly = (_keep_ns(document, tier) for tier in _TIERS)
    if hourly < raw:
        raise ValueError(
            "hourly.keep_days is less than raw.keep_days: what is added up outlives what it is "
            "made of"
        )
    return Policy(raw, hourly)


def _keep_ns(document: Mapping[str, Any], tier: str) -> int:
    section = document.get(tier)
    if not isinstance(section, dict):
        raise ValueError(f"needs a section [{tier}] with keep_days")  # noqa: TRY004
    _refuse_unknown(section, ("keep_days",), f"{tier}: ")
    days: Any = section.get("keep_days")
    is_number = isinstance(days, (int, float)) and not isinstance(days, bool)
    if not is_number or not math.isfinite(days) or not 0 < days <= MAX_DAYS:
        raise ValueError(f"{tier}.keep_days must be a number of days up to {MAX_DAYS}")
    return int(days * DAY_NS)


def _refuse_unknown(section: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in section:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{where}unknown key {key[:40]!r}; {hint}")
