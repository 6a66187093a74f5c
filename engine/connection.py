"""One client's connection: uvicorn's, with bounds on what a stranger may send and
with word of what the socket has really taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

EXTENSION = "dsagent.connection"  # where a handler finds it, in the ASGI scope's extensions


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may cost, and how long a stop may take."""

    max_header_bytes: int = 64 << 10
    header_timeout_s: float = 15.0  # from the first byte of a request to the end of its headers
    max_body_bytes: int = 8 << 20
    max_uploads_bytes: int = 64 << 20  # of all bodies being read
    body_timeout_s: float = 30.0
    linger_s: float = 5.0  # for a client that still uploads what was refused
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
        self._unfinished_bytes = 0  # read since the last whole headers, or the last whole request
        self._uploading = False

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` once the client goes, from now until `unwatch`."""
        self._on_lost = on_lost
        # The last piece of a long body may have left reading paused: then
        # nobody would hear the client go.
        self.flow.resume_reading()
        if self.gone:
            on_lost()

    def unwatch(self) -> None:
        self._on_lost = None

    @property
    def gone(self) -> bool:
        return self.lost or self.transport.is_closing()

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
        self._arm(self.limits.header_timeout_s)

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
        self._uploading = True
        self._arm(self.limits.header_timeout_s)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._unfinished_bytes = 0
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._unfinished_bytes = 0
        self._uploading = False
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._uploading:
            # Refused before it was read. Closing now could destroy the answer
            # on its way (a reset), so what still comes is thrown away for a while.
            self._arm(self.limits.linger_s)

    def send_400_response(self, msg: str) -> None:
        """Not HTTP at all, or too much of it: the one answer made outside the application."""
        error = {"message": msg, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection_class(limits: HttpLimits) -> type[Connection]:
    """uvicorn makes a connection's object itself, so its limits travel in the class."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
