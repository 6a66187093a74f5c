"""What the flags of attach make of the sinks: which traces go out, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from made import account, batch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dsagent.agent.errors import DsagentError
from dsagent.agent.session.outlets import Judged, OutletOptions, make_sinks
from dsagent.agent.settings import parse_percent
from dsagent.agent.sinks.otlp import OtlpSink

SLO = """
slo:
  - model: "*"
    ttft_ms: 100
"""


def exported(options: OutletOptions) -> dict[int, str]:
    """Trace ids of the requests whose spans wait to be posted, and why they are kept. Half of the
    callers say no; TTFT is 300 ms."""
    made = make_sinks(options, Judged(options, lambda _line: None))
    sink = next(sink for sink in made if isinstance(sink, OtlpSink))
    for number in range(200):
        sampled = False if number % 2 else None
        sink.take(batch(accounts=(account(f"r{number}", sampled=sampled, step_ids=()),)))
    sink._spans.end()
    found = {}
    while (body := sink._spans.next()) is not None:
        for of_resource in ExportTraceServiceRequest.FromString(body.data).resource_spans:
            for span in of_resource.scope_spans[0].spans:
                for attribute in span.attributes:
                    if attribute.key == "dsagent.sampling.reason":
                        trace_id = int.from_bytes(span.trace_id, "big")
                        found[trace_id] = attribute.value.string_value
    return found


@pytest.fixture
def slo(tmp_path: Path) -> Path:
    path = tmp_path / "slo.yaml"
    path.write_text(SLO)
    return path


def test_a_fixed_rate_is_of_those_that_nobody_decided() -> None:
    endpoint = "http://127.0.0.1:1"
    assert exported(OutletOptions(otlp_endpoint=endpoint, sample_rate=0.0)) == {}
    everything = exported(OutletOptions(otlp_endpoint=endpoint, sample_rate=1.0))
    assert len(everything) == 100
    assert set(everything.values()) == {"rate"}
    half = exported(OutletOptions(otlp_endpoint=endpoint, sample_rate=0.5))
    assert half.keys() < everything.keys()
    assert 25 < len(half) < 75


def test_violators_go_out_and_with_the_override_those_whose_caller_said_no(slo: Path) -> None:
    options = {"otlp_endpoint": "http://127.0.0.1:1", "sample_rate": 0.0, "slo": slo}
    assert list(exported(OutletOptions(**options)).values()) == ["slo:ttft"] * 100  # type: ignore[arg-type]
    reasons = exported(OutletOptions(**options, override_sampled_0=True)).values()  # type: ignore[arg-type]
    assert sorted(reasons) == ["override:ttft"] * 100 + ["slo:ttft"] * 100


def test_a_rate_is_a_percentage() -> None:
    assert parse_percent("2%", least=0.0) == 0.02
    assert parse_percent("0", least=0.0) == 0.0
    for wrong in ("-1%", "101%", "two"):
        with pytest.raises(DsagentError, match="percentage"):
            parse_percent(wrong, least=0.0)
    with pytest.raises(DsagentError):
        parse_percent("0%")
