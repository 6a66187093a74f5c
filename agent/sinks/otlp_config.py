"""Where OTLP goes and how: the OTEL_* variables, over which a flag wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote, urlsplit

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.url_text import refuse_user, shown

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_INTERVAL_S = 10.0
NO_LIMIT_S = 3600.0  # what the conventions mean by a time limit of 0, kept finite
_PREFIX = "OTEL_EXPORTER_OTLP"


Protocol = Literal["http/protobuf", "grpc"]
Histograms = Literal["explicit_bucket_histogram", "base2_exponential_bucket_histogram"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one signal goes. With gRPC the path is the service's, not this one's."""

    scheme: str  # http or https
    host: str
    port: int
    path: str
    protocol: Protocol = "http/protobuf"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    gzip: bool = True
    ca_file: str | None = None
    client_certificate_file: str | None = None
    client_key_file: str | None = None

    @property
    def url(self) -> str:
        """As it is shown: a query may be a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return shown(f"{self.scheme}://{host}:{self.port}{self.path}", max_chars=500)


@dataclass(frozen=True, slots=True)
class OtlpConfig:
    """None: that signal is not exported."""

    traces: Endpoint | None
    metrics: Endpoint | None
    logs: Endpoint | None = None
    interval_s: float = DEFAULT_INTERVAL_S  # between two pushes of metrics
    histograms: Histograms = "explicit_bucket_histogram"

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(each for each in (self.traces, self.metrics, self.logs) if each is not None)


def otlp_config(
    environ: Mapping[str, str], endpoint: str | None = None, protocol: str | None = None
) -> OtlpConfig | None:
    """`endpoint`, `protocol`: the flags' values; the endpoint is a base URL. None where nobody
    asked for OTLP.

    Raises DsagentError with one clear line for a value that cannot be right.
    """
    traces = _signal(environ, "TRACES", "/v1/traces", endpoint, protocol)
    metrics = _signal(environ, "METRICS", "/v1/metrics", endpoint, protocol)
    logs = _signal(environ, "LOGS", "/v1/logs", endpoint, protocol)
    if traces is None and metrics is None and logs is None:
        return None
    interval_ms = _milliseconds(environ, "OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_S * 1000)
    return OtlpConfig(traces, metrics, logs, interval_ms / 1000, _histograms(environ))


def remote_write_endpoint(url: str, headers: Mapping[str, str]) -> Endpoint:
    """Of Prometheus, such as http://127.0.0.1:9090/api/v1/write; `headers`: the protocol's own.
    Raises DsagentError with one clear line for what is no URL."""
    scheme, host, port, path = _parse_url("--remote-write", url)
    return Endpoint(scheme, host, port, path or "/api/v1/write", headers=headers, gzip=False)


def pyroscope_endpoint(url: str, path: str, headers: Mapping[str, str]) -> Endpoint:
    """Of Pyroscope, such as http://127.0.0.1:4040: `path` comes after the URL's own. Raises
    DsagentError with one clear line for what is no URL."""
    scheme, host, port, own_path = _parse_url("--pyroscope", url)
    return Endpoint(scheme, host, port, own_path.rstrip("/") + path, headers=headers)


def _histograms(environ: Mapping[str, str]) -> Histograms:
    temporality = f"{_PREFIX}_METRICS_TEMPORALITY_PREFERENCE"
    wanted = environ.get(temporality, "").strip().lower()
    if wanted not in ("", "cumulative"):
        raise DsagentError(
            f"{temporality} is {wanted[:40]!r}; the agent's metrics are cumulative: unset it, or "
            "let the collector convert them",
            exit_code=USAGE,
        )
    aggregation = f"{_PREFIX}_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
    match environ.get(aggregation, "").strip().lower():
        case "" | "explicit_bucket_histogram":
            return "explicit_bucket_histogram"
        case "base2_exponential_bucket_histogram":
            return "base2_exponential_bucket_histogram"
        case other:
            raise DsagentError(
                f"{aggregation} is {other[:40]!r}, not explicit_bucket_histogram or "
                "base2_exponential_bucket_histogram",
                exit_code=USAGE,
            )


def _signal(
    environ: Mapping[str, str], signal: str, path: str, base: str | None, protocol: str | None
) -> Endpoint | None:
    if environ.get(f"OTEL_{signal}_EXPORTER", "").strip() == "none":
        return None

    def setting(name: str) -> tuple[str, str]:
        """The variable that decides, and its value: the signal's own wins."""
        for variable in (f"{_PREFIX}_{signal}_{name}", f"{_PREFIX}_{name}"):
            value = environ.get(variable, "").strip()
            if value:
                return variable, value
        return f"{_PREFIX}_{name}", ""

    url_variable, url = setting("ENDPOINT")
    if base is not None:
        url_variable, url = "--otlp-endpoint", base
    if not url:
        return None
    spoken = _protocol(
        *(setting("PROTOCOL") if protocol is None else ("--otlp-protocol", protocol))
    )
    if spoken == "grpc" and "://" not in url:  # host:port, whose safety has a variable of its own
        is_insecure = setting("INSECURE")[1].lower() == "true"
        url = f"{'http' if is_insecure else 'https'}://{url}"
    # A signal's own URL is taken as it is; the common one is a base.
    is_base = url_variable != f"{_PREFIX}_{signal}_ENDPOINT"
    scheme, host, port, own_path = _parse_url(url_variable, url)
    variable, compression = setting("COMPRESSION")
    if compression not in ("", "gzip", "none"):
        raise DsagentError(f"{variable} is {compression[:40]!r}, not gzip or none", exit_code=USAGE)
    timeout_ms = _milliseconds(
        environ, setting("TIMEOUT")[0], DEFAULT_TIMEOUT_S * 1000, NO_LIMIT_S * 1000
    )
    certificate = setting("CLIENT_CERTIFICATE")[1] or None
    key = setting("CLIENT_KEY")[1] or None
    if (certificate is None) != (key is None):
        raise DsagentError(
            f"{_PREFIX}_CLIENT_CERTIFICATE and {_PREFIX}_CLIENT_KEY need each other; "
            "only one of them is set",
            exit_code=USAGE,
        )
    return Endpoint(
        scheme=scheme,
        host=host,
        port=port,
        path=own_path.rstrip("/") + path if is_base else own_path or "/",
        protocol=spoken,
        headers=_parse_headers(*setting("HEADERS")),
        timeout_s=timeout_ms / 1000,
        gzip=compression != "none",
        ca_file=setting("CERTIFICATE")[1] or None,
        client_certificate_file=certificate,
        client_key_file=key,
    )


def _protocol(variable: str, protocol: str) -> Protocol:
    match protocol:
        case "" | "http/protobuf":
            return "http/protobuf"
        case "grpc":
            return "grpc"
    raise DsagentError(
        f"{variable} is {protocol[:40]!r}; the agent speaks http/protobuf (usually port 4318) and "
        "grpc (usually 4317)",
        exit_code=USAGE,
    )


def _parse_url(variable: str, url: str) -> tuple[str, str, int, str]:
    try:
        refuse_user(url)
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise DsagentError(f"{variable}: {shown(url)!r}: {error}", exit_code=USAGE) from error
    is_printable = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_printable:
        raise DsagentError(
            f"{variable}: {shown(url)!r} is not a URL such as http://127.0.0.1:4318",
            exit_code=USAGE,
        )
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return parts.scheme, parts.hostname, port, path


def _parse_headers(variable: str, text: str) -> dict[str, str]:
    headers = {}
    for pair in filter(None, (pair.strip() for pair in text.split(","))):
        name, separator, value = pair.partition("=")
        name, value = unquote(name.strip()), unquote(value.strip())
        is_name = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if not separator or not is_name or not (value.isascii() and value.isprintable()):
            # The value may be a secret: it is not shown.
            raise DsagentError(
                f"{variable}: {name[:40]!r} is not a header of the form name=value",
                exit_code=USAGE,
            )
        headers[name] = value
    return headers


def _milliseconds(
    environ: Mapping[str, str], variable: str, default: float, no_limit: float | None = None
) -> float:
    """The conventions give durations in milliseconds. `no_limit`: what 0 means, if it may be."""
    text = environ.get(variable, "").strip()
    if not text:
        return default
    if text == "0" and no_limit is not None:
        return no_limit
    if not text.isdecimal() or len(text) > 9 or not 0 < int(text) <= 86_400_000:
        raise DsagentError(
            f"{variable}: {text[:40]!r} is not a number of milliseconds", exit_code=USAGE
        )
    return float(text)
