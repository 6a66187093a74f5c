"""The accounts of the last minutes, in bounded memory, and the questions asked of them."""

from __future__ import annotations

import json
import re
import statistics
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dsagent.agent.attribution.account import Account, Culprit
from dsagent.agent.errors import USAGE, DsagentError

KEEP_NS = 600_000_000_000
MAX_BYTES = 32 << 20
RENEW_NS = 30_000_000_000  # how far back an account that is renewed may lie
FOREVER_NS = 1 << 62
MIN_PREFIX = 4  # shorter ones are typing mistakes
OTHERS = 5
MAX_CULPRITS = 20
MAX_WORST = 10

By = Literal["ttft", "tpot", "e2e"]
BYS: tuple[By, ...] = get_args(By)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One account, small: the figures that questions are asked of, and the packed document."""

    ended_ns: int
    e2e_ns: int
    ttft_ns: int | None
    tpot_ns: float | None
    request_id: str
    trace_id: str
    external_id: str | None
    made_up_trace_id: str | None  # what others' accounts call it, if not by trace_id
    partial: bool
    finished: bool
    causes: tuple[tuple[str, int], ...]
    unattributed_ns: int
    culprits: tuple[tuple[str, Culprit], ...]
    packed: bytes

    @classmethod
    def of(cls, account: Account, ended_ns: int) -> Entry:
        record = account.record
        return cls(
            ended_ns=ended_ns,
            e2e_ns=account.e2e_ns,
            ttft_ns=record.ttft_ns,
            tpot_ns=record.tpot_ns,
            request_id=record.request_id,
            trace_id=account.trace_id,
            external_id=record.external_id,
            made_up_trace_id=(
                None if account.engine_span is None else account.engine_span.replaced_trace_id
            ),
            partial=account.partial,
            finished=account.finished,
            causes=tuple((part.cause, part.ns) for part in account.parts),
            unattributed_ns=account.unattributed_ns,
            culprits=tuple((part.cause, each) for part in account.parts for each in part.culprits),
            packed=zlib.compress(json.dumps(account.to_json()).encode(), 1),
        )

    @property
    def nbytes(self) -> int:
        """What it takes in memory, rounded up (held true by a test that measures it)."""
        return 1024 + len(self.packed) + 120 * len(self.causes) + 512 * len(self.culprits)

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return document

    def figure(self, by: By) -> float | None:
        return {"e2e": self.e2e_ns, "ttft": self.ttft_ns, "tpot": self.tpot_ns}[by]

    def blamed_on_requests_ns(self) -> int:
        return sum(who.ns for _, who in self.culprits if who.kind == "request")

    def ids(self) -> tuple[str, ...]:
        ids = (self.request_id, self.trace_id, self.external_id, self.made_up_trace_id)
        return tuple(filter(None, ids))


class Ledger:
    """Accounts of the last 10 minutes, 32 MiB at most; the oldest go first, and are counted."""

    def __init__(
        self,
        *,
        keep_ns: int = KEEP_NS,
        max_bytes: int = MAX_BYTES,
        place: str = "what the agent keeps (the last 10 minutes, 32 MiB at most)",
    ) -> None:
        """`place`: what errors call it."""
        self._place = place
        self._keep_ns = keep_ns
        self.max_bytes = max_bytes  # may be set at any time; holds from the next `add` or `expire`
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self.evicted = 0  # given up for memory, not for age
        self.total = 0

    def add(self, account: Account) -> None:
        entry = Entry.of(account, account.record.sent_ns)
        self._entries.append(entry)
        self._bytes += entry.nbytes
        self.total += 1
        self._fit()

    def _fit(self) -> None:
        while self._entries and self._bytes > self.max_bytes:
            self._drop_oldest()
            self.evicted += 1

    def renew(self, account: Account) -> None:
        """More is known of a request that was added a moment ago: the new account replaces the
        old one. One that is not there any more is passed over."""
        if account.engine_span is None:
            return
        entry = Entry.of(account, account.record.sent_ns)
        for back in range(1, len(self._entries) + 1):
            old = self._entries[-back]
            if old.request_id == entry.request_id and old.ended_ns == entry.ended_ns:
                self._entries[-back] = entry
                self._bytes += entry.nbytes - old.nbytes
                return
            if old.ended_ns < entry.ended_ns - RENEW_NS:
                return

    def expire(self, now_ns: int) -> None:
        while self._entries and self._entries[0].ended_ns < now_ns - self._keep_ns:
            self._drop_oldest()
        self._fit()

    @property
    def nbytes(self) -> int:
        return self._bytes

    def limit(self, max_bytes: int) -> None:
        """Another bound, from now on."""
        self.max_bytes = max_bytes
        self._fit()

    def recent(self, now_ns: int, last_ns: int) -> list[Entry]:
        """What ended in that time, but for partial ones."""
        return [e for e in self._entries if e.ended_ns >= now_ns - last_ns and not e.partial]

    def _drop_oldest(self) -> None:
        self._bytes -= self._entries.popleft().nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def explain(
        self,
        wanted: str | None,
        *,
        now_ns: int,
        last_ns: int,
        by: By = "e2e",
        unfinished: Callable[[], Iterable[Account]] = tuple,
        find: Callable[[str], Account | None] = lambda _wanted: None,
    ) -> dict[str, Any]:
        """The `explain` document of the request with this id (request, trace, external; an
        unambiguous beginning will do), the slowest where several share it; without an id, the
        slowest of all. Raises DsagentError (exit 2) where there is none.

        `unfinished` and `find` make accounts of requests that have not ended: of all of them, or
        of the one with an id. They are asked only where that is needed, since it is work.
        """
        entries = [entry for entry in self._entries if entry.ended_ns >= now_ns - last_ns]
        if wanted is not None:
            needle = _needle(wanted)
            exact = [e for e in entries if needle in e.ids() or needle.lower() == e.trace_id]
            if not exact and (account := find(needle) or find(needle.lower())) is not None:
                exact = [Entry.of(account, now_ns)]
            found = exact or _begun(entries, needle, self._place)
            return _document(_slowest_first(found, by))
        entries += [Entry.of(account, now_ns) for account in unfinished()]
        complete = [entry for entry in entries if not entry.partial] or entries
        measurable = [entry for entry in complete if entry.figure(by) is not None]
        if not measurable:
            when = f"the last {duration_text(last_ns)} of " if last_ns < FOREVER_NS else ""
            raise DsagentError(
                f"no request with a known {by} in {when}{self._place}", exit_code=USAGE
            )
        return _document(_slowest_first(measurable, by)[: OTHERS + 1])

    def why(self, *, now_ns: int, last_ns: int) -> dict[str, Any]:
        """Where the time of all requests went that ended in the last `last_ns`; partial ones,
        which began before the agent attached, are left out."""
        return summarise(self.recent(now_ns, last_ns))

    def showpieces(self) -> list[dict[str, Any]]:
        """The slowest request, and the one most delayed by others if that is another one."""
        complete = [entry for entry in self._entries if not entry.partial]
        if not complete:
            return []
        slowest = _slowest_first(complete, "e2e")[: OTHERS + 1]
        documents = [_document(slowest)]
        victim = max(complete, key=Entry.blamed_on_requests_ns)
        if victim is not slowest[0] and victim.blamed_on_requests_ns():
            documents.append(_document([victim]))
        return documents

    def unattributed_ratio_p50(self) -> float | None:
        """Of the e2e time of the median request; None without a complete request."""
        ratios = [e.unattributed_ns / e.e2e_ns for e in self._entries if not e.partial and e.e2e_ns]
        return statistics.median(ratios) if ratios else None


def summarise(entries: Sequence[Entry]) -> dict[str, Any]:
    """The `why` document. `causes` holds unattributed too, so its ratios add up to 1."""
    total_ns = sum(entry.e2e_ns for entry in entries)
    causes: dict[str, int] = {}
    culprits: dict[tuple[str, str, str, int | None, str | None, str | None], int] = {}
    for entry in entries:
        for cause, ns in (*entry.causes, ("unattributed", entry.unattributed_ns)):
            causes[cause] = causes.get(cause, 0) + ns
        for cause, who in entry.culprits:
            key = (cause, who.kind, who.name, who.pid, who.request_id, who.trace_id)
            culprits[key] = culprits.get(key, 0) + who.ns
    ranked = sorted(causes.items(), key=lambda item: -item[1])
    blamed = sorted(culprits.items(), key=lambda item: -item[1])[:MAX_CULPRITS]
    return {
        "requests": len(entries),
        "causes": [
            {"cause": cause, "ns": ns, "ratio": ns / total_ns if total_ns else 0.0}
            for cause, ns in ranked
            if ns
        ],
        "culprits": [
            {
                "cause": cause,
                "kind": kind,
                "name": name,
                "pid": pid,
                "request_id": request_id,
                "trace_id": trace_id,
                "ns": ns,
            }
            for (cause, kind, name, pid, request_id, trace_id), ns in blamed
        ],
        "worst": [entry.trace_id for entry in _slowest_first(entries, "e2e")[:MAX_WORST]],
    }


def _needle(wanted: str) -> str:
    """The id itself: of a traceparent its trace id."""
    traceparent = _TRACEPARENT.fullmatch(wanted.strip().lower())
    return traceparent.group(1) if traceparent else wanted.strip()


def _begun(entries: Sequence[Entry], needle: str, place: str) -> list[Entry]:
    """The one request that has an id which begins so."""
    begun = (
        [entry for entry in entries if any(each.startswith(needle) for each in entry.ids())]
        if len(needle) >= MIN_PREFIX
        else []
    )
    if len(begun) > 1:
        some = ", ".join(entry.request_id for entry in begun[:OTHERS])
        raise DsagentError(
            f"{len(begun)} requests have an id that begins with {needle!r}, among them {some}",
            exit_code=USAGE,
        )
    if not begun:
        raise DsagentError(f"no request {needle!r} in {place}", exit_code=USAGE)
    return begun


def _slowest_first(entries: Sequence[Entry], by: By) -> list[Entry]:
    return sorted(entries, key=lambda entry: -(entry.figure(by) or 0))


def _document(entries: Sequence[Entry]) -> dict[str, Any]:
    document = entries[0].document()
    document["others"] = [{"request_id": e.request_id, "e2e_ns": e.e2e_ns} for e in entries[1:]]
    return document


def of_recording(accounts: Iterable[Account], last_ns: int | None) -> tuple[Ledger, int, int]:
    """A ledger of recorded accounts, its now (the end of the last one) and the window in ns."""
    ledger = Ledger(keep_ns=FOREVER_NS, max_bytes=FOREVER_NS, place="the recording")
    ordered = sorted(accounts, key=lambda account: account.record.sent_ns)
    for account in ordered:
        ledger.add(account)
    now_ns = ordered[-1].record.sent_ns if ordered else 0
    return ledger, now_ns, FOREVER_NS if last_ns is None else last_ns


_UNITS_NS = {"ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000, "h": 3_600_000_000_000}


def parse_duration_ns(text: str) -> int:
    """ "10m", "90s", "1.5h", "500ms", or seconds without a unit. Raises DsagentError (exit 2)."""
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(ms|s|m|h)?", text.strip())
    ns = round(float(found.group(1)) * _UNITS_NS[found.group(2) or "s"]) if found else 0
    if ns <= 0 or ns > 1 << 61:
        raise DsagentError(f"{text!r} is no duration; say 10m, 90s or 1h", exit_code=USAGE)
    return ns


def duration_text(ns: int) -> str:
    """The largest unit that divides it: 600 s is "10m"."""
    for unit in ("h", "m", "s"):
        if ns % _UNITS_NS[unit] == 0:
            return f"{ns // _UNITS_NS[unit]}{unit}"
    return f"{ns / 1e9:.3g}s"
