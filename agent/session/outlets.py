"""The sinks of a session, each standing alone, and which ones the flags ask for; and what
receives spans, since what comes in there goes on to a sink."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from dsagent.agent import tenant_header
from dsagent.agent.clear_links import clear_links
from dsagent.agent.facts import Target
from dsagent.agent.listening.admission import Guard
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.resource import resource_overrides
from dsagent.agent.session.guard import attempt
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.settings import parse_address
from dsagent.agent.sinks.base import Explained, Sink, SinkStatus
from dsagent.agent.sinks.otlp_config import otlp_config, remote_write_endpoint
from dsagent.agent.slo import Limits, SloFile, load_slo

if TYPE_CHECKING:
    from dsagent.agent.sinks.otlp_delivery import QueueOptions
    from dsagent.agent.sinks.otlp_forward import OtlpForwardSink
    from dsagent.agent.slo.alert import Alert
    from dsagent.agent.sources.otlp_receiver.source import OtlpReceiver


class Outlets:
    """Hands every batch to every sink. A sink must not raise; one that does, in whatever method,
    is counted and given no more."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._started: list[Sink] = []
        self._last: dict[str, SinkStatus] = {}  # by name, as last seen

    def start(self) -> None:
        """Raises DsagentError where one cannot begin; those that did are stopped by `stop`."""
        for sink in self._sinks:
            sink.start()
            self._started.append(sink)

    def take(self, batch: Explained) -> None:
        for sink in tuple(self._started):
            _, why = attempt(functools.partial(sink.take, batch))
            if why:
                self._end(sink, why, deadline_s=0.0)

    def _end(self, sink: Sink, why: str, deadline_s: float) -> None:
        self._started.remove(sink)
        _, did_not_stop = attempt(functools.partial(sink.stop, deadline_s))
        status, no_status = attempt(sink.status)
        status = status or self._last.get(sink.name) or SinkStatus(sink.name)
        for reason in filter(None, (why, did_not_stop, no_status)):
            status = replace(status, failed=status.failed + 1, reason=reason, ended=True)
        self._last[sink.name] = status

    def statuses(self) -> tuple[SinkStatus, ...]:
        """Of each sink that was started, in their order."""
        for sink in tuple(self._started):
            status, why = attempt(sink.status)
            if status is not None:
                self._last[sink.name] = status
            else:
                self._end(sink, why, deadline_s=0.0)
        return tuple(self._last.values())

    def stop(self, deadline_s: float) -> None:
        """Flushes; `deadline_s` seconds for all of them together. May be called twice."""
        share_s = deadline_s / max(1, len(self._started))
        for sink in tuple(self._started):
            self._end(sink, "", share_s)


@dataclass(frozen=True, slots=True)
class OutletOptions:
    """What the flags of `attach` say about sinks."""

    record: Path | None = None
    record_max_bytes: int = 512 << 20
    slo: Path | None = None
    step_spans: Literal["worst", "all"] = "worst"
    otlp_endpoint: str | None = None
    otlp_protocol: str | None = None
    otlp_queue: Path | None = None
    otlp_queue_max_bytes: int = 256 << 20  # for each signal
    masked: bool = True
    sample_rate: float | None = None  # None: follows the error rate
    override_sampled_0: bool = False
    prometheus: str | None = None
    remote_write: str | None = None
    otlp_receive: str | None = None
    otlp_receive_grpc: str | None = None
    pyroscope: str | None = None
    guard: Guard | None = None  # of all that listens; None: loopback only, for everybody there


class Judged:
    """What decides over requests, one for all sinks: limits, objectives, which are kept. It may
    outlive an attachment, so that objectives do not begin anew with every restart of an engine."""

    def __init__(
        self, options: OutletOptions, tell: Callable[[str], None], slo: SloFile | None = None
    ) -> None:
        """`tell`: what alerts say, for people. `slo`: what the file said, if it has been read.
        Raises DsagentError."""
        self.slo = load_slo(options.slo) if slo is None and options.slo is not None else slo
        self.limits = Limits() if self.slo is None else self.slo.limits
        # One for all: a request is kept by every sink or by none.
        self.sampler = Sampler(
            rate=options.sample_rate, override_sampled_0=options.override_sampled_0
        )
        self.resource = resource_overrides(os.environ)
        self.figures: SloFigures | None = None
        self.sink: Sink | None = None  # that feeds the objectives, before all others
        self.also_told: list[Callable[[Alert], None]] = []  # of each alert
        if self.slo is not None:
            from dsagent.agent.sinks.slo import SloSink
            from dsagent.agent.slo.alert import alert_line
            from dsagent.agent.slo.evaluator import Evaluator

            def on_alert(alert: Alert) -> None:
                tell(alert_line(alert))
                for each in self.also_told:
                    each(alert)

            evaluator = Evaluator(self.slo)
            self.figures = SloFigures(evaluator)
            self.sink = SloSink(self.slo, evaluator, on_alert=on_alert)

    def remark(self, target: Target) -> str | None:
        """What people should know who ask for objectives by tenant of this target."""
        limits = self.limits.entries
        if self.slo is None or not any("tenant" in e.by or e.tenant is not None for e in limits):
            return None
        return tenant_header.remark(self.slo.tenant_header, target.pid)


def make_sinks(options: OutletOptions, judged: Judged) -> list[Sink]:
    """The sinks asked for, not started; imports only what they need. Raises DsagentError (exit 2)
    for settings that cannot be right: no target is needed to say so."""
    first = [] if judged.sink is None else [judged.sink]
    return [*first, *make_attached_sinks(options, judged)]


def remarks(options: OutletOptions, judged: Judged, target: Target) -> list[str]:
    """What people should know of these settings before it begins."""
    about_tenants = judged.remark(target)
    told = [] if about_tenants is None else [about_tenants]
    return told + clear_links(links(options, judged))


def links(options: OutletOptions, judged: Judged) -> list[tuple[str, str]]:
    """Scheme and host of all that is sent to."""
    config = otlp_config(os.environ, options.otlp_endpoint, options.otlp_protocol)
    webhook = None if judged.slo is None else judged.slo.webhook
    urls = [urlsplit(url) for url in (options.remote_write, options.pyroscope, webhook) if url]
    links = [(url.scheme, url.hostname or "") for url in urls]
    return links + [(each.scheme, each.host) for each in (config.endpoints if config else ())]


def make_attached_sinks(options: OutletOptions, judged: Judged) -> list[Sink]:
    """Those of one attachment, not started. Raises DsagentError."""
    limits, sampler, resource = judged.limits, judged.sampler, judged.resource
    figures = judged.figures
    sinks: list[Sink] = []
    if options.record is not None:
        from dsagent.agent.sinks.recording import RecordingSink

        sinks.append(RecordingSink(options.record, options.record_max_bytes))
    if options.prometheus is not None:
        from dsagent.agent.sinks.prometheus import PrometheusSink

        host, port = parse_address(options.prometheus)
        sinks.append(
            PrometheusSink(
                host,
                port,
                limits,
                sampler=sampler,
                resource=resource,
                slo=figures,
                guard=options.guard,
            )
        )
    if options.remote_write is not None:
        from dsagent.agent.sinks.remote_write import HEADERS, RemoteWriteSink

        written = remote_write_endpoint(options.remote_write, HEADERS)
        sinks.append(
            RemoteWriteSink(written, limits, sampler=sampler, resource=resource, slo=figures)
        )
    if options.pyroscope is not None:
        from dsagent.agent.sinks.otlp_config import pyroscope_endpoint
        from dsagent.agent.sinks.pyroscope import HEADERS as PYROSCOPE_HEADERS
        from dsagent.agent.sinks.pyroscope import PATH, PyroscopeSink

        pushed = pyroscope_endpoint(options.pyroscope, PATH, PYROSCOPE_HEADERS)
        sinks.append(PyroscopeSink(pushed, resource=resource))
    config = otlp_config(os.environ, options.otlp_endpoint, options.otlp_protocol)
    if config is not None:
        from dsagent.agent.sinks.otlp import OtlpSink

        otlp = OtlpSink(
            config,
            limits,
            sampler=sampler,
            resource=resource,
            step_spans=options.step_spans,
            queue=_queue(options),
            masked=options.masked,
            slo=figures,
        )
        judged.also_told[:] = [otlp.tell]
        sinks.append(otlp)
    forward = make_forward(options)
    return sinks if forward is None else [*sinks, forward]


def make_forward(options: OutletOptions) -> OtlpForwardSink | None:
    """Passes on what is received, not started; None where nothing is, or there is nowhere to pass
    it on to. Raises DsagentError."""
    config = otlp_config(os.environ, options.otlp_endpoint, options.otlp_protocol)
    is_received = options.otlp_receive or options.otlp_receive_grpc
    if config is None or config.traces is None or not is_received:
        return None
    from dsagent.agent.sinks.otlp_forward import OtlpForwardSink

    return OtlpForwardSink(config.traces, _queue(options))


def _queue(options: OutletOptions) -> QueueOptions | None:
    from dsagent.agent.sinks.otlp_delivery import QueueOptions

    if options.otlp_queue is None:
        return None
    return QueueOptions(options.otlp_queue, options.otlp_queue_max_bytes)


def refuse_loops(options: OutletOptions) -> None:
    """Raises DsagentError (exit 2) where what is received would be sent to ourselves."""
    from dsagent.agent.sources.otlp_receiver.source import refuse_loop

    config = otlp_config(os.environ, options.otlp_endpoint, options.otlp_protocol)
    for endpoint in config.endpoints if config is not None else ():
        for receives in (options.otlp_receive, options.otlp_receive_grpc):
            if receives is not None:
                refuse_loop(parse_address(receives), endpoint.host, endpoint.port)


def make_receiver(options: OutletOptions) -> OtlpReceiver | None:
    """Listening already, where one is asked for. Raises DsagentError."""
    http = None if options.otlp_receive is None else parse_address(options.otlp_receive)
    grpc = None if options.otlp_receive_grpc is None else parse_address(options.otlp_receive_grpc)
    if http is None and grpc is None:
        return None
    from dsagent.agent.sources.otlp_receiver.source import OtlpReceiver

    refuse_loops(options)
    config = otlp_config(os.environ, options.otlp_endpoint, options.otlp_protocol)
    return OtlpReceiver(
        http,
        grpc,
        passes_on=config is not None and config.traces is not None,
        guard=options.guard,
    )
