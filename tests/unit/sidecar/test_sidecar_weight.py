"""What the sidecar says at its start that it will send."""

from __future__ import annotations

from dataclasses import replace

from dsagent.agent.fleet.measured import expected_line
from dsagent.agent.metrics.cardinality import MAX_SERIES, estimate
from dsagent.agent.session.outlets import OutletOptions
from dsagent.agent.sidecar.options import AttachOptions, SidecarOptions
from dsagent.agent.sidecar.weight import weight


def with_outlets(**outlets: str) -> SidecarOptions:
    return SidecarOptions(attach=AttachOptions(outlets=OutletOptions(**outlets)))  # type: ignore[arg-type]


def test_series_where_somebody_gets_them_and_bytes_where_they_are_sent() -> None:
    assert weight(SidecarOptions(), {}) == {}
    series = f"about {estimate(0, has_slo=False)} time series, at most {MAX_SERIES}, "
    scraped = weight(SidecarOptions(listen="127.0.0.1:9464"), {})
    assert set(scraped) == {"metrics"}
    assert scraped["metrics"].startswith(f"of each engine: metrics: {series}")
    written = weight(with_outlets(remote_write="http://127.0.0.1:9090/api/v1/write"), {})
    assert written == scraped
    sent = {"metrics": scraped["metrics"], "traces": f"of each engine: {expected_line()}"}
    assert weight(with_outlets(otlp_endpoint="http://127.0.0.1:4318"), {}) == sent
    assert weight(SidecarOptions(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}) == sent


def test_anomalies_have_series_of_their_own() -> None:
    plain = SidecarOptions(listen="127.0.0.1:9464")
    attach = replace(plain.attach, has_anomalies=True)
    more = weight(replace(plain, attach=attach), {})["metrics"]
    assert f"about {estimate(0, has_slo=False, has_anomalies=True)} " in more


def test_a_variable_that_cannot_be_right_is_not_our_business() -> None:
    assert weight(SidecarOptions(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "no url"}) == {}
