"""Which engine a received span belongs to: all engines of a pod share one receiver.

A span whose resource names its process is shown only to the engine of that process. Others are
shown to each engine, and the first that knows the request by its id has it; one that fits only by
trace and caller waits a little, for an engine that knows the id. One that nobody has had in its
time is counted as unmatched, once.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dsagent.agent.attribution.engine_spans import KEEP_SPAN_NS, Claims
from dsagent.agent.facts import EngineSpan
from dsagent.agent.sidecar.processes import Key

OwnerOf = Callable[[int], Key | None]  # of a process; None where it belongs to no engine

MOST_SPANS = 4096
NAMED_FIRST_NS = 2_000_000_000
KEEP_NS = KEEP_SPAN_NS + NAMED_FIRST_NS  # longer than any engine looks for its request


@dataclass(slots=True)
class _Entry:
    number: int  # in the order of coming
    came_ns: int
    span: EngineSpan
    owner: Key | None  # the engine of its process, where that is known
    taken: bool = False


class SpanBoard:
    """May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()  # by span id
        self._next = 0
        self._shown_to: set[Key] = set()
        self._outcomes: Counter[str] = Counter()

    def put(self, spans: Iterable[EngineSpan], owner_of: OwnerOf, now_ns: int) -> None:
        with self._lock:
            for span in spans:
                if span.span_id in self._entries:
                    self._outcomes["repeated"] += 1
                    continue
                owner = None if span.process_id is None else owner_of(span.process_id)
                self._entries[span.span_id] = _Entry(self._next, now_ns, span, owner)
                self._next += 1
            while len(self._entries) > MOST_SPANS:
                self._give_up(next(iter(self._entries)))

    def expire(self, now_ns: int) -> None:
        with self._lock:
            while self._entries:
                span_id, entry = next(iter(self._entries.items()))
                if now_ns - entry.came_ns <= KEEP_NS:
                    return
                self._give_up(span_id)

    def miss(self, spans: int) -> None:
        """So many came that were never shown here: they were too many at once."""
        with self._lock:
            if spans:
                self._outcomes["unmatched"] += spans

    def _give_up(self, span_id: int) -> None:
        if not self._entries.pop(span_id).taken:
            self._outcomes["unmatched"] += 1

    def since(self, number: int, key: Key) -> tuple[list[EngineSpan], int]:
        """What has come for that engine from this number on, and the number to go on with."""
        with self._lock:
            found: list[EngineSpan] = []
            for entry in reversed(self._entries.values()):
                if entry.number < number:
                    break
                if entry.owner in (None, key):
                    found.append(entry.span)
            return found[::-1], self._next

    def take(self, key: Key, span: EngineSpan, *, is_named: bool, now_ns: int) -> bool:
        with self._lock:
            entry = self._entries.get(span.span_id)
            if entry is None or entry.taken:
                return False
            is_sure = is_named or entry.owner == key or self._shown_to <= {key}
            if not is_sure and now_ns - entry.came_ns < NAMED_FIRST_NS:
                return False
            entry.taken = True
            return True

    def counts(self) -> dict[str, int]:
        """Spans that nobody has had (unmatched), and that have come again (repeated)."""
        with self._lock:
            return dict(self._outcomes)

    def show_to(self, key: Key) -> None:
        """One more engine, until `show_no_more`."""
        with self._lock:
            self._shown_to.add(key)

    def show_no_more(self, key: Key) -> None:
        with self._lock:
            self._shown_to.discard(key)


class SharedClaims(Claims):
    """One engine's."""

    counts_unmatched = False  # the board does

    def __init__(self, board: SpanBoard, key: Key) -> None:
        self._board = board
        self._key = key

    def take(self, span: EngineSpan, *, is_named: bool, now_ns: int) -> bool:
        return self._board.take(self._key, span, is_named=is_named, now_ns=now_ns)
