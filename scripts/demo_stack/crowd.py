"""Clients of the engine: those who chat, and those who paste long texts. Each waits for its reply,
pauses, and sends the next; each request is timed as its client sees it."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsagent.agent.load import Server, traceparent

PATIENCE_S = 120.0  # for one reply, and for so many requests as are waited for
PATH = "/v1/chat/completions"

Body = Callable[[random.Random], dict[str, Any]]


class LoadError(Exception):
    """The load is not what the demonstration needs."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Times of time.monotonic(); tokens as pieces of text that came."""

    begun_s: float
    first_s: float
    end_s: float
    tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Time per output token; None where one token leaves nothing to divide."""
        return (self.end_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


class Crowd:
    """So many clients, from entering to leaving; whoever leaves waits for the replies under
    way."""

    def __init__(
        self, server: Server, body: Body, clients: int, *, pause_s: float, seed: int
    ) -> None:
        self.replies: list[Reply] = []
        self.failures: list[str] = []
        self._server = server
        self._body = body
        self._pause_s = pause_s
        self._changed = threading.Condition()
        self._is_over = threading.Event()
        # Daemons: a signal that comes while they are started finds nobody to stop them.
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),), daemon=True)
            for number in range(clients)
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(PATIENCE_S)

    def wait_for(self, count: int, since_s: float = 0.0) -> Sequence[Reply]:
        """At least so many replies to requests sent from then on. Raises LoadError."""
        deadline_s = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                found = [reply for reply in self.replies if reply.begun_s >= since_s]
                if len(found) >= count:
                    return found
                if self.failures:
                    raise LoadError(f"a request failed: {self.failures[0]}")
                if time.monotonic() > deadline_s:
                    raise LoadError(f"{len(found)} of {count} replies in {PATIENCE_S:.0f} s")
                self._changed.wait(1.0)

    def _run(self, dice: random.Random) -> None:
        while not self._is_over.wait(dice.uniform(0.5, 1.5) * self._pause_s):
            try:
                reply = send(self._server, self._body(dice), traceparent(dice))
            except (OSError, http.client.HTTPException, LoadError) as error:
                reply, failure = None, f"{type(error).__name__}: {error}"
            with self._changed:
                if reply is None:
                    self.failures.append(failure)
                else:
                    self.replies.append(reply)
                self._changed.notify_all()


def send(server: Server, body: dict[str, Any], parent: str) -> Reply:
    """One streamed request. Raises OSError, HTTPException or LoadError."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)
    headers = {"Content-Type": "application/json", "traceparent": parent}
    text = json.dumps({"model": server.model, "stream": True, **body})
    begun_s = time.monotonic()
    try:
        connection.request("POST", PATH, text, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise LoadError(f"answered {response.status}")
        pieces = [time.monotonic() for line in response if b'"content"' in line]
    finally:
        connection.close()
    if not pieces:
        raise LoadError("a reply without text")
    return Reply(begun_s, pieces[0], pieces[-1], len(pieces))


def median_tpot_s(replies: Sequence[Reply]) -> float:
    """Raises LoadError where there is none."""
    known = [tpot for reply in replies if (tpot := reply.tpot_s) is not None]
    if not known:
        raise LoadError("no reply has a time per output token")
    return statistics.median(known)
