"""One request between the HTTP handler and the engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from .connection import ClientGone
from .detokenizer import Detokenizer, StopStrings
from .observe import RequestLife
from .protocol import ApiError
from .request import TokenOutput


class Call:
    """Collects what the engine makes for one request, turns it into text and fills in its life.

    Used from the event loop's thread only.
    """

    __slots__ = ("_detokenizer", "_failure", "_outputs", "_stop_strings", "_wake", "done", "life")

    def __init__(
        self, life: RequestLife, token_bytes: Sequence[bytes], stop: Sequence[str]
    ) -> None:
        self.life = life
        self.done = False  # the whole answer has been made
        self._outputs: list[TokenOutput] = []
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._detokenizer = Detokenizer(token_bytes)
        self._stop_strings = StopStrings(stop)

    def put(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        self._wake.set()

    def fail(self, failure: Exception) -> None:
        """End the wait for output with this error; the first one counts."""
        self._failure = self._failure or failure
        self._wake.set()

    async def text(self) -> str:
        """Waits for output; returns what may go out of all that has come since.

        May be empty: half a character, or what may begin a stop string. Raises
        ClientGone or ApiError.
        """
        await self._wake.wait()
        self._wake.clear()
        if self._failure is not None:
            raise self._failure
        outputs, self._outputs = self._outputs, []
        pieces = []
        for output in outputs:
            if not self.done:
                pieces.append(self._absorb(output))
        return "".join(pieces)

    def _absorb(self, output: TokenOutput) -> str:
        life = self.life
        if output.first_scheduled_ns:
            life.first_scheduled_ns = output.first_scheduled_ns
            life.cached_tokens = output.cached_tokens
        if output.finish_reason == "error":
            # The reason is on the server's stderr: it is nothing for strangers.
            raise ApiError(500, "the engine failed on this request", kind="engine_error")
        if output.finish_reason == "abort":
            raise stopping()
        life.finished_ns = output.output_ns
        if output.token_ids:
            if life.first_token_ns is None:
                life.first_token_ns = output.output_ns
            life.output_tokens += len(output.token_ids)
        text = self._stop_strings.push(self._detokenizer.push(output.token_ids))
        if output.finish_reason is not None and not self._stop_strings.stopped:
            text += self._stop_strings.push(self._detokenizer.finish())
            text += self._stop_strings.finish()
        if self._stop_strings.stopped or output.finish_reason is not None:
            self.done = True
            life.finish_reason = "stop" if self._stop_strings.stopped else output.finish_reason
        return text


def stopping() -> ApiError:
    """The refusal while the server goes down."""
    return ApiError(503, "the server is stopping", kind="unavailable")


def end_life(life: RequestLife, failure: BaseException | None) -> None:
    """Say why and when it ended, where that is not known yet."""
    if life.sent_ns is None:
        life.sent_ns = time.monotonic_ns()
    if failure is None:
        return
    if isinstance(failure, ApiError):
        life.error = failure.kind
    elif isinstance(failure, ClientGone):
        life.error = "client_disconnect"
    else:
        life.error = "internal_error"
    if life.queued_ns is not None and life.finish_reason is None:
        life.finish_reason = "abort"
