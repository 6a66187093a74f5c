"""The Collector's and Alertmanager's examples. Alertmanager's own tool reads its file. No Collector
can be had here: its files are held to their own inner order and to what the agent really sends."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from made import account
from rendering import ROOT

from dsagent.agent.attribution.account import CAUSES
from dsagent.agent.listening import ports
from dsagent.agent.session.sampling import Sampler
from dsagent.dashboards import rules
from dsagent.instrumentation import names

ALERTMANAGER = ROOT / "deploy" / "alertmanager" / "alertmanager.yaml"
COLLECTORS = ("edge", "gateway")
TAIL = "tail_sampling"


@cache
def collector(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (ROOT / "deploy" / "collector" / f"{name}.yaml").read_text()
    )
    return found


def policies(kind: str) -> list[dict[str, Any]]:
    every = collector("gateway")["processors"][TAIL]["policies"]
    assert all(set(policy) <= {"name", "type", policy["type"]} for policy in every)
    return [policy[kind] for policy in every if policy["type"] == kind]


@pytest.mark.parametrize("name", COLLECTORS)
def test_every_part_of_a_collector_is_used_and_there(name: str) -> None:
    config = collector(name)
    pipelines = config["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics", "logs"}
    for kind in ("receivers", "processors", "exporters"):
        used = {part for pipeline in pipelines.values() for part in pipeline[kind]}
        assert used == set(config[kind]), kind
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    for pipeline in pipelines.values():
        assert pipeline["processors"][0] == "memory_limiter", "it must come before all others"


def endpoints(config: Any) -> Iterator[dict[str, Any]]:
    """Every mapping that names where to listen or to send."""
    if isinstance(config, dict):
        if "endpoint" in config:
            yield config
        for below in config.values():
            yield from endpoints(below)


@pytest.mark.parametrize("name", COLLECTORS)
def test_whatever_leaves_the_machine_does_so_over_tls(name: str) -> None:
    for kind in ("receivers", "exporters", "extensions"):
        for each in endpoints(collector(name)[kind]):
            if not each["endpoint"].startswith("127.0.0.1:"):
                assert each["tls"], each["endpoint"]
                assert not each["tls"].get("insecure"), each["endpoint"]
                assert not each["endpoint"].startswith("http:"), each["endpoint"]
    balanced = collector("edge")["exporters"]["loadbalancing"]
    assert balanced["protocol"]["otlp"]["tls"]["server_name_override"]


def test_the_edge_listens_where_the_agent_sends_and_the_gateway_where_the_edge_does() -> None:
    received = collector("edge")["receivers"]["otlp"]["protocols"]
    assert received["http"]["endpoint"].endswith(f":{ports.OTLP_HTTP}")
    assert received["grpc"]["endpoint"].endswith(f":{ports.OTLP_GRPC}")
    at_gateway = collector("gateway")["receivers"]["otlp"]["protocols"]["grpc"]
    assert at_gateway["tls"]["client_ca_file"], "the edge shows who it is"
    exporters = collector("edge")["exporters"]
    _, port = at_gateway["endpoint"].rsplit(":", 1)
    assert exporters["loadbalancing"]["resolver"]["dns"]["port"] == port
    assert exporters["otlp"]["endpoint"].endswith(f":{port}")
    assert exporters["loadbalancing"]["routing_key"] == "traceID"


def test_the_policies_ask_for_attributes_that_the_agent_sends() -> None:
    parts = {names.part(cause) for cause in CAUSES}
    by_number = policies("numeric_attribute")
    assert by_number
    for policy in by_number:
        assert policy["key"] in parts
        assert set(policy) == {"key", "min_value"}
    (by_reason,) = policies("string_attribute")
    assert by_reason["key"] == names.SAMPLING_REASON
    (by_name,) = policies("ottl_condition")
    assert by_name["span"] == [f'name == "{names.STEP_SPAN}"']


def test_every_reason_of_the_agents_own_is_kept_and_others_are_not() -> None:
    (policy,) = policies("string_attribute")
    assert policy["enabled_regex_matching"] is True

    def kept(reason: str) -> bool:
        return any(re.search(pattern, reason) for pattern in policy["values"])

    def decided(violated: tuple[str, ...] = (), **of_record: Any) -> str:
        sampler = Sampler(rate=1.0, override_sampled_0=True)
        return sampler.decide(account(**of_record), violated).reason

    own = {decided(("ttft",)), decided(("ttft",), sampled=False), decided(error="timeout")}
    assert own == {"slo:ttft", "override:ttft", "error"}
    assert all(kept(reason) for reason in (*own, "outlier"))
    assert not any(kept(reason) for reason in (decided(), decided(sampled=True)))


needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="no amtool here (apt install prometheus-alertmanager)"
)


def amtool(*arguments: str) -> str:
    ran = subprocess.run(
        ["amtool", *arguments], capture_output=True, text=True, check=False, timeout=30
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_amtool
def test_alertmanagers_own_tool_takes_its_file() -> None:
    assert "SUCCESS" in amtool("check-config", str(ALERTMANAGER))


@needs_amtool
def test_every_alert_finds_its_receiver() -> None:
    receivers = {"page": "on-call", "ticket": "tickets"}
    found = set()
    for group in yaml.load((rules.GENERATED / rules.RULES).read_text(), yaml.CSafeLoader)["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                found.add((rule["alert"], rule["labels"]["severity"]))
    assert {severity for _, severity in found} == set(receivers)
    for alert, severity in found:
        labels = [f"alertname={alert}", f"severity={severity}"]
        test = ("config", "routes", "test", f"--config.file={ALERTMANAGER}")
        assert amtool(*test, *labels).split() == [receivers[severity]]


def test_the_alerts_and_labels_that_are_named_exist() -> None:
    config = yaml.safe_load(ALERTMANAGER.read_text())
    text = (rules.GENERATED / rules.RULES).read_text()
    for rule in config["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            name, value = re.fullmatch(r'(\w+)="(\w+)"', matcher).groups()  # type: ignore[union-attr]
            key = "alert" if name == "alertname" else name
            assert f"{key}: {value}\n" in text, matcher
        for label in rule.get("equal", ()):
            assert label in text
    for annotation in ("runbook_url", "causes"):
        assert f"{annotation}:" in text
        assert f"Annotations.{annotation} }}}}" in ALERTMANAGER.read_text()
