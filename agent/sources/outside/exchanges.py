"""Requests and their replies, put together from what went through a connection. Pure.

A connection carries one exchange after the other; a client may send the next
request before the reply to the last one (pipelining). Only what asks a model
for text becomes an exchange: a POST to one of `PATHS`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dsagent.agent.sources.outside.http1 import Body, End, Event, Head, Lost, Messages
from dsagent.agent.sources.outside.reply import Reply

PATHS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/completions": "text_completion",
    "/completion": "text_completion",
    "/generate": "text_completion",
}
MOST_CONNECTIONS = 4096
MOST_PIPELINED = 64
MOST_TOKENS = 100_000

Outcome = Literal["complete", "left by the client", "broken off by the server", "lost"]
Kind = Literal["received", "sent", "peer closed", "closed"]


@dataclass(frozen=True, slots=True)
class Moved:
    """One call on a socket of the target, or the end of a connection."""

    kind: Kind
    connection: int
    time_ns: int
    pid: int = 0
    tid: int = 0
    arrived_ns: int = 0  # when the first byte came in; 0: not known
    length: int = 0
    data: bytes = b""
    tail: bytes = b""


@dataclass(slots=True)
class Exchange:
    """One request for text, and what came back. Times are CLOCK_MONOTONIC."""

    number: int
    operation: str
    pid: int
    tid: int
    received_ns: int
    headers: Mapping[str, str]
    body_bytes: int = 0  # of the request
    status: int = 0  # 0: no answer yet
    streams: bool = False
    first_body_ns: int | None = None
    tokens_ns: list[int] = field(default_factory=list)  # one a piece of text
    last_sent_ns: int | None = None
    ended_ns: int | None = None
    outcome: Outcome | None = None  # None: not over
    reply: Reply | None = None

    @property
    def first_token_ns(self) -> int | None:
        """The first piece of text; of a reply that is no stream, its first byte."""
        return self.tokens_ns[0] if self.tokens_ns else self.first_body_ns


@dataclass(slots=True)
class _Pending:
    """A request whose reply is not complete; `exchange` is None where it asks for no text."""

    method: str
    exchange: Exchange | None


class _Connection:
    def __init__(self) -> None:
        self.requests = Messages("request")
        self.responses = Messages("response")
        self.pending: deque[_Pending] = deque()
        self.receiving: _Pending | None = None  # whose body still comes in
        self.answering = False  # a head has been sent for the first pending one
        self.first_ns = 0  # when the first byte of the head came that is being received
        self.client_left_ns = 0


@dataclass(slots=True)
class Heard:
    """What a batch of calls brought: exchanges that began, changed and ended in it."""

    begun: list[Exchange] = field(default_factory=list)
    ended: list[Exchange] = field(default_factory=list)
    tokens: list[tuple[int, Exchange]] = field(default_factory=list)  # when, of which


class Exchanges:
    """All connections of one target."""

    def __init__(self) -> None:
        self._connections: OrderedDict[int, _Connection] = OrderedDict()
        self._count = 0
        self.given_up = 0  # connections forgotten because there were too many
        self.lost = 0  # messages whose end could not be told
        self.other = 0  # requests that ask for no text

    def hear(self, moved: Moved, heard: Heard) -> None:
        """One call, in the order in which they were made."""
        match moved.kind:
            case "received":
                self._received(self._connection(moved, heard), moved, heard)
            case "sent":
                self._sent(self._connection(moved, heard), moved, heard)
            case "peer closed":
                connection = self._connections.get(moved.connection)
                if connection is not None:
                    connection.client_left_ns = connection.client_left_ns or moved.time_ns
            case "closed":
                self._closed(moved, heard)

    def client_left(self, before_ns: int, heard: Heard) -> None:
        """Of clients that closed before this moment nothing more is expected: their replies have
        either been completed since, or never will be."""
        for connection in self._connections.values():
            left_ns = connection.client_left_ns
            if not left_ns or left_ns > before_ns:
                continue
            going_on = deque[_Pending]()
            for pending in connection.pending:
                exchange = pending.exchange
                if exchange is None or (exchange.last_sent_ns or 0) > left_ns:
                    going_on.append(pending)  # its reply is still reckoned with
                else:
                    self._end(exchange, left_ns, "left by the client", heard)
            connection.pending = going_on

    def silent(self, before_ns: int, heard: Heard) -> None:
        """Of what has not moved since this moment the end must have been lost."""
        for connection in self._connections.values():
            exchanges = [p.exchange for p in connection.pending if p.exchange is not None]
            moved_ns = [max(e.received_ns, e.last_sent_ns or 0) for e in exchanges]
            if moved_ns and max(moved_ns) < before_ns:
                self._give_up(connection, before_ns, heard)

    def open(self) -> list[Exchange]:
        """Those that are not over."""
        return [
            pending.exchange
            for connection in self._connections.values()
            for pending in connection.pending
            if pending.exchange is not None
        ]

    def _connection(self, moved: Moved, heard: Heard) -> _Connection:
        connection = self._connections.get(moved.connection)
        if connection is not None:
            self._connections.move_to_end(moved.connection)
            return connection
        connection = self._connections[moved.connection] = _Connection()
        while len(self._connections) > MOST_CONNECTIONS:
            _, unused = self._connections.popitem(last=False)
            self._give_up(unused, moved.time_ns, heard)
            self.given_up += 1
        return connection

    def _received(self, connection: _Connection, moved: Moved, heard: Heard) -> None:
        came_ns = min(moved.arrived_ns or moved.time_ns, moved.time_ns)
        connection.first_ns = connection.first_ns or came_ns
        for event in connection.requests.feed(moved.data, moved.length, moved.tail):
            match event:
                case Head():
                    self._begin(connection, event, moved, heard)
                    connection.first_ns = came_ns
                case Body():
                    pending = connection.receiving
                    if pending is not None and pending.exchange is not None:
                        pending.exchange.body_bytes += event.length
                case End():
                    connection.receiving = None
                    connection.first_ns = 0
                case Lost():
                    self.lost += 1
                    connection.receiving = None
                    connection.first_ns = 0

    def _begin(self, connection: _Connection, head: Head, moved: Moved, heard: Heard) -> None:
        operation = PATHS.get(head.path.rstrip("/")) if head.method == "POST" else None
        exchange = None
        if operation is None:
            self.other += 1
        else:
            self._count += 1
            exchange = Exchange(
                number=self._count,
                operation=operation,
                pid=moved.pid,
                tid=moved.tid,
                received_ns=connection.first_ns,
                headers=head.headers,
            )
            heard.begun.append(exchange)
        if len(connection.pending) >= MOST_PIPELINED:
            self._give_up(connection, moved.time_ns, heard)
        connection.receiving = _Pending(head.method, exchange)
        connection.pending.append(connection.receiving)

    def _give_up(self, connection: _Connection, now_ns: int, heard: Heard) -> None:
        for pending in connection.pending:
            if pending.exchange is not None:
                self._end(pending.exchange, now_ns, "lost", heard)
        connection.pending.clear()

    def _sent(self, connection: _Connection, moved: Moved, heard: Heard) -> None:
        if not connection.pending:
            return
        pending = connection.pending[0]
        self._expect_reply(connection)
        if pending.exchange is not None:
            pending.exchange.last_sent_ns = moved.time_ns
        for event in connection.responses.feed(moved.data, moved.length, moved.tail):
            self._answer(connection, event, moved.time_ns, heard)

    def _expect_reply(self, connection: _Connection) -> None:
        """The reply to HEAD has no body; asked before each head is read, also within a call."""
        first = connection.pending[0].method if connection.pending else ""
        connection.responses.bodiless = first == "HEAD"

    def _answer(self, connection: _Connection, event: Event, now_ns: int, heard: Heard) -> None:
        if not connection.pending:
            return
        exchange = connection.pending[0].exchange
        match event:
            case Head():
                connection.answering = event.status >= 200
                if exchange is not None and connection.answering:
                    exchange.status = event.status
                    kind = event.headers.get("content-type", "")
                    exchange.streams = kind.startswith("text/event-stream")
                    exchange.reply = Reply(events=exchange.streams)
            case Body():
                if exchange is not None and exchange.reply is not None and event.length:
                    _take(exchange, exchange.reply, event, now_ns, heard)
            case End():
                is_interim = not connection.answering
                if not is_interim:
                    connection.answering = False
                    connection.pending.popleft()
                    if exchange is not None:
                        self._end(exchange, now_ns, "complete", heard)
                self._expect_reply(connection)
            case Lost():
                self.lost += 1

    def _closed(self, moved: Moved, heard: Heard) -> None:
        connection = self._connections.pop(moved.connection, None)
        if connection is None:
            return
        for event in connection.responses.close():
            self._answer(connection, event, moved.time_ns, heard)
        for pending in connection.pending:
            if pending.exchange is None:
                continue
            left_ns = connection.client_left_ns
            outcome: Outcome = "left by the client" if left_ns else "broken off by the server"
            self._end(pending.exchange, left_ns or moved.time_ns, outcome, heard)

    def _end(self, exchange: Exchange, now_ns: int, outcome: Outcome, heard: Heard) -> None:
        if exchange.reply is not None:
            exchange.reply.close()
        exchange.outcome = outcome
        exchange.ended_ns = max(now_ns, exchange.received_ns)
        heard.ended.append(exchange)


def _take(exchange: Exchange, reply: Reply, body: Body, now_ns: int, heard: Heard) -> None:
    if exchange.first_body_ns is None:
        exchange.first_body_ns = now_ns
    for _ in range(reply.feed(body.data, body.length)):
        if len(exchange.tokens_ns) < MOST_TOKENS:
            exchange.tokens_ns.append(now_ns)
        heard.tokens.append((now_ns, exchange))
