"""Clients that outlive their servers: each request with its fate, as its client saw it."""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from lab import Engine as LabEngine
from load import Sent, body_of, headers_of, new_request, text

Fate = Literal["completed", "answered", "left", "broken", "refused"]
DONE = b"data: [DONE]"
REQUEST_LIMIT_S = 120
PAUSE_S = (0.2, 1.0)  # between two requests of a client


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. completed: all of its answer came. answered: with an error, by the engine. left:
    its client hung up. broken: the connection died before the answer was whole. refused: no
    connection was had, so no engine has ever seen it. `heard`: an answer began. Times are
    CLOCK_MONOTONIC. Since `may_end_ns` the engine may have been through with it: a client that does
    not read leaves the answer to lie in its socket."""

    trace_id: str
    port: int
    fate: Fate
    sent_ns: int
    end_ns: int
    may_end_ns: int
    heard: bool = True


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves: reads nothing for so long after the first piece, or leaves after so
    many pieces."""

    pause_s: float = 0.0
    leaves_after: int | None = None


def ask(target: LabEngine, sent: Sent, dice: random.Random, manner: Manner) -> Asked:
    """A streamed chat, until its end, whatever that is."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=REQUEST_LIMIT_S)
    begun_ns = time.monotonic_ns()
    try:
        fate, heard = _ask(connection, target, sent, dice, manner)
    finally:
        connection.close()
    end_ns = time.monotonic_ns()
    may_end_ns = begun_ns if manner.pause_s else end_ns
    return Asked(sent.trace_id, target.port, fate, begun_ns, end_ns, may_end_ns, heard)


def _ask(
    connection: http.client.HTTPConnection,
    target: LabEngine,
    sent: Sent,
    dice: random.Random,
    manner: Manner,
) -> tuple[Fate, bool]:
    """How it ended, and whether an answer began."""
    heard = False
    try:
        connection.connect()
        assert connection.sock is not None
        if manner.pause_s:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    except OSError:
        return "refused", heard
    try:
        connection.request(
            "POST", "/v1/chat/completions", body_of(target, sent), headers_of(sent, dice)
        )
        response = connection.getresponse()
        heard = True
        if response.status != http.client.OK:
            response.read(500)
            return "answered", heard
        pieces = 0
        for line in response:
            if line.startswith(DONE):
                return "completed", heard
            pieces += line.startswith(b"data: {")
            if manner.pause_s and pieces == 1:
                time.sleep(manner.pause_s)
            if manner.leaves_after is not None and pieces >= manner.leaves_after:
                return "left", heard
    except (OSError, http.client.HTTPException):
        return "broken", heard
    return "broken", heard


class Crowd:
    """Closed-loop clients on every engine, until the end of the block, and whoever comes beside."""

    def __init__(
        self,
        targets: list[LabEngine],
        clients: int,
        seed: int,
        told: Callable[[Asked], None],
        serves: Callable[[int], bool] = lambda _port: True,
    ) -> None:
        """`told` gets each request once it has ended, from its client's thread. `serves`: whether
        a port is given requests now, as a load balancer says."""
        self._serves = serves
        self._lock = threading.Lock()
        self._busy: Counter[int] = Counter()
        self._told = told
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(target, random.Random(f"{seed} {i} {j}")))
            for i, target in enumerate(targets)
            for j in range(clients)
        ]
        self._guests: list[threading.Thread] = []

    def _run(self, target: LabEngine, dice: random.Random) -> None:
        while not self._stop.is_set():
            with self._at_work(target.port):
                serves = self._serves(target.port)
                if serves:
                    prompt = f"Tell me about the {text(dice, dice.randint(4, 16))}."
                    sent = new_request(prompt, dice.randint(4, 32), dice)
                    self._told(ask(target, sent, dice, Manner()))
            self._stop.wait(dice.uniform(*PAUSE_S) if serves else 0.05)

    @contextmanager
    def _at_work(self, port: int) -> Iterator[None]:
        with self._lock:
            self._busy[port] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[port] -= 1

    def is_idle(self, port: int) -> bool:
        """Nobody of the load asks there. For good, where it serves no more."""
        with self._lock:
            return not self._busy[port]

    def guest(
        self, target: LabEngine, words: int, max_tokens: int, dice: random.Random, manner: Manner
    ) -> threading.Thread:
        """One request beside the load."""
        own = random.Random(dice.getrandbits(64))
        sent = new_request(text(own, words), max_tokens, own)
        guest = threading.Thread(target=lambda: self._told(ask(target, sent, own, manner)))
        guest.start()
        self._guests.append(guest)
        return guest

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in (*self._threads, *self._guests):
            thread.join(REQUEST_LIMIT_S + 10)
