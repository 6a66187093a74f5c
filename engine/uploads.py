"""Reading request bodies: bounded in size, in time, and in all of them together."""

from __future__ import annotations

import asyncio

from starlette.types import Receive

from .connection import ClientGone, HttpLimits
from .protocol import ApiError


class Uploads:
    """Every body being read goes through here."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._held_bytes = 0

    async def read(self, receive: Receive, declared: str | None) -> bytes:
        """A whole body; `declared` is its content-length, where the client sent one.

        Raises ApiError where it is too long (413), too slow (408) or one too
        many (503), ClientGone.
        """
        limits = self._limits
        # The parser has seen to it that it is a number.
        if declared is not None and int(declared) > limits.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            await asyncio.wait_for(self._collect(receive, body), limits.body_timeout_s)
        except asyncio.TimeoutError:
            raise ApiError(408, "the body took too long to arrive", kind="upload_timeout") from None
        finally:
            self._held_bytes -= len(body)
        return bytes(body)

    async def _collect(self, receive: Receive, body: bytearray) -> None:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece: bytes = message["body"]
            body += piece
            self._held_bytes += len(piece)
            if len(body) > self._limits.max_body_bytes:
                raise self._too_large()
            if self._held_bytes > self._limits.max_uploads_bytes:
                raise ApiError(503, "too much is being uploaded at once", kind="overloaded")
            if not message["more_body"]:
                return

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body is longer than {self._limits.max_body_bytes} bytes",
            kind="body_too_large",
        )
