"""Which series there are: in a Prometheus server, or in one scrape."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsagent.dashboards.doctor.findings import InputError, one_line

TIMEOUT_S = 15.0
MOST_BYTES = 32 << 20
MOST_SAMPLES = 5_000  # of one name

# A scrape does not have what the server adds: the target's labels, and those of its discovery.
ADDED_BY_SERVERS = frozenset(
    ("instance", "job", "namespace", "pod", "container", "service", "endpoint", "node", "cluster")
)


class RefusedError(InputError):
    """A server understood what it was asked, and says no."""


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one query: how many series, or why none could be."""

    series: int
    error: str = ""


class Known(Protocol):
    what: str  # for a person

    def names(self) -> frozenset[str]: ...

    def samples(self, name: str) -> Sequence[Sample]: ...

    def added(self) -> frozenset[str]:
        """Labels that any series may have besides those seen here."""

    def ask(self, expr: str) -> Answer | None:
        """The expression evaluated; None where nobody evaluates."""


class Scrape:
    """One page of /metrics."""

    def __init__(self, text: str, what: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self.what = what
        self._samples: dict[str, list[Sample]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    of_name = self._samples.setdefault(sample.name, [])
                    if len(of_name) < MOST_SAMPLES:
                        of_name.append(Sample(sample.labels, sample.value))
        except (ValueError, IndexError, KeyError) as error:
            raise InputError(f"{what} shows no metrics: {one_line(error)}") from error
        if not self._samples:
            raise InputError(f"{what} shows no metrics: not one sample")

    def names(self) -> frozenset[str]:
        return frozenset(self._samples)

    def samples(self, name: str) -> Sequence[Sample]:
        return self._samples.get(name, ())

    def added(self) -> frozenset[str]:
        return ADDED_BY_SERVERS

    def ask(self, expr: str) -> Answer | None:
        return None


class Prometheus:
    """The HTTP API of a server."""

    def __init__(self, url: str) -> None:
        self._base = f"{url.rstrip('/')}/api/v1/"
        self.what = url
        self._cache: dict[str, list[Sample]] = {}
        data = self._get("label/__name__/values")
        if not isinstance(data, list):
            raise InputError(f"{url} answers, but not as Prometheus does")
        self._names = frozenset(name for name in data if isinstance(name, str))

    def names(self) -> frozenset[str]:
        return self._names

    def samples(self, name: str) -> Sequence[Sample]:
        if name not in self._cache:
            try:
                data = self._get("query", query=f"{{__name__={json.dumps(name)}}}")
            except RefusedError:
                data = None
            found = data.get("result") if isinstance(data, dict) else None
            self._cache[name] = [
                sample for each in (found or ())[:MOST_SAMPLES] if (sample := _sample(each))
            ]
        return self._cache[name]

    def added(self) -> frozenset[str]:
        return frozenset()

    def ask(self, expr: str) -> Answer | None:
        try:
            data = self._get("query", query=expr)
        except RefusedError as error:
            return Answer(0, str(error))
        result = data.get("result") if isinstance(data, dict) else None
        return Answer(len(result) if isinstance(result, list) else 0)

    def _get(self, path: str, **query: str) -> Any:
        url = self._base + path
        body = urllib.parse.urlencode(query).encode() if query else None
        text = fetch(url, body)
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{url} does not answer in JSON") from error
        if not isinstance(answer, dict) or answer.get("status") != "success":
            reason = answer.get("error") if isinstance(answer, dict) else answer
            raise RefusedError(one_line(reason))
        return answer.get("data")


def connect(where: str) -> Known:
    """A Prometheus server, a page of /metrics, or such a page in a file."""
    if not where.startswith(("http://", "https://")):
        if "://" in where:
            raise InputError(f"{where}: http, https or a file")
        try:
            data = Path(where).read_bytes()[: MOST_BYTES + 1]
        except OSError as error:
            raise InputError(f"{where} cannot be read: {error.strerror}") from error
        if len(data) > MOST_BYTES:
            raise InputError(f"{where} is larger than {MOST_BYTES >> 20} MiB")
        return Scrape(data.decode("utf-8", "replace"), where)
    if urllib.parse.urlsplit(where).path.rstrip("/").endswith("/metrics"):
        return Scrape(fetch(where, None), where)
    try:
        return Prometheus(where)
    except InputError as not_prometheus:
        try:
            return Scrape(fetch(where, None), where)
        except InputError:
            raise not_prometheus from None


def fetch(url: str, body: bytes | None) -> str:
    """A page, bounded. An answer that is an error in Prometheus' JSON is a page, too."""
    request = urllib.request.Request(url, body, {"Accept": "text/plain, application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            data: bytes = response.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            data = error.read(65_536)
        if not data.startswith(b"{"):
            raise InputError(f"{url} answers {error.code}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"{url} does not answer: {one_line(reason)}") from error
    if len(data) > MOST_BYTES:
        raise InputError(f"{url} sends more than {MOST_BYTES >> 20} MiB")
    return data.decode("utf-8", "replace")


def _sample(each: Any) -> Sample | None:
    """One series of an instant vector: {metric, value: [time, text]}."""
    if not isinstance(each, dict) or not isinstance(each.get("metric"), dict):
        return None
    labels = {str(k): str(v) for k, v in each["metric"].items() if k != "__name__"}
    try:
        value = float(each["value"][1])
    except (KeyError, IndexError, TypeError, ValueError):
        value = math.nan  # a native histogram
    return Sample(labels, value)


class Joined:
    """Several pages together, as one server would scrape them."""

    def __init__(self, parts: Sequence[Known]) -> None:
        self._parts = parts
        self.what = " and ".join(part.what for part in parts)

    def names(self) -> frozenset[str]:
        return frozenset().union(*(part.names() for part in self._parts))

    def samples(self, name: str) -> Sequence[Sample]:
        return [sample for part in self._parts for sample in part.samples(name)]

    def added(self) -> frozenset[str]:
        return frozenset().union(*(part.added() for part in self._parts))

    def ask(self, expr: str) -> Answer | None:
        """Only one alone can evaluate."""
        return None


def joined(parts: Sequence[Known]) -> Known:
    return parts[0] if len(parts) == 1 else Joined(parts)
