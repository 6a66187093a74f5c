"""`dsagent sidecar`: watches every engine of a pod, for as long as the pod lives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsagent.agent.listening import ports
from dsagent.agent.session import watch_flags as flags
from dsagent.agent.settings import named_path, option, size_bytes

if TYPE_CHECKING:
    from dsagent.agent.sidecar.options import SidecarOptions
    from dsagent.agent.sidecar.reader import Start


def _size_or_none(value: int | None) -> int | None:
    return None if value is None else size_bytes(value)


def sidecar(
    context: typer.Context,
    match: Annotated[
        str | None,
        option(
            metavar="REGEX",
            help="Only servers whose command line holds this, rings or not; without it every "
            "engine with rings, and the servers known by name from outside.",
        ),
    ] = None,
    max_engines: Annotated[
        int, option(metavar="N", min=1, max=64, help="At most so many at once.")
    ] = 8,
    max_memory: Annotated[
        int | None,
        option(
            metavar="BYTES",
            min=32 << 20,
            callback=_size_or_none,
            help="Keep less, and look at less, before using this much; its container's own limit "
            "is kept too.",
        ),
    ] = None,
    listen: Annotated[
        str,
        option(
            metavar="HOST:PORT|no",
            help="Answer /metrics, /healthz and /readyz there.",
        ),
    ] = ports.on_loopback(ports.METRICS),
    listen_token_file: flags.ListenTokenFile = None,
    listen_tls_cert: flags.ListenTlsCert = None,
    listen_tls_key: flags.ListenTlsKey = None,
    listen_open: flags.ListenOpen = False,
    record: Annotated[
        Path | None,
        option(metavar="DIR", parser=named_path, help="Write recordings below this folder."),
    ] = None,
    record_max_bytes: Annotated[
        int,
        option(
            metavar="BYTES",
            min=1 << 20,
            callback=size_bytes,
            help="Of all engines together; the oldest goes beyond this.",
        ),
    ] = 512 << 20,
    slo: flags.Slo = None,
    step_spans: flags.StepSpans = "worst",
    otlp_endpoint: flags.OtlpEndpoint = None,
    otlp_protocol: flags.OtlpProtocol = None,
    otlp_queue: flags.OtlpQueue = None,
    otlp_queue_max_bytes: Annotated[
        int,
        option(
            metavar="BYTES",
            min=1 << 20,
            callback=size_bytes,
            help="Of each kind (traces, metrics, logs), of all engines together.",
        ),
    ] = 256 << 20,
    unmasked: flags.Unmasked = False,
    sample_rate: flags.SampleRate = None,
    override_sampled_0: flags.OverrideSampled0 = False,
    remote_write: flags.RemoteWrite = None,
    pyroscope: flags.Pyroscope = None,
    otlp_receive: flags.OtlpReceive = None,
    otlp_receive_grpc: flags.OtlpReceiveGrpc = None,
    anomalies: flags.Anomalies = False,
    max_overhead: flags.MaxOverhead = "1%",
    tier: flags.KernelTier = "default",
    without: flags.Without = None,
    json: Annotated[bool, option("--json", help="Log as one JSON document a line.")] = False,
) -> None:
    """Watch every engine of this pid namespace, until told to stop.

    Engines are found as they start, and followed through restarts. Whatever
    is missing or wrong, it says so, waits and tries again; it ends only with
    Ctrl-C or SIGTERM. SIGHUP reads the settings file again. `dsagent status`,
    `explain` and `why` ask it.

    \b
    Examples:
      dsagent sidecar
      dsagent sidecar --config /etc/dsagent/dsagent.toml --json
      dsagent sidecar --match 'my-server --port 8000' --listen 0.0.0.0:9464 --listen-token-file t
    """
    from dataclasses import replace

    from dsagent.agent import settings
    from dsagent.agent.listening.admission import ListenOptions, refuse_shared
    from dsagent.agent.session.feeds import DISPENSABLE
    from dsagent.agent.session.outlets import OutletOptions, refuse_loops
    from dsagent.agent.sidecar.options import AttachOptions, SidecarOptions, pattern
    from dsagent.agent.sidecar.reader import Reading, Start

    outlets = OutletOptions(
        record=record,
        record_max_bytes=record_max_bytes,
        slo=slo,
        step_spans=step_spans,
        otlp_endpoint=otlp_endpoint,
        otlp_protocol=otlp_protocol,
        otlp_queue=otlp_queue,
        otlp_queue_max_bytes=otlp_queue_max_bytes,
        masked=not unmasked,
        sample_rate=None if sample_rate is None else settings.parse_percent(sample_rate, least=0.0),
        override_sampled_0=override_sampled_0,
        remote_write=remote_write,
        pyroscope=pyroscope,
    )
    options = SidecarOptions(
        attach=AttachOptions(
            outlets=outlets,
            max_overhead_ratio=settings.parse_percent(max_overhead),
            tier=tier,
            without=settings.parse_names(without, DISPENSABLE),
            has_anomalies=anomalies,
        ),
        match=pattern(match),
        max_engines=max_engines,
        max_memory_bytes=max_memory,
        listen=settings.listen_address(listen),
        otlp_receive=settings.listen_address(
            otlp_receive, settings.ADDRESS_DEFAULTS["--otlp-receive"]
        ),
        otlp_receive_grpc=settings.listen_address(
            otlp_receive_grpc, settings.ADDRESS_DEFAULTS["--otlp-receive-grpc"]
        ),
        guarded_by=ListenOptions(listen_token_file, listen_tls_cert, listen_tls_key, listen_open),
        as_json=json,
    )
    refuse_shared(
        {
            "--listen": options.listen,
            "--otlp-receive": options.otlp_receive,
            "--otlp-receive-grpc": options.otlp_receive_grpc,
        }
    )
    refuse_loops(
        replace(
            outlets,
            otlp_receive=options.otlp_receive,
            otlp_receive_grpc=options.otlp_receive_grpc,
        )
    )
    if isinstance(context.obj, Reading):  # the settings are read, again
        context.obj.options = options
        return
    assert isinstance(context.obj, Start)
    _run(context, context.obj, options)


def _run(context: typer.Context, start: Start, options: SidecarOptions) -> None:
    import signal

    from dsagent.agent.host import descriptors
    from dsagent.agent.screens import terminal
    from dsagent.agent.sidecar.log import Log
    from dsagent.agent.sidecar.loop import Sidecar
    from dsagent.agent.sidecar.memory import take_little
    from dsagent.agent.sidecar.reader import SettingsReader, parser_of

    take_little()
    reader = SettingsReader(start.file, parser_of(context, start.arguments))
    running = Sidecar(reader, options, Log(as_json=options.as_json))
    descriptors.raise_limit()  # of all engines together; one that lacks some says so
    signal.signal(signal.SIGHUP, lambda _signum, _frame: running.reload())
    with terminal.stopping_on_signals(running.stop):
        running.run()
