"""One metric, and how Prometheus spells it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]

# UCUM units that Prometheus spells out in the name; annotations such as {request} are left out.
_UNIT_SUFFIX = {
    "s": "seconds",
    "By": "bytes",
    "J": "joules",
    "W": "watts",
    "Hz": "hertz",
    "Cel": "celsius",
    "1": "ratio",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its OpenTelemetry name, UCUM unit, the attributes it may carry, its bounds."""

    name: str
    kind: MetricKind
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def prometheus_unit(self) -> str:
        """The unit as Prometheus names spell it; empty for a mere count."""
        if self.unit == "1" and self.kind == "counter":
            return ""
        return _UNIT_SUFFIX.get(self.unit, "")

    @property
    def prometheus_family(self) -> str:
        """The name of the OpenMetrics family: without `_total`, with the unit."""
        name = prometheus_label(self.name)
        unit = self.prometheus_unit
        return name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"

    @property
    def prometheus(self) -> str:
        """The name to query: counters end in `_total`; of histograms without `_bucket` etc."""
        family = self.prometheus_family
        return f"{family}_total" if self.kind == "counter" else family


@functools.lru_cache(maxsize=1024)  # of the catalogue's names; a scrape asks for each many times
def prometheus_label(attribute: str) -> str:
    """An attribute's name as a Prometheus label."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", attribute)
