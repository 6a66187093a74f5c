"""Where OTLP goes and how: the OTEL_* variables, over which a flag wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from dsagent.agent.errors import USAGE, DsagentError

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_INTERVAL_S = 10.0
_PREFIX = "OTEL_EXPORTER_OTLP"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one signal is posted to."""

    scheme: str  # http or https
    host: str
    port: int
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    gzip: bool = True
    ca_file: str | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class OtlpConfig:
    """None: that signal is not exported."""

    traces: Endpoint | None
    metrics: Endpoint | None
    interval_s: float = DEFAULT_INTERVAL_S  # between two pushes of metrics


def otlp_config(environ: Mapping[str, str], endpoint: str | None = None) -> OtlpConfig | None:
    """`endpoint`: the flag's value, a base URL. None where nobody asked for OTLP.

    Raises DsagentError with one clear line for a value that cannot be right.
    """
    traces = _signal(environ, "TRACES", "/v1/traces", endpoint)
    metrics = _signal(environ, "METRICS", "/v1/metrics", endpoint)
    if traces is None and metrics is None:
        return None
    interval_ms = _milliseconds(environ, "OTEL_METRIC_EXPORT_INTERVAL", DEFAULT_INTERVAL_S * 1000)
    return OtlpConfig(traces, metrics, interval_ms / 1000)


def _signal(
    environ: Mapping[str, str], signal: str, path: str, base: str | None
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

    variable, url = setting("ENDPOINT")
    if base is not None:
        variable, url = "--otlp-endpoint", base
    if not url:
        return None
    # A signal's own URL is taken as it is; the common one is a base.
    is_base = variable != f"{_PREFIX}_{signal}_ENDPOINT"
    scheme, host, port, own_path = _parse_url(variable, url)
    variable, protocol = setting("PROTOCOL")
    if protocol not in ("", "http/protobuf"):
        raise DsagentError(
            f"{variable} is {protocol[:40]!r}; the agent speaks http/protobuf only: unset it and "
            "point the endpoint at the collector's HTTP port (usually 4318)",
            exit_code=USAGE,
        )
    variable, compression = setting("COMPRESSION")
    if compression not in ("", "gzip", "none"):
        raise DsagentError(f"{variable} is {compression[:40]!r}, not gzip or none", exit_code=USAGE)
    timeout_ms = _milliseconds(environ, setting("TIMEOUT")[0], DEFAULT_TIMEOUT_S * 1000)
    return Endpoint(
        scheme=scheme,
        host=host,
        port=port,
        path=own_path.rstrip("/") + path if is_base else own_path or "/",
        headers=_parse_headers(*setting("HEADERS")),
        timeout_s=timeout_ms / 1000,
        gzip=compression != "none",
        ca_file=setting("CERTIFICATE")[1] or None,
    )


def _parse_url(variable: str, url: str) -> tuple[str, str, int, str]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise DsagentError(f"{variable}: {url[:80]!r}: {error}", exit_code=USAGE) from error
    is_printable = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_printable:
        raise DsagentError(
            f"{variable}: {url[:80]!r} is not a URL such as http://127.0.0.1:4318",
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


def _milliseconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    """The conventions give durations in milliseconds."""
    text = environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > 9 or not 0 < int(text) <= 86_400_000:
        raise DsagentError(
            f"{variable}: {text[:40]!r} is not a number of milliseconds", exit_code=USAGE
        )
    return float(text)
