"""What one pod sends, as `dsagent fleet measure` has found it: a JSON document, and the one that
comes with the agent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named

NAME = "measured.json"  # beside this module


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one pod under the stated load. Bytes on the wire are compressed as sent; raw ones are
    not. Bodies only: headers and TLS come on top."""

    load: str
    engine: str
    sampling: str
    duration_s: float
    requests_per_s: float
    steps_per_s: float
    series: int  # on /metrics at the end
    series_estimated: int  # what the agent had said at its start
    scrape_bytes: int  # of /metrics, not compressed
    points_per_push: float  # of OTLP: a histogram is one
    metrics_wire_bytes_per_s: float
    kept_requests: int  # what the share rests on: few, until it has run for long
    kept_ratio: float  # of the requests, at that sampling
    spans_per_kept_request: float
    span_wire_bytes: float
    span_raw_bytes: float
    logs_per_request: float  # of all requests: only slow and failed ones have one
    log_wire_bytes: float
    pushes_per_s: float  # of profiles, where they are asked for
    push_wire_bytes: float
    recording_rows_per_s: float
    recording_bytes_per_s: float
    rolled_bytes_per_s: float
    hourly_bytes: int  # what an hour of it adds up to, whatever the load

    def json(self) -> dict[str, Any]:
        return asdict(self)


def load_measured(path: Path | None = None) -> Measured:
    """Without a path, the one that comes with the agent. Raises DsagentError (exit 2)."""
    if path is None:
        return parse_measured(NAME, (files(__package__) / NAME).read_bytes())
    return parse_measured(str(path), read_named(path))


def parse_measured(name: str, text: bytes) -> Measured:
    try:
        document = json.loads(text)
        return Measured(**{each.name: _value(document, each.name, each.type) for each in _FIELDS})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise DsagentError(
            f"{name}: not what `dsagent fleet measure --json` prints: {what}", exit_code=USAGE
        ) from error


_FIELDS = fields(Measured)


def _value(document: Mapping[str, Any], name: str, kind: object) -> Any:
    value = document[name]
    if kind == "str":
        if not isinstance(value, str):
            raise TypeError(f"{name} is no text")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is no number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}")
    return value


def expected_line() -> str:
    """What an agent says at its start of what it will send by OTLP: its rate is not known yet."""
    one = load_measured()
    kept_bytes = one.spans_per_kept_request * one.span_wire_bytes
    return (
        f"traces: about {one.spans_per_kept_request:.0f} spans and {kept_bytes / 1e3:.1f} kB for a "
        f"request that is kept; metrics: {one.metrics_wire_bytes_per_s:.0f} bytes/s "
        "(measured on the bundled engine; dsagent fleet size)"
    )
