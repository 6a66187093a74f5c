"""OTLP over gRPC: opentelemetry.proto.collector.trace.v1.TraceService/Export.

Messages are taken as bytes, so no generated classes are needed. grpc is imported only here, when
somebody asks for it.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.admission import Guard
from dsagent.agent.sources.otlp_receiver.inbox import MAX_BODY_BYTES, Inbox, Verdict

if TYPE_CHECKING:
    import grpc

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_CONNECTIONS = 32
MAX_CALLS = 8  # at once, over all connections
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BODY_BYTES),  # before and after decompressing
    ("grpc.max_send_message_length", 4096),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),  # finds out who has gone without a word
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # else a second agent would share the port, and each get a part
)


class GrpcServer:
    """Bound when made; serves from `start` to `stop`."""

    def __init__(self, host: str, port: int, inbox: Inbox, guard: Guard) -> None:
        """Raises DsagentError where it may not, or cannot, listen there. Port 0: any that is
        free."""
        # A name is resolved once: what was checked is what is bound.
        _, host = guard.place(host, port, "--otlp-receive-grpc")
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own log goes to stderr
        try:
            import grpc
        except ImportError as error:
            raise DsagentError(
                "--otlp-receive-grpc needs the package grpcio: pip install 'dsagent[agent]'"
            ) from error
        self._inbox = inbox
        self._guard = guard
        self._pem = guard.pem()
        self._codes = {
            Verdict.BAD: grpc.StatusCode.INVALID_ARGUMENT,
            Verdict.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
            Verdict.BUSY: grpc.StatusCode.UNAVAILABLE,  # the one that is tried again
        }
        self._unauthenticated = grpc.StatusCode.UNAUTHENTICATED
        export = grpc.unary_unary_rpc_method_handler(self._export)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="otlp-grpc")
        self._server = grpc.server(
            self._pool,
            handlers=(grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),),
            options=_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
            compression=grpc.Compression.NoCompression,
        )
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._add_port(where)
        except RuntimeError as error:
            self._pool.shutdown()
            raise DsagentError(
                f"cannot listen on {where} for OTLP over gRPC: in use, or no address of this "
                "machine; choose another one with --otlp-receive-grpc HOST:PORT"
            ) from error

    def _add_port(self, where: str) -> int:
        import grpc

        def configuration() -> Any:
            assert self._pem is not None
            return grpc.ssl_server_certificate_configuration([self._pem])

        def renewed() -> Any:
            """Asked before each handshake; None: as before."""
            pem = self._guard.pem()
            if pem == self._pem:
                return None
            self._pem = pem
            return configuration()

        if self._pem is None:
            return int(self._server.add_insecure_port(where))
        credentials = grpc.dynamic_ssl_server_credentials(configuration(), renewed)
        return int(self._server.add_secure_port(where, credentials))

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        """May be called twice."""
        self._server.stop(grace=0.5).wait(2.0)
        self._pool.shutdown(wait=False)

    def _export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        if not self._admits(context):
            self._inbox.count("grpc", "UNAUTHENTICATED", "a client without the token")
            context.set_code(self._unauthenticated)
            context.set_details("a bearer token is needed")
            return b""
        answer = self._inbox.put(body)
        code = self._codes.get(answer.verdict)
        self._inbox.count("grpc", "OK" if code is None else code.name, answer.why)
        if code is not None:
            context.set_code(code)
            context.set_details(answer.why)
        return b""  # an empty ExportTraceServiceResponse: all taken

    def _admits(self, context: grpc.ServicerContext) -> bool:
        if not self._guard.asks_for_token:
            return True
        given = [value for key, value in context.invocation_metadata() if key == "authorization"]
        return len(given) == 1 and self._guard.admits(given[0])
