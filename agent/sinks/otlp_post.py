"""Posts one body to an OTLP end point, with retries, and says honestly what became of it."""

from __future__ import annotations

import gzip
import random
import socket
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from importlib.metadata import version
from typing import Literal

from dsagent.agent.sinks.otlp_config import Endpoint

RETRY_STATUS = (429, 502, 503, 504)
FIRST_WAIT_S = 1.0
MAX_WAIT_S = 8.0
LAST_WAIT_S = 0.1  # between the tries before the end
RETRY_FOR_S = 30.0
MAX_ANSWER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a body: `accepted` with the answer's body, or why not."""

    result: Literal["accepted", "refused", "unreachable"]
    body: bytes = b""
    reason: str = ""
    status: int = 0


@dataclass(frozen=True, slots=True)
class _Retry:
    """Worth another try, after so many seconds if the back end said so."""

    reason: str
    after_s: float | None = None


class Poster:
    """One connection, kept open between posts. Used by one thread; `abandon` by any."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._connection: HTTPConnection | None = None
        # The protocol asks receivers to take gzip; there are some that answer 400 to it.
        self._gzip = endpoint.gzip
        self._is_gzip_accepted = False
        self._stopping = threading.Event()
        self._deadline_s = float("inf")  # on time.monotonic(), once it is to end
        self.is_reached = False  # there was somebody at the other end, the last time it tried

    def post(self, body: bytes) -> Answer:
        """Blocks for about RETRY_FOR_S at most, and not beyond what `end_by` says."""
        answer = self._post(body)
        if self._gzip and not self._is_gzip_accepted and answer.status in (400, 415):
            self._gzip = False
            plain = self._post(body)
            self._gzip = plain.result != "accepted"
            return plain if plain.result == "accepted" else answer
        self._is_gzip_accepted |= self._gzip and answer.result == "accepted"
        return answer

    def _post(self, body: bytes) -> Answer:
        payload = gzip.compress(body, 6) if self._gzip else body
        give_up_s = time.monotonic() + RETRY_FOR_S
        wait_s = FIRST_WAIT_S
        while True:
            outcome = self._try(payload)
            if isinstance(outcome, Answer):
                return outcome
            pause_s = wait_s * random.uniform(0.8, 1.2)
            if outcome.after_s is not None:
                pause_s = outcome.after_s
            elif self._stopping.is_set():
                pause_s = LAST_WAIT_S
            wait_s = min(wait_s * 2, MAX_WAIT_S)
            if time.monotonic() + pause_s > min(give_up_s, self._deadline_s):
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
        connection = self._connection
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it had just ended by itself

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _try(self, payload: bytes) -> Answer | _Retry:
        endpoint = self._endpoint
        headers = {
            "Content-Type": "application/x-protobuf",
            "User-Agent": f"dsagent/{version('dsagent')}",
            **endpoint.headers,
        }
        if self._gzip:
            headers["Content-Encoding"] = "gzip"
        was_open = self._connection is not None
        try:
            connection = self._connect()
            self.is_reached = True
            connection.request("POST", endpoint.path, payload, headers)
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES + 1)
        except OSError as error:  # refused, reset, timed out, no such host, bad certificate
            self.close()
            self.is_reached = False
            reason = f"{endpoint.url}: {error.strerror or error or type(error).__name__}"
            # A connection kept open may have been closed over there since: a new one may do.
            is_stale = was_open and isinstance(error, ConnectionError)
            return _Retry(reason, 0.0 if is_stale else None)
        except (HTTPException, ValueError) as error:
            self.close()
            reason = f"{endpoint.url}: no HTTP answer ({type(error).__name__})"
            return Answer("refused", reason=f"{reason}; is it the OTLP/HTTP port, usually 4318?")
        if response.will_close or len(body) > MAX_ANSWER_BYTES:
            self.close()
        if 200 <= response.status < 300:
            return Answer("accepted", body=body)
        reason = f"{endpoint.url}: answered {response.status}"
        if response.status in RETRY_STATUS:
            return _Retry(reason, _retry_after(response))
        return Answer("refused", reason=reason, status=response.status)

    def _connect(self) -> HTTPConnection:
        if self._connection is None:
            endpoint = self._endpoint
            if endpoint.scheme == "https":
                import ssl

                context = ssl.create_default_context(cafile=endpoint.ca_file)
                self._connection = HTTPSConnection(
                    endpoint.host, endpoint.port, timeout=endpoint.timeout_s, context=context
                )
            else:
                self._connection = HTTPConnection(
                    endpoint.host, endpoint.port, timeout=endpoint.timeout_s
                )
            self._connection.connect()
        return self._connection


def _retry_after(response: HTTPResponse) -> float | None:
    """Seconds, at most MAX_WAIT_S; the form with a date is passed over."""
    text = (response.headers.get("Retry-After") or "").strip()
    return min(float(text), MAX_WAIT_S) if text.isascii() and text.isdecimal() else None
