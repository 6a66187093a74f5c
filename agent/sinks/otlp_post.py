"""Posts one body to an OTLP end point, with retries, and says honestly what became of it.

What is worth another try, and when, follows the OTLP specification; how a body travels is a
channel's affair (otlp_http.py, otlp_grpc.py).
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Literal, Protocol

from dsagent.agent.sinks.otlp_config import Endpoint

Signal = Literal["traces", "metrics", "logs"]

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 8.0
LAST_WAIT_S = 0.1  # between the tries before the end
RETRY_FOR_S = 30.0
MAX_ASKED_S = 120.0  # the longest wait that a back end may ask for
ASKED_IN_ALL_S = 300.0  # and how long in all one body waits because it asks
MIN_GZIP_BYTES = 1024
MAX_ANSWER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a body: `accepted` with the answer's body, or why not."""

    result: Literal["accepted", "refused", "unreachable"]
    body: bytes = b""
    reason: str = ""
    status: int = 0


@dataclass(frozen=True, slots=True)
class Retry:
    """Worth another try, after so many seconds if the back end said so."""

    reason: str
    after_s: float | None = None


class Channel(Protocol):
    """One way to one end point. Used by one thread; `abandon` by any."""

    is_reached: bool  # there was somebody at the other end, the last time it tried

    def send(self, body: bytes, *, gzipped: bool) -> Answer | Retry:
        """One try. Blocks for about the end point's time limit; never raises."""

    def abandon(self) -> None:
        """Breaks off a try that hangs."""

    def close(self) -> None: ...


def open_channel(endpoint: Endpoint, signal: Signal) -> Channel:
    """Not connected yet. Raises DsagentError where its certificates cannot be read."""
    if endpoint.protocol == "grpc":
        from dsagent.agent.sinks.otlp_grpc import GrpcChannel

        return GrpcChannel(endpoint, signal)
    from dsagent.agent.sinks.otlp_http import HttpChannel

    return HttpChannel(endpoint)


class Poster:
    """Posts bodies one after the other. Used by one thread; `end_by` and `abandon` by any."""

    def __init__(self, endpoint: Endpoint, signal: Signal) -> None:
        self._channel = open_channel(endpoint, signal)
        # The protocol asks receivers to take gzip; there are some that answer 400 to it.
        self._gzip = endpoint.gzip
        self._is_gzip_accepted = False
        self._stopping = threading.Event()
        self._deadline_s = float("inf")  # on time.monotonic(), once it is to end

    @property
    def is_reached(self) -> bool:
        return self._channel.is_reached

    @property
    def is_ending(self) -> bool:
        return self._stopping.is_set()

    def post(self, body: bytes, patience_s: float = RETRY_FOR_S) -> Answer:
        """Blocks for about `patience_s` at most, longer only where the back end asks for it, and
        not beyond what `end_by` says."""
        gzipped = self._gzip and len(body) >= MIN_GZIP_BYTES
        answer = self._post(body, gzipped, patience_s)
        if gzipped and not self._is_gzip_accepted and answer.status in (400, 415):
            plain = self._post(body, False, patience_s)
            self._gzip = plain.result != "accepted"
            return plain if plain.result == "accepted" else answer
        self._is_gzip_accepted |= gzipped and answer.result == "accepted"
        return answer

    def _post(self, body: bytes, gzipped: bool, patience_s: float) -> Answer:
        began_s = time.monotonic()
        give_up_s = began_s + patience_s
        wait_s = FIRST_WAIT_S
        while True:
            outcome = self._channel.send(body, gzipped=gzipped)
            if isinstance(outcome, Answer):
                return outcome
            pause_s = wait_s * random.uniform(0.8, 1.2)
            now_s = time.monotonic()
            if outcome.after_s is not None:
                pause_s = min(outcome.after_s, MAX_ASKED_S)
                asked_until_s = min(now_s + pause_s, began_s + ASKED_IN_ALL_S)
                give_up_s = max(give_up_s, asked_until_s)
            elif self._stopping.is_set():
                pause_s = LAST_WAIT_S
            wait_s = min(wait_s * 2, MAX_WAIT_S)
            if now_s + pause_s > min(give_up_s, self._deadline_s):
                return Answer("unreachable", reason=outcome.reason)
            if self._stopping.is_set():
                time.sleep(pause_s)
            else:
                self._stopping.wait(pause_s)

    def end_by(self, deadline_s: float) -> None:
        """No try begins after this time (of time.monotonic())."""
        self._deadline_s = deadline_s
        self._stopping.set()

    def abandon(self) -> None:
        """Breaks off a post that hangs."""
        self._channel.abandon()

    def close(self) -> None:
        self._channel.close()
