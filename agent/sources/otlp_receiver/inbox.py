"""What the servers' threads hand to the session's: bounded, and every refusal counted."""

from __future__ import annotations

import threading
import zlib
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum

from dsagent.agent.facts import EngineSpan, OtlpBody
from dsagent.agent.sources.otlp_receiver.decode import decode
from dsagent.agent.sources.otlp_receiver.wire import BadBodyError

MAX_BODY_BYTES = 4 << 20  # as it comes
MAX_PLAIN_BYTES = 8 << 20  # once decompressed
MAX_MEMBERS = 16  # of a gzip file: each costs a copy of all that follow
MAX_WAITING_BYTES = 16 << 20  # bodies to be passed on
MAX_WAITING_SPANS = 4096

_GZIP = 16 + zlib.MAX_WBITS


class Verdict(Enum):
    """What becomes of one request of the protocol."""

    TAKEN = "taken"
    BAD = "bad"  # sending it again is no use
    TOO_LARGE = "too large"
    BUSY = "busy"  # sending it again later is


@dataclass(frozen=True, slots=True)
class Answer:
    verdict: Verdict
    why: str = ""


class Inbox:
    """`put` is called by the servers' threads, `take` by the session's."""

    def __init__(self, *, passes_on: bool) -> None:
        """`passes_on`: the bodies are kept, too, for a sink that forwards them."""
        self._passes_on = passes_on
        self._lock = threading.Lock()
        self._spans: deque[EngineSpan] = deque()
        self._bodies: deque[OtlpBody] = deque()
        self._bytes = 0
        self.requests: Counter[tuple[str, str]] = Counter()  # (protocol, the answer's code)
        self.spans: Counter[str] = Counter()  # by what they stand for: request, other
        self.dropped = 0  # spans of requests that nobody fetched in time
        self.reason = ""  # of the last refusal

    def put(self, body: bytes) -> Answer:
        """Takes a decompressed body, or says why not."""
        try:
            received = decode(body)
        except BadBodyError as error:
            return Answer(Verdict.BAD, f"not an ExportTraceServiceRequest: {error}")
        with self._lock:
            if self._passes_on and received.spans:
                if self._bytes + len(body) > MAX_WAITING_BYTES:
                    return Answer(Verdict.BUSY, "more than can be passed on")
                self._bodies.append(OtlpBody(body, received.spans))
                self._bytes += len(body)
            self._spans.extend(received.of_requests)
            while len(self._spans) > MAX_WAITING_SPANS:
                self._spans.popleft()
                self.dropped += 1
            self.spans["request"] += len(received.of_requests)
            self.spans["other"] += received.spans - len(received.of_requests)
        return Answer(Verdict.TAKEN)

    def count(self, protocol: str, code: str, why: str = "") -> None:
        """One answer that a server gave."""
        with self._lock:
            self.requests[protocol, code] += 1
            if why:
                self.reason = f"{protocol} {code}: {why}"

    def counts(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Requests by (protocol, code), and spans by what they stand for."""
        with self._lock:
            return dict(self.requests), dict(self.spans)

    def take(self) -> tuple[list[EngineSpan], list[OtlpBody]]:
        with self._lock:
            spans, bodies = list(self._spans), list(self._bodies)
            self._spans.clear()
            self._bodies.clear()
            self._bytes = 0
        return spans, bodies


def gunzip(body: bytes) -> bytes:
    """Raises BadBodyError for what is not gzip, breaks off, or grows beyond MAX_PLAIN_BYTES."""
    plain = bytearray()
    for _ in range(MAX_MEMBERS):  # a file of gzip may be several, one after the other
        one = zlib.decompressobj(_GZIP)
        try:
            plain += one.decompress(body, MAX_PLAIN_BYTES + 1 - len(plain))
        except zlib.error as error:
            raise BadBodyError(f"not gzip: {error}") from error
        if len(plain) > MAX_PLAIN_BYTES:
            raise TooLargeError(f"more than {MAX_PLAIN_BYTES} bytes once decompressed")
        if not one.eof:
            raise BadBodyError("the gzip stream breaks off")
        body = one.unused_data
        if not body:
            return bytes(plain)
    raise BadBodyError(f"more than {MAX_MEMBERS} gzip streams in one")


class TooLargeError(BadBodyError):
    """It may be right, but is more than is taken."""
