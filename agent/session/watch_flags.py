"""The options that `attach` and `sidecar` share: how an engine is watched, and where it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dsagent.agent.probes import Tier
from dsagent.agent.settings import named_path, option

Slo = Annotated[
    Path | None,
    option(metavar="FILE", parser=named_path, help="Latency limits; none without it."),
]
StepSpans = Annotated[
    Literal["worst", "all"],
    option(metavar="worst|all", help="Steps that become spans of a request's trace."),
]
OtlpEndpoint = Annotated[
    str | None,
    option(
        metavar="URL",
        help="Send traces, metrics and logs there by OTLP; "
        "OTEL_EXPORTER_OTLP_ENDPOINT says the same.",
    ),
]
OtlpProtocol = Annotated[
    Literal["http/protobuf", "grpc"] | None,
    option(
        metavar="http/protobuf|grpc",
        help="How to send it; over HTTP unless OTEL_EXPORTER_OTLP_PROTOCOL says otherwise.",
    ),
]
OtlpQueue = Annotated[
    Path | None,
    option(
        metavar="DIR",
        parser=named_path,
        help="Keep what the OTLP endpoint does not have yet in this folder, also across a "
        "restart; in memory only without it.",
    ),
]
Unmasked = Annotated[
    bool,
    option(
        "--unmasked",
        help="Let e-mail and IP addresses, telephone numbers and keys in logs and error texts "
        "go out as they are.",
    ),
]
SampleRate = Annotated[
    str | None,
    option(
        metavar="PERCENT",
        help="Of the requests that nothing else decides, export so many; without it 0.1%, "
        "rising to 5% with the error rate.",
    ),
]
OverrideSampled0 = Annotated[
    bool,
    option(
        "--override-sampled-0",
        help="Export requests that violate a limit though their caller said not to; marked.",
    ),
]
RemoteWrite = Annotated[
    str | None,
    option(
        metavar="URL",
        help="Push metrics with native histograms to Prometheus there, such as "
        "http://127.0.0.1:9090/api/v1/write.",
    ),
]
Pyroscope = Annotated[
    str | None,
    option(
        metavar="URL",
        help="Sample the server's Python stacks without pausing it, and push them as profiles, "
        "by phase, to Pyroscope there, such as http://127.0.0.1:4040.",
    ),
]
OtlpReceive = Annotated[
    str | None,
    option(
        metavar="[HOST:PORT]",
        help="Take the spans that the engine exports itself, by OTLP over HTTP; without an "
        "address at 127.0.0.1:4318. They are passed on to the OTLP endpoint.",
    ),
]
OtlpReceiveGrpc = Annotated[
    str | None,
    option(metavar="[HOST:PORT]", help="The same over gRPC; without an address at :4317."),
]
ListenTokenFile = Annotated[
    Path | None,
    option(
        metavar="FILE",
        parser=named_path,
        help="Answer only who sends one of the tokens in this file, one a line "
        "(Authorization: Bearer). Needed wherever others than this machine can connect.",
    ),
]
ListenTlsCert = Annotated[
    Path | None,
    option(metavar="FILE", parser=named_path, help="Speak TLS with this certificate chain."),
]
ListenTlsKey = Annotated[
    Path | None, option(metavar="FILE", parser=named_path, help="Its private key, both PEM.")
]
ListenOpen = Annotated[
    bool,
    option(
        "--listen-open",
        help="Listen beyond loopback without a token: something else guards it, such as a "
        "NetworkPolicy.",
    ),
]
Anomalies = Annotated[
    bool,
    option("--anomalies", help="Tell what in steps and requests takes longer than usual."),
]
MaxOverhead = Annotated[
    str, option(metavar="PERCENT", help="Look at less where watching costs more.")
]
KernelTier = Annotated[
    Tier, option(metavar="core|default|full", help="How much to look at in the kernel.")
]
Without = Annotated[
    str | None,
    option(metavar="SOURCES", help="Leave out kernel, proc, stall or nvml; several by commas."),
]
