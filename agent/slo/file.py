"""The SLO file: read, validated, unknown keys refused with one clear line.

docs/slo.md describes it. An example is dashboards/slo.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named
from dsagent.agent.slo.cache import CACHE_PRESETS, CacheAlert
from dsagent.agent.slo.limits import DEFAULT_OBJECTIVE_RATIO, Limit, Limits, SplitBy, prompt_classes
from dsagent.agent.slo.presets import PRESETS
from dsagent.agent.url_text import refuse_user

T = TypeVar("T")

MAX_ENTRIES = 64
MAX_PROMPT_BOUNDS = 7
MAX_CACHE_ALERTS = 16
MAX_NAME_CHARS = 64
DEFAULT_TENANT_HEADER = "X-Tenant-Id"

_TOP = ("slo", "tenant_header", "prompt_classes", "webhook", "windows_divided_by", "cache")
_LIMITS = ("ttft_ms", "tpot_ms", "e2e_ms")
_OBJECTIVES = ("errors_objective", "goodput_objective")
_ENTRY = ("name", "model", "tenant", "prompt_class", "preset", *_LIMITS, "objective", *_OBJECTIVES)
_CACHE = ("name", "preset", "below", "for_s", "action", "webhook", "command")
_SPLITS: tuple[SplitBy, ...] = get_args(SplitBy)
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_NAME = re.compile(r"[^\x00-\x1f\x7f\"\\{}]+")


@dataclass(frozen=True, slots=True)
class SloFile:
    """What one file says."""

    limits: Limits
    tenant_header: str = DEFAULT_TENANT_HEADER
    webhook: str | None = None  # where the agent's own alerts go
    windows_divided_by: float = 1.0
    cache: tuple[CacheAlert, ...] = ()


def load_limits(path: str | Path) -> Limits:
    """The limits of a file. Raises DsagentError with one clear line."""
    return load_slo(path).limits


def load_slo(path: str | Path) -> SloFile:
    """Reads and validates a file. Raises DsagentError (exit 2) with one clear line."""
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
        return _file(document)
    except ValueError as error:
        raise DsagentError(f"{path}: {error}", exit_code=USAGE) from error


def _file(document: Any) -> SloFile:
    if not isinstance(document, dict):
        raise ValueError("must be a mapping with the key slo")  # noqa: TRY004 - one class for all
    _refuse_unknown(document, _TOP, "")
    bounds = _prompt_bounds(document.get("prompt_classes", []))
    entries = tuple(
        _limit(entry, f"slo[{i}]", prompt_classes(bounds))
        for i, entry in enumerate(_list(document.get("slo"), "slo", MAX_ENTRIES, least=1))
    )
    _refuse_twins([entry.label for entry in entries], "slo")
    alerts = tuple(
        _cache_alert(each, f"cache[{i}]")
        for i, each in enumerate(_list(document.get("cache", []), "cache", MAX_CACHE_ALERTS))
    )
    _refuse_twins([f"{each.name} {each.action}" for each in alerts], "cache")
    divided_by = document.get("windows_divided_by", 1)
    if not _is_number(divided_by) or not 1 <= divided_by <= 3600:
        raise ValueError("windows_divided_by must be a number from 1 to 3600")
    return SloFile(
        Limits(entries, bounds),
        tenant_header=_header(document.get("tenant_header", DEFAULT_TENANT_HEADER)),
        webhook=_optional(document, "webhook", "", _url),
        windows_divided_by=float(divided_by),
        cache=alerts,
    )


def _limit(entry: Any, where: str, classes: tuple[str, ...]) -> Limit:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping")  # noqa: TRY004 - one class for all
    _refuse_unknown(entry, (*_ENTRY, "by"), f"{where}: ")
    model = entry.get("model")
    if not isinstance(model, str) or not _is_name(model):
        raise ValueError(f"{where}: model must be a name or a glob, such as '*'")
    values = _preset(entry, where)
    values |= {key: _milliseconds(entry[key], f"{where}: {key}") for key in _LIMITS if key in entry}
    errors, goodput = (_optional(entry, key, f"{where}: ", _objective) for key in _OBJECTIVES)
    if not values and errors is None:
        raise ValueError(f"{where}: needs at least one of {', '.join((*_LIMITS, _OBJECTIVES[0]))}")
    wanted_class = _optional(entry, "prompt_class", f"{where}: ", _text)
    if wanted_class is not None and wanted_class not in classes:
        known = ", ".join(classes) or "none: the file has no prompt_classes"
        raise ValueError(f"{where}: no prompt_class {wanted_class!r} (known: {known})")
    by = _list(entry.get("by", []), f"{where}: by", len(_SPLITS))
    for each in by:
        if each not in _SPLITS:
            raise ValueError(
                f"{where}: by can hold {' and '.join(_SPLITS)}, not {str(each)[:40]!r}"
            )
    if "prompt_class" in by and not classes:
        raise ValueError(f"{where}: by prompt_class needs the list prompt_classes beside slo")
    objective = _optional(entry, "objective", f"{where}: ", _objective)
    return Limit(
        model,
        ttft_ns=values.get("ttft_ms"),
        tpot_ns=values.get("tpot_ms"),
        e2e_ns=values.get("e2e_ms"),
        name=_optional(entry, "name", f"{where}: ", _text) or "",
        tenant=_optional(entry, "tenant", f"{where}: ", _text),
        prompt_class=wanted_class,
        objective_ratio=DEFAULT_OBJECTIVE_RATIO if objective is None else objective,
        errors_objective_ratio=errors,
        goodput_objective_ratio=goodput,
        by=tuple(each for each in _SPLITS if each in by),
    )


def _preset(entry: dict[Any, Any], where: str) -> dict[str, int]:
    """MLPerf's limits in nanoseconds, which the entry's own then override."""
    if "preset" not in entry:
        return {}
    preset = entry["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"{where}: no preset {str(preset)[:40]!r} (known: {', '.join(PRESETS)})")
    ttft_ms, tpot_ms = PRESETS[preset]
    return {"ttft_ms": round(ttft_ms * 1e6), "tpot_ms": round(tpot_ms * 1e6)}


def _cache_alert(entry: Any, where: str) -> CacheAlert:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping")  # noqa: TRY004 - one class for all
    _refuse_unknown(entry, _CACHE, f"{where}: ")
    preset_name = entry.get("preset")
    preset = CACHE_PRESETS.get(preset_name) if isinstance(preset_name, str) else None
    if "preset" in entry and preset is None:
        known = ", ".join(CACHE_PRESETS)
        raise ValueError(f"{where}: no preset {str(preset_name)[:40]!r} (known: {known})")
    missing = [key for key in ("below", "for_s") if key not in entry and preset is None]
    if missing:
        raise ValueError(f"{where}: needs a preset, or both below (a percentage) and for_s")
    below = _optional(entry, "below", f"{where}: ", _objective)
    for_s = _optional(entry, "for_s", f"{where}: ", _seconds)
    action = _optional(entry, "action", f"{where}: ", _text)
    return CacheAlert(
        name=_optional(entry, "name", f"{where}: ", _text) or "prefix",
        action=action or (preset.action if preset else "alert"),
        below_ratio=below if below is not None else preset.below_ratio if preset else 0.0,
        for_s=for_s if for_s is not None else preset.for_s if preset else 0.0,
        webhook=_optional(entry, "webhook", f"{where}: ", _url),
        command=_optional(entry, "command", f"{where}: ", _command) or (),
    )


def _optional(
    mapping: dict[Any, Any], key: str, where: str, read: Callable[[Any, str], Any]
) -> Any:
    return read(mapping[key], f"{where}{key}") if key in mapping else None


def _refuse_unknown(mapping: dict[Any, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [str(key)[:40] for key in mapping if key not in known]
    if unknown:
        raise ValueError(f"{where}unknown key {unknown[0]!r} (known: {', '.join(known)})")


def _refuse_twins(labels: list[str], what: str) -> None:
    for place, label in enumerate(labels):
        if label in labels[:place]:
            twin = f"{what}[{labels.index(label)}]"
            raise ValueError(f"{what}[{place}]: goes by {label!r} as {twin} does; give it a name")


def _list(value: Any, where: str, most: int, least: int = 0) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        raise ValueError(f"{where} must be a list" + (" of at least one entry" if least else ""))
    if len(value) > most:
        raise ValueError(f"{where} has more than {most} entries")
    return value


def _prompt_bounds(value: Any) -> tuple[int, ...]:
    bounds = _list(value, "prompt_classes", MAX_PROMPT_BOUNDS)
    for bound in bounds:
        if not isinstance(bound, int) or isinstance(bound, bool) or not 0 < bound <= 10**9:
            raise ValueError("prompt_classes must be upper bounds in whole tokens above 0")
    if sorted(set(bounds)) != bounds:
        raise ValueError("prompt_classes must rise")
    return tuple(bounds)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _milliseconds(value: Any, where: str) -> int:
    """A positive number of milliseconds as nanoseconds."""
    if not _is_number(value) or not 0 < value <= 1e9:
        raise ValueError(f"{where} must be a number of milliseconds above 0")
    return round(float(value) * 1e6)


def _seconds(value: Any, where: str) -> float:
    if not _is_number(value) or not 0 < value <= 86400:
        raise ValueError(f"{where} must be a number of seconds above 0, a day at most")
    return float(value)


def _objective(value: Any, where: str) -> float:
    """A percentage as a ratio. Below 50 % it would be no objective but a typing mistake: 0.99."""
    least = 0 if where.endswith("below") else 50
    if not _is_number(value) or not least < value <= 100:
        raise ValueError(f"{where} must be a percentage above {least}, 100 at most, such as 99.9")
    return round(float(value) / 100, 9)


def _is_name(value: str) -> bool:
    return len(value) <= MAX_NAME_CHARS and _NAME.fullmatch(value) is not None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _is_name(value):
        raise ValueError(f"{where} must be a text of at most {MAX_NAME_CHARS} plain characters")
    return value


def _header(value: Any) -> str:
    if not isinstance(value, str) or not _HEADER.fullmatch(value):
        raise ValueError("tenant_header must be the name of a request header, such as X-Tenant-Id")
    return value


def _url(value: Any, where: str) -> str:
    message = f"{where} must be a URL such as http://127.0.0.1:9095/alerts"
    if not isinstance(value, str) or len(value) > 2000 or not value.isprintable() or " " in value:
        raise ValueError(message)
    refuse_user(value)
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # a port beyond 65535, a bad IPv6 address
        raise ValueError(message) from error
    if not good:
        raise ValueError(message)
    return value


def _command(value: Any, where: str) -> tuple[str, ...]:
    parts = _list(value, where, 64, least=1)
    for part in parts:
        if not isinstance(part, str) or "\0" in part or len(part) > 4096:
            raise ValueError(f"{where} must be a list of texts: the program and its arguments")
    if not parts[0]:
        raise ValueError(f"{where} must begin with a program")
    return tuple(parts)
