"""The manifests say what the code says: a port, a path, a key, a variable or a version that changes
in only one of them fails here."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import shipped_settings
import tomllib
import yaml
from rendering import (
    AGENT,
    MANIFESTS,
    ROOT,
    VARIANTS,
    agent_of,
    documents,
    every_document,
    one,
    pod_spec,
    pods_with_agent,
)

from dsagent.agent import settings
from dsagent.agent.app import COMMANDS
from dsagent.agent.errors import DsagentError
from dsagent.agent.listening import ports
from dsagent.agent.listening.admission import Guard, ListenOptions
from dsagent.agent.resource import resource_overrides
from dsagent.agent.sidecar.listener import Health, Listener
from dsagent.agent.sinks.recording import SEGMENT_BYTES
from dsagent.dashboards import rules
from dsagent.dashboards.generate import BOARDS

BASE = MANIFESTS / "base" / "dsagent.toml"
OFF = re.compile(r"^# (\w+ = .*)$", re.MULTILINE)  # a setting that a person may switch on
MIB = 1 << 20
GIB = 1 << 30
LARGEST_ANNOTATION_BYTES = 256 << 10  # kubectl keeps what it applied in one


def deployment(name: str = "native") -> dict[str, Any]:
    return pod_spec(one(documents(f"overlays/{name}"), "Deployment"))


def monitored(folder: str = "parts/monitoring") -> dict[str, Any]:
    (endpoint,) = one(documents(folder), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert isinstance(endpoint, dict)
    return endpoint


def settings_of(folder: str, tmp_path: Path) -> tuple[Path, str]:
    """The ConfigMap's file, and where it is mounted."""
    (text,) = (
        each["data"][settings.DEFAULT_FILE.name]
        for each in documents(folder)
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == AGENT
    )
    path = tmp_path / settings.DEFAULT_FILE.name
    path.write_text(text)
    return path, text


@pytest.mark.parametrize("name", VARIANTS)
def test_the_agents_own_reader_takes_the_settings(name: str, tmp_path: Path) -> None:
    path, _ = settings_of(f"overlays/{name}", tmp_path)
    options = shipped_settings.read(path)
    assert options.listen is not None
    _, port = settings.parse_address(options.listen)
    (declared,) = agent_of(deployment(name))["ports"]
    assert port == declared["containerPort"] == ports.METRICS
    assert options.attach.outlets.record is None, "recording is off unless somebody wants it"
    assert not options.allow_inject
    assert not options.guarded_by.is_open


def test_what_is_commented_out_may_be_switched_on(tmp_path: Path) -> None:
    path = tmp_path / "dsagent.toml"
    text, count = OFF.subn(r"\1", BASE.read_text())
    assert count >= 3
    path.write_text(text)
    options = shipped_settings.read(path)
    outlets = options.attach.outlets
    assert outlets.otlp_endpoint is not None
    assert outlets.otlp_endpoint.endswith(f":{ports.OTLP_HTTP}")
    agent = agent_of(deployment())
    (volume,) = (m for m in agent["volumeMounts"] if not m.get("readOnly"))
    assert outlets.record is not None
    assert outlets.record.is_relative_to(volume["mountPath"])
    # Spans come from the pod's own containers: nobody else reaches it, with a policy or without.
    assert options.otlp_receive_grpc == ports.on_loopback(ports.OTLP_GRPC)


def test_a_full_recording_stays_below_the_volumes_limit(tmp_path: Path) -> None:
    """Beyond it the kubelet would evict the pod. The cap, and a segment of each table being
    written and not yet counted."""
    path = tmp_path / "dsagent.toml"
    path.write_text(OFF.sub(r"\1", BASE.read_text()))
    outlets = shipped_settings.read(path).attach.outlets
    for folder, spec in pods_with_agent():
        (limit,) = (
            volume["emptyDir"]["sizeLimit"]
            for volume in spec["volumes"]
            if volume["name"] == "dsagent-recording"
        )
        assert limit == "1Gi", folder
        assert outlets.record_max_bytes + SEGMENT_BYTES <= 3 * GIB // 4, folder


def test_an_unknown_setting_is_found(tmp_path: Path) -> None:
    """Else the tests above say nothing."""
    path = tmp_path / "dsagent.toml"
    path.write_text(BASE.read_text() + '\nlisten_tokn_file = "x"\n')
    with pytest.raises(DsagentError, match="listen_tokn_file"):
        shipped_settings.read(path)


def test_the_files_it_names_are_where_the_volume_puts_them(tmp_path: Path) -> None:
    path, _ = settings_of("examples/tls", tmp_path)
    guarded_by = shipped_settings.read(path).guarded_by
    for _, spec in pods_with_agent():
        (mount,) = (m for m in agent_of(spec)["volumeMounts"] if m.get("readOnly"))
        folder = Path(mount["mountPath"])
        assert settings.DEFAULT_FILE.parent == folder
        assert guarded_by.token_file == folder / monitored()["authorization"]["credentials"]["key"]
        assert (guarded_by.tls_cert, guarded_by.tls_key) == (folder / "tls.crt", folder / "tls.key")
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        names = [s.get("secret", {}).get("name") for s in volume["projected"]["sources"]]
        assert monitored()["authorization"]["credentials"]["name"] in names


def test_prometheus_asks_at_the_agents_port_and_path() -> None:
    endpoint = monitored()
    (declared,) = agent_of(deployment())["ports"]
    assert endpoint["port"] == declared["name"]
    assert len(declared["name"]) <= 15, "Kubernetes takes no longer one"
    listener = Listener(list, lambda: Health(True, (), 0))
    assert listener._answer(endpoint["path"], "").status == 200
    assert listener._answer("/elsewhere", "").status == 404
    assert "scheme" not in endpoint
    assert monitored("examples/tls")["scheme"] == "https"


def test_what_selects_the_pods_selects_ours() -> None:
    policy = one(documents("overlays/native"), "NetworkPolicy")
    monitor = one(documents("parts/monitoring"), "PodMonitor")
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert monitor["spec"]["selector"]["matchLabels"] == wanted
    for folder, document in every_document():
        if document["kind"] == "Deployment" and folder != "engine":
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert wanted.items() <= labels.items(), folder


def test_the_policy_closes_the_agents_port_and_no_other() -> None:
    policy = one(documents("overlays/native"), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"], "where the engine may connect to is not ours"
    for_all, for_prometheus = policy["ingress"]
    assert "from" not in for_all
    for protocol in ("TCP", "UDP", "SCTP"):
        reached: set[int] = set()
        for each in for_all["ports"]:
            if each["protocol"] == protocol:
                reached |= set(range(each["port"], each["endPort"] + 1))
        closed = set(range(1, 65536)) - reached
        assert closed == ({ports.METRICS} if protocol == "TCP" else set())
    assert for_prometheus["from"]
    assert for_prometheus["ports"] == [{"protocol": "TCP", "port": ports.METRICS}]


def test_the_command_and_the_variables_are_known() -> None:
    for folder, spec in pods_with_agent():
        agent = agent_of(spec)
        program, command = agent["command"]
        assert program == "dsagent"
        assert command in COMMANDS, folder
        values: dict[str, str] = {}
        for variable in agent["env"]:  # the earlier ones may stand in the later
            text = variable.get("value", "x").replace("$(", "{").replace(")", "}")
            values[variable["name"]] = text.format(**values)
        found = resource_overrides(values)
        assert set(found) == {
            "k8s.pod.name",
            "k8s.namespace.name",
            "k8s.pod.uid",
            "k8s.node.name",
        }, folder


def test_the_image_is_of_this_version() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    for folder, spec in pods_with_agent():
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            name, _, tag = container["image"].rpartition(":")
            if name.rpartition("/")[2].startswith(AGENT):
                assert tag == version, folder


def test_every_board_is_a_config_map_small_enough_to_apply() -> None:
    boards = documents("parts/grafana")
    files = {name for each in boards for name in each["data"]}
    assert files == {f"dsagent-{name}.json" for name in BOARDS}
    for each in boards:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["annotations"]["grafana_folder"]
        (text,) = each["data"].values()
        assert json.loads(text)["panels"]


def test_nothing_is_too_large_for_kubectl_apply() -> None:
    for folder, document in every_document():
        kept = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        name = f"{folder}: {document['kind']} {document['metadata']['name']}"
        assert len(kept.encode()) < LARGEST_ANNOTATION_BYTES, name


def test_the_rules_are_those_of_the_slo_file() -> None:
    rendered = one(documents("parts/monitoring"), "PrometheusRule")
    committed = yaml.load((rules.GENERATED / rules.RULES).read_text(), yaml.CSafeLoader)
    assert rendered["spec"] == committed


def test_a_changed_setting_does_not_restart_the_engine() -> None:
    """A ConfigMap with a hash in its name would change the pod's template."""
    names = {
        each["metadata"]["name"]
        for folder, each in every_document()
        if each["kind"] == "ConfigMap" and "dsagent.toml" in each["data"]
    }
    assert names == {AGENT}


def test_a_stateful_set_of_ones_own_gets_the_agent_and_keeps_its_own(tmp_path: Path) -> None:
    """As the page says: a label, and a component. kustomize takes no absolute paths."""
    engine = one(documents("engine"), "Deployment")
    engine |= {"kind": "StatefulSet"}
    engine["metadata"]["name"] = "mine"
    other = copy.deepcopy(engine)
    other["metadata"] = {"name": "other"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump_all([engine, other]))
    component = os.path.relpath(MANIFESTS / "sidecar" / "native", tmp_path.resolve())
    made = {"resources": ["mine.yaml"], "components": [component]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(made))
    mine, without = documents(tmp_path.resolve())
    assert agent_of(pod_spec(mine))["restartPolicy"] == "Always"
    assert (mine["kind"], mine["metadata"]["name"]) == ("StatefulSet", "mine")
    assert pod_spec(mine)["containers"] == pod_spec(engine)["containers"]
    assert without == other


def test_the_token_of_the_secret_is_one_that_the_agent_takes(tmp_path: Path) -> None:
    """A kubelet gives a volume's files to root, with the mode it is told, and lets fsGroup read."""
    token = tmp_path / "token"
    token.write_text(32 * "a")
    for folder, spec in pods_with_agent():
        (volume,) = (each for each in spec["volumes"] if each["name"] == "dsagent-settings")
        group = spec.get("securityContext", {}).get("fsGroup")
        token.chmod(volume["projected"]["defaultMode"] | (0 if group is None else 0o440))
        assert Guard(ListenOptions(token)).admits(f"Bearer {32 * 'a'}"), folder
        context = {**spec.get("securityContext", {}), **agent_of(spec)["securityContext"]}
        assert context["runAsUser"] == 0 or group is not None, folder
