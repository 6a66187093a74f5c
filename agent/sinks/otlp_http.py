"""OTLP over HTTP: one connection, kept open between posts."""

from __future__ import annotations

import gzip
import socket
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from importlib.metadata import version
from typing import TYPE_CHECKING

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.sinks.otlp_config import Endpoint
from dsagent.agent.sinks.otlp_post import MAX_ANSWER_BYTES, Answer, Retry

if TYPE_CHECKING:
    from ssl import SSLContext

RETRY_STATUS = (429, 502, 503, 504)  # by the OTLP specification: no other one is tried again


class HttpChannel:
    """See otlp_post.Channel."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises DsagentError where a certificate cannot be read."""
        self._endpoint = endpoint
        self._tls = None if endpoint.scheme == "http" else _tls(endpoint)
        self._connection: HTTPConnection | None = None
        self.is_reached = False

    def send(self, body: bytes, *, gzipped: bool) -> Answer | Retry:
        endpoint = self._endpoint
        headers = {
            "Content-Type": "application/x-protobuf",
            "User-Agent": f"dsagent/{version('dsagent')}",
            **endpoint.headers,
        }
        if gzipped:
            headers["Content-Encoding"] = "gzip"
            body = gzip.compress(body, 6)
        was_open = self._connection is not None
        try:
            connection = self._connect()
            self.is_reached = True
            connection.request("POST", endpoint.path, body, headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
        except OSError as error:  # refused, reset, timed out, no such host, bad certificate
            self.close()
            self.is_reached = False
            reason = f"{endpoint.url}: {error.strerror or error or type(error).__name__}"
            # A connection kept open may have been closed over there since: a new one may do.
            is_stale = was_open and isinstance(error, ConnectionError)
            return Retry(reason, 0.0 if is_stale else None)
        except (HTTPException, ValueError) as error:
            self.close()
            reason = f"{endpoint.url}: no HTTP answer ({type(error).__name__})"
            return Answer(
                "refused", reason=f"{reason}; is it the port for HTTP (OTLP: usually 4318)?"
            )
        if response.will_close or len(answer) > MAX_ANSWER_BYTES:
            self.close()
        if 200 <= response.status < 300:
            return Answer("accepted", body=answer)
        reason = f"{endpoint.url}: answered {response.status}"
        if response.status in RETRY_STATUS:
            return Retry(reason, _retry_after_s(response))
        return Answer("refused", reason=reason, status=response.status)

    def abandon(self) -> None:
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

    def _connect(self) -> HTTPConnection:
        if self._connection is None:
            endpoint = self._endpoint
            timeout_s = endpoint.timeout_s
            if self._tls is not None:
                self._connection = HTTPSConnection(
                    endpoint.host, endpoint.port, timeout=timeout_s, context=self._tls
                )
            else:
                self._connection = HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
            self._connection.connect()
        return self._connection


def _tls(endpoint: Endpoint) -> SSLContext:
    import ssl

    try:
        context = ssl.create_default_context(cafile=endpoint.ca_file)
        if endpoint.client_certificate_file is not None:
            # A key with a pass phrase would be asked for on the terminal: none is taken.
            context.load_cert_chain(
                endpoint.client_certificate_file, endpoint.client_key_file, password=""
            )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = (endpoint.ca_file, endpoint.client_certificate_file, endpoint.client_key_file)
        named = ", ".join(filter(None, files))
        raise DsagentError(
            f"cannot use the certificates for OTLP ({named}): {error.args[-1]}", exit_code=USAGE
        ) from error
    return context


def _retry_after_s(response: HTTPResponse) -> float | None:
    """Seconds, or the time until a date; None where neither is said."""
    text = (response.headers.get("Retry-After") or "").strip()[:64]
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
