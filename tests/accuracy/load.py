"""Clients: each request as its client saw it, by the client's own clock."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lab import Engine

DATA = b"data: {"


@dataclass(slots=True)
class Sent:
    """One request as its client saw it."""

    trace_id: str
    prompt: str
    max_tokens: int
    clients: int = 1  # how many were at work when it was sent
    sent_ns: int = 0
    first_ns: int | None = None
    end_ns: int | None = None
    chunk_ns: list[int] = field(default_factory=list)  # when each piece of text came
    error: str | None = None


def headers_of(sent: Sent, dice: random.Random) -> dict[str, str]:
    return {
        "Content-Type": "application/json",
        "traceparent": f"00-{sent.trace_id}-{dice.getrandbits(64) | 1:016x}-01",
    }


def body_of(target: Engine, sent: Sent) -> bytes:
    return json.dumps(
        {
            "model": target.model,
            "messages": [{"role": "user", "content": sent.prompt}],
            "max_tokens": sent.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()


def new_request(prompt: str, max_tokens: int, dice: random.Random) -> Sent:
    return Sent(f"{dice.getrandbits(128) | 1:032x}", prompt, max_tokens)


Upload = Callable[[http.client.HTTPConnection, bytes, dict[str, str]], None]


def post(connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]) -> None:
    connection.request("POST", "/v1/chat/completions", body, headers)


def send(
    target: Engine,
    prompt: str,
    max_tokens: int,
    dice: random.Random,
    *,
    upload: Upload = post,
    on_chunk: Callable[[Sent], None] = lambda _sent: None,
    connection: http.client.HTTPConnection | None = None,
    clients: int = 1,
) -> Sent:
    """A streamed chat with a trace context of its own; blocks until its end."""
    sent = new_request(prompt, max_tokens, dice)
    sent.clients = clients
    connection = connection or http.client.HTTPConnection(target.host, target.port, timeout=120)
    body, headers = body_of(target, sent), headers_of(sent, dice)
    sent.sent_ns = time.monotonic_ns()
    try:
        upload(connection, body, headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            sent.error = f"{response.status} {response.read(500)!r}"
            return sent
        for line in response:
            if line.startswith(DATA):
                sent.chunk_ns.append(time.monotonic_ns())
                if sent.first_ns is None and b'"content"' in line:
                    sent.first_ns = sent.chunk_ns[-1]
                on_chunk(sent)
    except OSError as error:
        sent.error = repr(error)
    finally:
        sent.end_ns = time.monotonic_ns()
        connection.close()
    return sent


WORDS = (
    *("river", "stone", "lantern", "quiet", "harbour", "copper", "window", "orchard", "signal"),
    *("winter", "ladder", "garden", "thunder", "velvet", "compass", "bridge", "candle", "meadow"),
    *("anchor", "mirror", "forest", "letter", "engine", "island"),
)


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


class Load:
    """Closed-loop clients, each with its own seeded requests, until stopped."""

    def __init__(self, target: Engine, *, clients: int, max_tokens: tuple[int, int], seed: int):
        self.sent: list[Sent] = []
        self.target = target
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self.clients = clients  # the first so many of them send; the others pause
        self._threads = [
            threading.Thread(target=self._run, args=(i, random.Random(seed * 1000 + i)))
            for i in range(clients)
        ]

    def _run(self, index: int, dice: random.Random) -> None:
        while not self._stop.is_set():
            if index >= self.clients:
                self._stop.wait(0.05)
                continue
            prompt = f"Tell me about the {text(dice, dice.randint(4, 16))}."
            max_tokens = dice.randint(*self._max_tokens)
            self.sent.append(send(self.target, prompt, max_tokens, dice, clients=self.clients))

    def set_clients(self, clients: int) -> None:
        self.clients = min(clients, len(self._threads))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def wait_for(self, requests: int, timeout_s: float = 180.0) -> None:
        """Until that many more requests have ended."""
        wanted = len(self.sent) + requests
        deadline = time.monotonic() + timeout_s
        while len(self.sent) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {len(self.sent)} of {wanted} requests ended in time")
            self._stop.wait(0.02)


class Burst:
    """Requests sent at once beside the load, each by a client of its own."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self._threads: list[threading.Thread] = []

    def send(self, load: Load, prompt: str, max_tokens: int, dice: random.Random) -> None:
        mine = random.Random(dice.getrandbits(64))
        clients = load.clients

        def run() -> None:
            self.sent.append(send(load.target, prompt, max_tokens, mine, clients=clients))

        thread = threading.Thread(target=run)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> list[Sent]:
        """All of them, once they have ended."""
        for thread in self._threads:
            thread.join(120)
        errors = [sent.error for sent in self.sent if sent.error]
        if errors:
            raise RuntimeError(f"a request of the injector failed: {errors[0]}")
        return self.sent
