"""`dsagent attach`: watches a running server until told to stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsagent.agent.session import watch_flags as flags
from dsagent.agent.settings import named_path, option, seconds, size_bytes

if TYPE_CHECKING:
    from dsagent.agent.facts import Target
    from dsagent.agent.host.server_target import Instrument


def attach(
    pid: Annotated[
        int | None,
        typer.Argument(
            metavar="PID",
            min=1,
            show_default=False,
            help="Any process of the server; without it, the engines that run here are named.",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        option(metavar="DIR", parser=named_path, help="Write a recording into this folder."),
    ] = None,
    record_max_bytes: Annotated[
        int,
        option(
            metavar="BYTES", min=1 << 20, callback=size_bytes, help="The oldest goes beyond this."
        ),
    ] = 512 << 20,
    instrument: Annotated[
        Literal["auto", "plugin", "inject", "outside"],
        option(
            metavar="auto|plugin|inject|outside",
            help="inject: put hooks into a vLLM that was started without them; "
            "`dsagent detach` takes them out. outside: put nothing in, infer from its messages.",
        ),
    ] = "auto",
    yes: Annotated[bool, option("--yes", help="Inject without asking.")] = False,
    duration: Annotated[
        float | None,
        option(metavar="SECONDS", min=0.1, callback=seconds, help="End so long after attaching."),
    ] = None,
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
            help="Of each kind (traces, metrics, logs); the oldest goes beyond this.",
        ),
    ] = 256 << 20,
    unmasked: flags.Unmasked = False,
    sample_rate: flags.SampleRate = None,
    override_sampled_0: flags.OverrideSampled0 = False,
    prometheus: Annotated[
        str | None,
        option(metavar="[HOST:PORT]", help="Answer scrapes; without an address at 127.0.0.1:9464."),
    ] = None,
    remote_write: flags.RemoteWrite = None,
    pyroscope: flags.Pyroscope = None,
    otlp_receive: flags.OtlpReceive = None,
    otlp_receive_grpc: flags.OtlpReceiveGrpc = None,
    listen_token_file: flags.ListenTokenFile = None,
    listen_tls_cert: flags.ListenTlsCert = None,
    listen_tls_key: flags.ListenTlsKey = None,
    listen_open: flags.ListenOpen = False,
    anomalies: flags.Anomalies = False,
    max_overhead: flags.MaxOverhead = "1%",
    tier: flags.KernelTier = "default",
    without: flags.Without = None,
    json: Annotated[bool, option("--json", help="Print the summary as one JSON document.")] = False,
) -> None:
    """Watch a running server and account for each of its requests.

    A bundled engine that is just starting is waited for.
    Ends with Ctrl-C, SIGTERM, the server's end, or after --duration.

    \b
    Examples:
      dsagent attach 4242
      dsagent attach 4242 --record run1 --prometheus
      dsagent attach 4242 --duration 60 --json
      dsagent attach 4242 --instrument inject
    """
    from dsagent.agent import settings
    from dsagent.agent.anomalies.make import make_watch
    from dsagent.agent.host import descriptors
    from dsagent.agent.listening.admission import ListenOptions, make_guard
    from dsagent.agent.screens import terminal
    from dsagent.agent.session.expected import expected_lines
    from dsagent.agent.session.feeds import DISPENSABLE
    from dsagent.agent.session.loop import Session
    from dsagent.agent.session.normal_keeper import NormalKeeper
    from dsagent.agent.session.outlets import (
        Judged,
        OutletOptions,
        make_receiver,
        make_sinks,
        remarks,
    )
    from dsagent.agent.session.overhead import give_way

    max_overhead_ratio = settings.parse_percent(max_overhead)
    left_out = settings.parse_names(without, DISPENSABLE)
    scraped_at = settings.listen_address(prometheus)
    received_at = settings.listen_address(otlp_receive, settings.ADDRESS_DEFAULTS["--otlp-receive"])
    received_grpc_at = settings.listen_address(
        otlp_receive_grpc, settings.ADDRESS_DEFAULTS["--otlp-receive-grpc"]
    )
    guard = make_guard(
        ListenOptions(listen_token_file, listen_tls_cert, listen_tls_key, listen_open),
        {
            "--prometheus": scraped_at,
            "--otlp-receive": received_at,
            "--otlp-receive-grpc": received_grpc_at,
        },
    )
    progress = terminal.Progress()
    rate = None if sample_rate is None else settings.parse_percent(sample_rate, least=0.0)
    options = OutletOptions(
        record=record,
        record_max_bytes=record_max_bytes,
        slo=slo,
        step_spans=step_spans,
        otlp_endpoint=otlp_endpoint,
        otlp_protocol=otlp_protocol,
        otlp_queue=otlp_queue,
        otlp_queue_max_bytes=otlp_queue_max_bytes,
        masked=not unmasked,
        sample_rate=rate,
        override_sampled_0=override_sampled_0,
        prometheus=scraped_at,
        remote_write=remote_write,
        pyroscope=pyroscope,
        otlp_receive=received_at,
        otlp_receive_grpc=received_grpc_at,
        guard=guard,
    )
    judged = Judged(options, progress.say)
    sinks = make_sinks(options, judged)
    # Whatever is wrong with the settings has been said: now the process, and only now hooks.
    descriptors.make_room()
    target = _find(pid, instrument, yes, progress.say)
    for line in remarks(options, judged, target):
        progress.say(line)

    def on_attached() -> None:
        give_way()
        for source in session.sources():
            if source.state != "ok":
                progress.say(f"without {source.name}: {source.reason}")
        for line in expected_lines(
            has_metrics=bool({"prometheus", "otlp", "remote_write"} & {s.name for s in sinks}),
            has_otlp="otlp" in {sink.name for sink in sinks},
            devices=len(target.gpu_uuids),
            has_slo=slo is not None,
            has_anomalies=anomalies,
        ):
            progress.say(line)
        progress.say(
            f"attached to {target.comm} (pid {target.pid}), engine {target.engine}; Ctrl-C ends it"
        )

    session = Session(
        target,
        sinks,
        receiver=make_receiver(options),
        has_profiles=pyroscope is not None,
        duration_s=duration,
        max_overhead_ratio=max_overhead_ratio,
        tier=tier,
        without=left_out,
        normal=None if record is None else NormalKeeper(record, target),
        anomalies=make_watch() if anomalies else None,
        on_attached=on_attached,
        on_live=progress.show,
        on_trouble=progress.say,
    )
    with terminal.stopping_on_signals(session.stop), progress:
        document = session.run()
    if instrument == "inject":
        progress.say(f"the hooks stay in; `dsagent detach {target.pid}` takes them out")
    if json:
        terminal.put_json(document)
    else:
        from dsagent.agent.screens import render

        terminal.put_text(render.summary(document))


def _find(pid: int | None, instrument: Instrument, yes: bool, say: Callable[[str], None]) -> Target:
    """The target, with the hooks in it where they are asked for. Raises DsagentError."""
    from dsagent.agent.checks.engines_here import told
    from dsagent.agent.errors import USAGE, DsagentError
    from dsagent.agent.host.server_target import find_target
    from dsagent.agent.host.target import NothingThere

    if pid is None:
        raise DsagentError(
            f"attach needs the PID of any process of a server; {told()}", exit_code=USAGE
        )
    if instrument == "inject":
        _inject(pid, yes, say)
    try:
        return find_target(pid, instrument, say)
    except NothingThere as error:
        raise DsagentError(f"{error}; {told()}", exit_code=error.exit_code) from error


def _inject(pid: int, yes: bool, say: Callable[[str], None]) -> None:
    from dsagent.agent.checks.engines_here import told
    from dsagent.agent.errors import DsagentError
    from dsagent.agent.inject.interpreter import NoProcess
    from dsagent.agent.inject.way_in import NoVllm, inject
    from dsagent.agent.screens import terminal

    try:
        inject(pid, say, terminal.agrees if not yes else None)
    except (NoProcess, NoVllm) as error:
        raise DsagentError(f"{error}; {told()}", exit_code=error.exit_code) from error
