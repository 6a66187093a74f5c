"""OTLP over gRPC, with bodies that are serialised already."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.files import read_named
from dsagent.agent.sinks.otlp_config import Endpoint
from dsagent.agent.sinks.otlp_post import MAX_ANSWER_BYTES, Answer, Retry, Signal

if TYPE_CHECKING:
    import grpc

_SERVICE = {
    "traces": "trace.v1.TraceService",
    "metrics": "metrics.v1.MetricsService",
    "logs": "logs.v1.LogsService",
}
# By the OTLP specification. RESOURCE_EXHAUSTED only where the back end says when to come again.
_RETRY_CODES = (
    *("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"),
)
_MAX_DETAILS = 16
_VARINT, _LEN = 0, 2  # wire types


class GrpcChannel:
    """See otlp_post.Channel."""

    def __init__(self, endpoint: Endpoint, signal: Signal) -> None:
        """Raises DsagentError where a certificate cannot be read."""
        import grpc

        self._grpc = grpc
        self._endpoint = endpoint
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self._address = f"{host}:{endpoint.port}"
        options = (
            ("grpc.primary_user_agent", f"dsagent/{version('dsagent')}"),
            ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
            # Its own back-off ends where ours tries again.
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5000),
        )
        if endpoint.scheme == "https":
            self._channel = grpc.secure_channel(self._address, _credentials(endpoint), options)
        else:
            self._channel = grpc.insecure_channel(self._address, options)
        self._export = self._channel.unary_unary(
            f"/opentelemetry.proto.collector.{_SERVICE[signal]}/Export"
        )
        self._metadata = tuple((name.lower(), value) for name, value in endpoint.headers.items())
        self._call: Any = None
        self.is_reached = False

    def send(self, body: bytes, *, gzipped: bool) -> Answer | Retry:
        grpc = self._grpc
        compression = grpc.Compression.Gzip if gzipped else grpc.Compression.NoCompression
        call = self._call = self._export.future(
            body,
            timeout=self._endpoint.timeout_s,
            metadata=self._metadata,
            compression=compression,
        )
        try:
            answer = call.result()
        except grpc.FutureCancelledError:  # by `abandon`
            return Retry(f"{self._address}: broken off")
        except grpc.RpcError:
            return self._failed(call)
        self.is_reached = True
        return Answer("accepted", body=answer)

    def _failed(self, call: grpc.Call) -> Answer | Retry:
        code = call.code().name
        reason = f"{self._address}: {code}: {(call.details() or '')[:200]}"
        self.is_reached = code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        after_s = _retry_after_s(call.trailing_metadata() or ())
        if code in _RETRY_CODES or (code == "RESOURCE_EXHAUSTED" and after_s is not None):
            return Retry(reason, after_s)
        # What a server without gzip says; for Poster, which then tries without.
        return Answer("refused", reason=reason, status=415 if code == "UNIMPLEMENTED" else 0)

    def abandon(self) -> None:
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        self._channel.close()


def _credentials(endpoint: Endpoint) -> grpc.ChannelCredentials:
    import grpc

    def content(path: str | None) -> bytes | None:
        if path is None:
            return None
        pem = read_named(path)
        if b"-----BEGIN" not in pem:  # gRPC itself would only say that no connection comes about
            raise DsagentError(
                f"cannot use the certificates for OTLP: {path} is not PEM", exit_code=USAGE
            )
        return pem

    return grpc.ssl_channel_credentials(
        content(endpoint.ca_file),
        content(endpoint.client_key_file),
        content(endpoint.client_certificate_file),
    )


def _retry_after_s(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """What google.rpc.RetryInfo says, where the back end sent one: within the status' details, or
    by itself."""
    for key, value in metadata:
        if not isinstance(value, bytes) or len(value) > MAX_ANSWER_BYTES:
            continue
        if key == "google.rpc.retryinfo-bin":
            return _delay_s(value)
        if key == "grpc-status-details-bin":
            for detail in _messages(value, 3)[:_MAX_DETAILS]:
                if any(url.endswith(b"/google.rpc.RetryInfo") for url in _messages(detail, 1)):
                    return next((_delay_s(info) for info in _messages(detail, 2)), 0.0)
    return None


def _delay_s(retry_info: bytes) -> float:
    delay = Duration()
    for content in _messages(retry_info, 1)[:1]:
        try:
            delay.ParseFromString(content)
        except DecodeError:
            return 0.0
    return max(0.0, float(delay.seconds) + float(delay.nanos) / 1e9)


def _messages(data: bytes, wanted: int) -> list[bytes]:
    """The contents of the fields with this number that are messages or strings. There is no class
    for these messages: protobuf itself brings only what lies within them."""
    found, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == _LEN:
            length, at = _varint(data, at)
            if tag >> 3 == wanted:
                found.append(data[at : at + length])
            at += length
        elif tag & 7 == _VARINT:
            _, at = _varint(data, at)
        else:
            break  # nothing of what is looked for has other fields
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends; breaks off with the data."""
    value = 0
    for index in range(at, min(at + 10, len(data))):
        value |= (data[index] & 0x7F) << 7 * (index - at)
        if data[index] < 0x80:
            return value, index + 1
    return value, len(data)
