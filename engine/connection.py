"""One client's connection: uvicorn's, with bounds on what a stranger may send and
with word of what the socket has really taken."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .protocol import ApiError

EXTENSION = "dsagent.connection"  # where a handler finds it, in the ASGI scope's extensions


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may cost, and how long a stop may take."""

    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 8 << 20
    upload_timeout_s: float = 30.0  # from a request's first byte to the end of its headers,
    # and from there to its last byte
    max_requests: int = 1024  # in the house at once, waiting ones included
    drain_s: float = 300.0  # for running requests, once told to stop


class ClientGone(Exception):  # noqa: N818  it is nobody's error
    """The client closed the connection before it had its whole answer."""


class Connection(HttpToolsProtocol):
    """Knows when the client has gone, and when bytes have left for good.

    uvicorn's `send` returns while up to 64 KiB wait in the process; here the
    transport's buffer counts as full from its first byte, so `drained()`
    returns when the socket has accepted everything.
    """

    limits: ClassVar[HttpLimits] = HttpLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lost = False  # the client went, or unsent bytes were thrown away
        self._on_lost: Callable[[], None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = True
        self._unfinished_bytes = 0  # read since the last whole request

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` once the client goes, from now until `unwatch`."""
        self._on_lost = on_lost
        # The last piece of a long body may have left reading paused: then
        # nobody would hear the client go.
        self.flow.resume_reading()
        if self.lost or self.transport.is_closing():
            on_lost()

    def unwatch(self) -> None:
        self._on_lost = None

    async def drained(self) -> None:
        """Returns when the socket has taken every byte. Raises ClientGone where it cannot."""
        if self.flow.write_paused:
            await self.flow.drain()
        if self.lost:
            raise ClientGone

    # What asyncio and the parser call

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        unfinished = self.cycle is not None and not self.cycle.response_complete
        self.lost = unfinished or self.flow.write_paused
        self._disarm()
        super().connection_lost(exc)
        if self._on_lost is not None:
            on_lost, self._on_lost = self._on_lost, None
            on_lost()

    def data_received(self, data: bytes) -> None:
        self._unfinished_bytes += len(data)
        super().data_received(data)
        too_long = self._unfinished_bytes > self.limits.max_header_bytes
        if self._in_headers and too_long and not self.transport.is_closing():
            self.send_400_response("the request's headers are too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[dict-item]
        self._arm()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._unfinished_bytes = 0
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP at all, or too much of it: the one answer made outside the application."""
        body = ApiError(400, msg).body()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(self.limits.upload_timeout_s, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _late(self) -> None:
        """Whoever is at work answers first: a body that is still read for a handler ends in its
        408. A refused one is thrown away up to here, for closing could destroy the refusal."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._arm()


def connection_class(limits: HttpLimits) -> type[Connection]:
    """uvicorn makes a connection's object itself, so its limits travel in the class."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


async def read_body(receive: Receive, limits: HttpLimits) -> bytes:
    """A whole body. Raises ApiError where it is too long (413) or too slow (408), ClientGone."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.upload_timeout_s):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message["body"]
                if len(body) > limits.max_body_bytes:
                    text = f"the body is longer than {limits.max_body_bytes} bytes"
                    raise ApiError(413, text, kind="body_too_large")
                more = message["more_body"]
    except TimeoutError:
        raise ApiError(408, "the body took too long to arrive", kind="upload_timeout") from None
    return bytes(body)
