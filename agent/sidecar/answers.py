"""Answers questions over all engines: the right one is found by the id, or by `--pid`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.host import procfs
from dsagent.agent.listening.question import Question
from dsagent.agent.session.ledger import OTHERS, Entry, Ledger, summarise
from dsagent.agent.sidecar.books import Book, Books
from dsagent.agent.sidecar.watch import Watch


class Answers:
    """In the sidecar's own thread; what belongs to a watch is asked of its thread."""

    def __init__(self, watches: Callable[[], Sequence[Watch]], books: Books) -> None:
        self._watches = watches
        self._books = books

    def explain(self, question: Question) -> dict[str, Any]:
        """Raises DsagentError (exit 2) where no engine knows such a request."""
        now_ns = time.monotonic_ns()
        watches, ended = self._of(question.pid)
        found: list[dict[str, Any]] = []
        refusals: list[DsagentError] = []
        asked: list[Callable[[], dict[str, Any]]] = [
            *(_live(watch, question, now_ns) for watch in watches),
            *(_past(book.ledger, question, now_ns) for book in ended),
        ]
        for ask in asked:
            try:
                found.append(ask())
            except DsagentError as error:
                refusals.append(error)
        if not found:
            if not refusals:
                raise DsagentError("no engine has been found yet", exit_code=USAGE)
            # That an id is ambiguous, or that an engine's watch did not answer, says more than that
            # another engine does not know it.
            raise max(
                refusals,
                key=lambda error: ("begins with" in str(error), error.exit_code != USAGE),
            )
        found.sort(key=lambda document: -(_figure(document, question) or 0))
        others = [each for document in found[1:] for each in (_as_other(document),)]
        if question.wanted is None:
            others += [each for document in found for each in document["others"]]
            others.sort(key=lambda each: -each["e2e_ns"])
            found[0]["others"] = others[:OTHERS]
        return found[0]

    def why(self, question: Question) -> dict[str, Any]:
        now_ns = time.monotonic_ns()
        watches, ended = self._of(question.pid)
        entries: list[Entry] = []
        for watch in watches:
            if watch.state == "watching":
                entries += watch.call(
                    lambda session: session.ledger.recent(now_ns, question.last_ns)
                )
            elif watch.over:
                entries += watch.ledger.recent(now_ns, question.last_ns)
        for book in ended:
            entries += book.ledger.recent(now_ns, question.last_ns)
        return summarise(entries)

    def watch_of(self, pid: int) -> Watch:
        """The one whose engine this process belongs to. Raises DsagentError (exit 2)."""
        watches, _ = self._of(pid)
        if not watches:
            raise DsagentError(f"the engine of process {pid} has ended", exit_code=USAGE)
        return watches[0]

    def _of(self, pid: int | None) -> tuple[list[Watch], list[Book]]:
        """What is asked: all, or those of that process's engine."""
        watches, ended = list(self._watches()), list(self._books.ended)
        if pid is None:
            return watches, ended
        parent_of = procfs.parents()
        near = {pid, *procfs.ancestors(pid, parent_of), *procfs.descendants(pid, parent_of)}
        exact = [watch for watch in watches if watch.key.pid == pid]
        watches = exact or [watch for watch in watches if watch.key.pid in near]
        pids = {pid, *(watch.key.pid for watch in watches)}
        books = [book for book in ended if book.key.pid in pids]
        if not watches and not books:
            raise DsagentError(
                f"the sidecar watches no engine that process {pid} belongs to", exit_code=USAGE
            )
        return watches, books


def _live(watch: Watch, question: Question, now_ns: int) -> Callable[[], dict[str, Any]]:
    if watch.over:
        return _past(watch.ledger, question, now_ns)
    return lambda: watch.call(lambda session: session.explain(question, time.monotonic_ns()))


def _past(ledger: Ledger, question: Question, now_ns: int) -> Callable[[], dict[str, Any]]:
    return lambda: ledger.explain(
        question.wanted, now_ns=now_ns, last_ns=question.last_ns, by=question.by
    )


def _figure(document: dict[str, Any], question: Question) -> float | None:
    value: float | None = document[f"{question.by}_ns"]
    return value


def _as_other(document: dict[str, Any]) -> dict[str, Any]:
    return {"request_id": document["request_id"], "e2e_ns": document["e2e_ns"]}
