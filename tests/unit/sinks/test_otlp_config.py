"""OTEL_* variables: what they mean, and one clear line for what they cannot mean."""

from __future__ import annotations

import pytest
from made import TARGET

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.resource import resource_attributes, resource_overrides
from dsagent.agent.sinks.otlp_config import NO_LIMIT_S, Endpoint, otlp_config

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def traces(environ: dict[str, str], flag: str | None = None) -> Endpoint:
    config = otlp_config(environ, flag)
    assert config is not None
    assert config.traces is not None
    return config.traces


def test_nobody_asked() -> None:
    assert otlp_config({}) is None
    assert otlp_config({BASE: ""}) is None


def test_the_common_endpoint_is_a_base() -> None:
    config = otlp_config({BASE: "http://collector:4318/some/"})
    assert config is not None
    assert config.traces is not None
    assert config.metrics is not None
    assert config.traces.url == "http://collector:4318/some/v1/traces"
    assert config.metrics.url == "http://collector:4318/some/v1/metrics"
    assert config.interval_s == 10


def test_a_signals_own_endpoint_is_taken_as_it_is() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://[::1]/in?tenant=1"}
    config = otlp_config(environ)
    assert config is not None
    assert config.metrics is None
    assert config.traces is not None
    assert config.traces.path == "/in?tenant=1"
    assert config.traces.url == "https://[::1]:443/in?…"  # as it is shown


def test_the_flag_wins() -> None:
    environ = {BASE: "http://a:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2/x"}
    assert traces(environ).url == "http://b:2/x"
    assert traces(environ, "http://c:3").url == "http://c:3/v1/traces"


def test_headers_timeouts_and_the_rest() -> None:
    endpoint = traces(
        {
            BASE: "http://a:1",
            "OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20x, x-scope = 1 ,",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1500",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
        }
    )
    assert endpoint.headers == {"Authorization": "Bearer x", "x-scope": "1"}
    assert endpoint.timeout_s == 1.5
    assert not endpoint.gzip
    assert endpoint.ca_file == "/ca.pem"
    assert traces({BASE: "http://a:1"}).gzip


def test_each_signal_may_speak_another_protocol_and_have_its_own_certificate() -> None:
    config = otlp_config(
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "https://a:1",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_LOGS_CLIENT_CERTIFICATE": "/own.pem",
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": "/c.pem",
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": "/k.pem",
        }
    )
    assert config is not None
    assert config.traces is not None
    assert config.metrics is not None
    assert config.logs is not None
    protocols = [endpoint.protocol for endpoint in config.endpoints]
    assert protocols == ["grpc", "http/protobuf", "http/protobuf"]
    assert config.logs.url == "https://a:1/v1/logs"
    assert config.logs.client_certificate_file == "/own.pem"
    assert config.metrics.client_certificate_file == "/c.pem"
    assert config.logs.client_key_file == config.traces.client_key_file == "/k.pem"


def test_grpc_takes_host_and_port_and_is_safe_unless_told() -> None:
    environ = {BASE: "collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert traces(environ).url.startswith("https://collector:4317")
    insecure = {**environ, "OTEL_EXPORTER_OTLP_INSECURE": "true"}
    assert traces(insecure).scheme == "http"
    assert otlp_config({BASE: "http://a:1"}, protocol="grpc").traces.protocol == "grpc"  # type: ignore[union-attr]


def test_a_time_limit_of_0_is_none() -> None:
    assert traces({BASE: "http://a:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "0"}).timeout_s == NO_LIMIT_S


def test_a_signal_can_be_off() -> None:
    config = otlp_config({BASE: "http://a:1", "OTEL_TRACES_EXPORTER": "none"})
    assert config is not None
    assert config.traces is None
    assert config.metrics is not None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (BASE, "collector:4318", "is not a URL"),
        (BASE, "grpc://collector:4317", "is not a URL"),
        (BASE, "http://", "is not a URL"),
        (BASE, "http://a:99999", "99999|out of range"),
        (BASE, "http://a b/", "is not a URL"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "/key.pem", "need each other"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta", "cumulative"),
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "x", "explicit_bucket"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "not gzip or none"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "nothing", "not a header"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=b%0d%0aevil: 1", "not a header"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "milliseconds"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "9" * 5000, "milliseconds"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "milliseconds"),
    ],
)
def test_what_cannot_be_right_is_one_clear_line(name: str, value: str, message: str) -> None:
    with pytest.raises(DsagentError, match=message) as raised:
        otlp_config({BASE: "http://a:1", name: value})
    assert raised.value.exit_code == USAGE
    assert name in str(raised.value)
    assert len(str(raised.value)) < 300


def test_secrets_in_headers_are_not_shown() -> None:
    with pytest.raises(DsagentError) as raised:
        otlp_config({BASE: "http://a:1", "OTEL_EXPORTER_OTLP_HEADERS": "a b=s3cret"})
    assert "s3cret" not in str(raised.value)


def test_the_resource_always_names_the_service_and_the_instance() -> None:
    plain = resource_attributes(TARGET, {})
    assert plain["service.name"] == "reference"
    assert len(str(plain["service.instance.id"])) == 36
    assert plain == resource_attributes(TARGET, {})
    overrides = resource_overrides(
        {
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=a,service.instance.id=i%201,team=x",
            "OTEL_SERVICE_NAME": "b",
        }
    )
    named = resource_attributes(TARGET, overrides)
    assert (named["service.name"], named["service.instance.id"]) == ("b", "i 1")
    assert named["team"] == "x"
    with pytest.raises(DsagentError, match="not key=value"):
        resource_overrides({"OTEL_RESOURCE_ATTRIBUTES": "a"})
