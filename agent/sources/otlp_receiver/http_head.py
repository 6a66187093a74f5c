"""The head of an HTTP/1 request, as strictly as this server needs it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_HEAD_BYTES = 16 << 10
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]{1,2048}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*(.*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,12}")
_PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class Head:
    """A request that may go on: how long its body is, and what to do with it."""

    length: int
    gzip: bool
    keep_alive: bool
    expects_100: bool
    authorization: str  # empty without the header


class RefusedError(Exception):
    """The status to answer with, and why. What follows on the connection cannot be trusted to
    be the next request: it is closed."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def parse_head(raw: bytes, max_body_bytes: int) -> Head:
    """`raw`: without the empty line. Raises RefusedError."""
    first, *lines = raw.split(b"\r\n")
    request_line = _REQUEST_LINE.fullmatch(first)
    if request_line is None:
        raise RefusedError(400, "no HTTP/1 request line")
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise RefusedError(400, "a line of the head is no header")
        name, value = found[1].decode().lower(), found[2].decode("latin-1")
        if headers.setdefault(name, value) != value:
            if name in ("content-length", "content-type", "content-encoding"):
                raise RefusedError(400, f"{name} twice")
            headers[name] += f", {value}"
    method, path = request_line[1], request_line[2].split(b"?")[0]
    if path != b"/v1/traces":
        raise RefusedError(404, "only /v1/traces is here")
    if method != b"POST":
        raise RefusedError(405, "only POST")
    if "transfer-encoding" in headers or "content-length" not in headers:
        raise RefusedError(411, "a Content-Length is needed")
    if not _LENGTH.fullmatch(headers["content-length"]):
        raise RefusedError(400, "Content-Length is no number")
    if headers.get("content-type", "").split(";")[0].strip().lower() != _PROTOBUF:
        raise RefusedError(415, f"only {_PROTOBUF}")
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise RefusedError(415, "only gzip, or no encoding")
    length = int(headers["content-length"])
    if length > max_body_bytes:
        raise RefusedError(413, f"more than {max_body_bytes} bytes")
    connection = headers.get("connection", "").lower()
    return Head(
        length=length,
        gzip=encoding == "gzip",
        keep_alive="keep-alive" in connection
        or (request_line[3] == b"1" and "close" not in connection),
        expects_100=headers.get("expect", "").lower() == "100-continue",
        authorization=headers.get("authorization", ""),
    )
