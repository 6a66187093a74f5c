"""The source `otlp`: takes the spans that the engine itself exports, over HTTP or gRPC."""

from __future__ import annotations

import ipaddress
import socket
import time

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.facts import Readings, Sample, SourceStatus
from dsagent.agent.host.procfs import escape
from dsagent.agent.listening.admission import Guard
from dsagent.agent.sources.otlp_receiver.http_server import HttpServer
from dsagent.agent.sources.otlp_receiver.inbox import Inbox

SAMPLES_NS = 1_000_000_000
Address = tuple[str, int]


class OtlpReceiver:
    """Listens from the moment it is made, so that an address in use ends `attach` at once.
    The servers have threads of their own; `poll` only fetches."""

    name = "otlp"

    def __init__(
        self,
        http: Address | None,
        grpc: Address | None,
        *,
        passes_on: bool,
        guard: Guard | None = None,
    ) -> None:
        """`passes_on`: a sink forwards what comes; `guard`: who may send, without it whoever
        reaches loopback. Raises DsagentError where it cannot listen."""
        self._inbox = Inbox(passes_on=passes_on)
        self._guard = guard or Guard()
        self.http = None if http is None else HttpServer(*http, self._inbox, self._guard)
        self.grpc = None
        if grpc is not None:
            from dsagent.agent.sources.otlp_receiver.grpc_server import GrpcServer

            try:
                self.grpc = GrpcServer(*grpc, self._inbox, self._guard)
            except DsagentError:
                self.stop()
                raise
        self._next_samples_ns = 0
        self._poll_ns = 0

    @property
    def ports(self) -> tuple[int, ...]:
        """Where it listens: HTTP first, then gRPC."""
        return tuple(server.port for server in (self.http, self.grpc) if server is not None)

    def counts(self) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Requests by (protocol, code), and spans by what they stand for; from any thread."""
        return self._inbox.counts()

    def start(self) -> None:
        for server in (self.http, self.grpc):
            if server is not None:
                server.start()

    def poll(self, now_ns: int) -> Readings:
        started_ns = time.thread_time_ns()
        spans, bodies = self._inbox.take()
        samples: list[Sample] = []
        if now_ns >= self._next_samples_ns:
            self._next_samples_ns = now_ns + SAMPLES_NS
            samples = self._samples(now_ns)
        self._poll_ns += time.thread_time_ns() - started_ns
        return Readings(engine_spans=spans, otlp_bodies=bodies, samples=samples)

    def _samples(self, now_ns: int) -> list[Sample]:
        counted, spans_of = self._inbox.counts()
        requests = [
            Sample(
                "dsagent.otlp_receiver.requests",
                count,
                now_ns,
                {"protocol": protocol, "code": code},
            )
            for (protocol, code), count in counted.items()
        ]
        spans = [
            Sample("dsagent.otlp_receiver.spans", count, now_ns, {"of": of})
            for of, count in spans_of.items()
        ]
        return requests + spans

    def status(self) -> SourceStatus:
        """What gRPC's own threads cost is not known; it is part of the agent's CPU."""
        cost_ns = self._poll_ns + (self.http.cpu_ns if self.http is not None else 0)
        reason = escape(self._guard.notice or self._inbox.reason)
        return SourceStatus(self.name, "ok", reason, self._inbox.dropped, cost_ns=cost_ns)

    def stop(self) -> None:
        for server in (self.http, self.grpc):
            if server is not None:
                server.stop()


def refuse_loop(receives: Address | None, host: str, port: int) -> None:
    """Raises DsagentError where what is received would be sent back to ourselves."""
    if receives is None or receives[1] != port:
        return
    loopback = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::")
    is_ours = receives[0] in loopback and host in loopback
    if receives[0] == host or is_ours or (receives[0] in ("0.0.0.0", "::") and _is_here(host)):
        raise DsagentError(
            f"the OTLP endpoint {host}:{port} is what --otlp-receive listens on: the agent would "
            "send its spans to itself",
            exit_code=USAGE,
        )


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine, or its name; others' names are not asked for."""
    if host == socket.gethostname():
        return True
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return False
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True
