"""What the agent may do in a pod, and that it decides nothing about the pod's fate."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import (
    AGENT,
    VARIANTS,
    agent_of,
    containers,
    documents,
    every_document,
    keys,
    one,
    pod_spec,
    pods,
    pods_with_agent,
)

FROM_THE_HOST = {"hostPath", "hostPID", "hostIPC", "hostNetwork", "hostPort", "procMount"}
PROBES = {"readinessProbe", "startupProbe", "livenessProbe", "lifecycle", "readinessGates"}
RIGHTS = ["BPF", "PERFMON", "SYS_PTRACE"]


def variant(name: str) -> dict[str, Any]:
    return pod_spec(one(documents(f"overlays/{name}"), "Deployment"))


def test_every_variant_and_example_has_the_agent() -> None:
    found = {folder for folder, _ in pods_with_agent()}
    assert found == {folder for folder, _ in pods()} - {"engine"}
    assert {f"overlays/{name}" for name in VARIANTS} | {"examples/vllm", "examples/crio"} <= found


def test_no_document_has_a_probe() -> None:
    """The strictest reading: not the agent's, and none added to an engine."""
    for folder, document in every_document():
        assert not PROBES & set(keys(document)), folder


def test_nothing_of_the_host_is_asked_for() -> None:
    for folder, document in every_document():
        found = set(keys(document))
        assert not FROM_THE_HOST & found, folder
        assert "privileged" not in found, folder


def test_the_agent_holds_three_capabilities_and_no_more() -> None:
    for folder, spec in pods():
        for container in containers(spec):
            context = container.get("securityContext", {})
            added = context.get("capabilities", {}).get("add", [])
            is_privileged_agent = container["name"] == AGENT and "unprivileged" not in folder
            assert sorted(added) == (RIGHTS if is_privileged_agent else []), folder
            if not container["name"].startswith(AGENT):
                continue
            assert context["capabilities"]["drop"] == ["ALL"], folder
            assert context["allowPrivilegeEscalation"] is False, folder
            assert context["readOnlyRootFilesystem"] is True, folder
            if is_privileged_agent:
                assert context["runAsUser"] == 0, "no ambient capabilities for others"
                assert context["runAsNonRoot"] is False, "the pod's own may say otherwise"


def test_the_seccomp_profile_is_the_runtimes_but_where_that_forbids_bpf() -> None:
    for folder, spec in pods_with_agent():
        wanted = "Unconfined" if folder == "examples/crio" else "RuntimeDefault"
        assert agent_of(spec)["securityContext"]["seccompProfile"] == {"type": wanted}, folder


def test_unprivileged_keeps_to_the_level_restricted_and_shares_the_engines_user() -> None:
    spec = variant("unprivileged")
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"]["type"] == "RuntimeDefault"
    for container in containers(spec):
        context = container["securityContext"]
        assert not {"runAsUser", "runAsGroup", "runAsNonRoot"} & set(context), "the pod's holds"
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    allowed = {"name", "configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
    assert all(set(volume) <= allowed for volume in spec["volumes"])


@pytest.mark.parametrize("name", VARIANTS)
def test_it_sees_the_engines_processes(name: str) -> None:
    assert variant(name)["shareProcessNamespace"] is True


def test_native_and_classic_differ_in_where_the_container_stands_only() -> None:
    native, classic = variant("native"), variant("classic")
    (as_init,) = native.pop("initContainers")
    assert as_init.pop("restartPolicy") == "Always"
    beside = [each for each in classic["containers"] if each["name"] == AGENT]
    assert beside == [as_init]
    classic["containers"] = [each for each in classic["containers"] if each["name"] != AGENT]
    assert classic == native


def test_nothing_that_is_missing_keeps_the_pod_from_starting() -> None:
    for folder, spec in pods_with_agent():
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        agent = agent_of(spec)
        for mount in agent["volumeMounts"]:
            volume = volumes[mount["name"]]
            for source in volume.get("projected", {}).get("sources", [volume]):
                optional = [of.get("optional") for kind, of in source.items() if kind != "name"]
                assert optional == [True] or set(source) == {"name", "emptyDir"}, folder
            assert "subPath" not in mount, "a subPath never sees a new ConfigMap"
        for variable in agent["env"]:
            assert set(variable.get("valueFrom", {})) <= {"fieldRef"}, folder
        assert "envFrom" not in agent


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    for folder, spec in pods():
        for container in containers(spec):
            resources = container["resources"]
            assert resources["requests"] == resources["limits"], folder
            assert {"cpu", "memory"} <= set(resources["limits"]), folder
            # Some kubelets add up those given and hold the whole pod to the sum.
            assert "ephemeral-storage" not in resources["limits"], folder


def test_images_have_a_version() -> None:
    for folder, spec in pods():
        for container in containers(spec):
            name, _, tag = container["image"].rpartition(":")
            assert name, f"{folder}: {container['image']}"
            assert tag != "latest", folder
