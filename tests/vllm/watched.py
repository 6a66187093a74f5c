"""A server beside what its rings say."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_lab import SERVED_AS, Server

from dsagent.agent.host import procfs
from dsagent.instrumentation.records import RankStep, RequestOpen, RequestRecord, Share, Step
from dsagent.instrumentation.ring import Record, RingReader, Role, find_rings
from dsagent.instrumentation.tally import Tally

PATIENCE_S = 120.0  # for what must happen; only a failure ever waits so long


@dataclass(frozen=True, slots=True)
class Reply:
    """What a streaming client saw; times on the same clock as the records."""

    sent_ns: int
    first_ns: int
    last_ns: int
    id: str
    usage: dict[str, Any]
    chunks: int


class Watched:
    """Reads each ring of the server's processes from its beginning."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.steps: list[Step] = []
        self.ranks: list[RankStep] = []
        self.opened: list[RequestOpen] = []
        self.closed: list[RequestRecord] = []
        self.tallies: list[Tally] = []
        self._reading = threading.Lock()  # a reader is for one thread
        self._readers: dict[int, RingReader] = {}
        self.read()

    @property
    def pids(self) -> dict[Role, int]:
        return {reader.header.role: reader.header.pid for reader in self._readers.values()}

    @property
    def readers(self) -> list[RingReader]:
        return list(self._readers.values())

    def read(self) -> None:
        with self._reading:
            self._read()

    def _read(self) -> None:
        for pid in (self.server.pid, *procfs.descendants(self.server.pid, procfs.parents())):
            for candidate in find_rings(pid):
                if candidate.inode not in self._readers:
                    self._readers[candidate.inode] = RingReader.open(candidate)
        for reader in self._readers.values():
            while records := reader.read(1000):
                for record in records:
                    self._sort(record)

    def _sort(self, record: Record) -> None:
        match record:
            case Step():
                self.steps.append(record)
            case RankStep():
                self.ranks.append(record)
            case RequestOpen():
                self.opened.append(record)
            case RequestRecord():
                self.closed.append(record)
            case Tally():
                self.tallies.append(record)

    def until(self, true: Callable[[], Any], what: str) -> Any:
        """Reads on until it is true, and returns it."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := true()):
            assert time.monotonic() < deadline, f"never: {what}"
            time.sleep(0.02)
            self.read()
        return found

    def record(self, request_id: str) -> RequestRecord:
        """Of the request with that id, once it has ended."""

        def find() -> RequestRecord | None:
            return next((r for r in self.closed if r.request_id == request_id), None)

        found = self.until(find, f"the end of {request_id}")
        assert isinstance(found, RequestRecord)
        return found

    def shares(self, record: RequestRecord) -> list[tuple[Step, Share]]:
        """The steps it took part in, up to its last output."""

        def find() -> list[tuple[Step, Share]]:
            return [
                (step, share)
                for step in self.steps
                for share in step.shares
                if share.request_key == record.request_key
            ]

        self.until(
            lambda: sum(s.output_tokens for _, s in find()) >= record.output_tokens,
            f"all steps of {record.request_id}",
        )
        return find()

    def stream(
        self, path: str, body: dict[str, Any], *, leave_after: int = 0, **headers: str
    ) -> Reply:
        """A streaming call; closes the connection after so many chunks, if told to."""
        connection = self.server.connect()
        given = {"Content-Type": "application/json", **headers}
        sent_ns = time.monotonic_ns()
        document = {
            "model": SERVED_AS,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        connection.request("POST", path, json.dumps(document), given)
        reply = connection.getresponse()
        assert reply.status == 200
        first_ns, chunks, request_id = 0, 0, ""
        usage: dict[str, Any] = {}
        while line := reply.readline():
            if not line.startswith(b"data: {"):
                continue
            first_ns = first_ns or time.monotonic_ns()
            chunks += 1
            chunk = json.loads(line[6:])
            request_id, usage = chunk["id"], chunk.get("usage") or usage
            if chunks == leave_after:
                break
        last_ns = time.monotonic_ns()
        reply.close()
        connection.close()
        return Reply(sent_ns, first_ns, last_ns, request_id, usage, chunks)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """All of them in threads; their results in order. The first that failed is raised."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:  # noqa: BLE001  raised below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
