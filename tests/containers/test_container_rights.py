"""The three capabilities: exactly these are held, each of them is needed, and what becomes of who
has none of them, or has them by a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pod import (
    BASE,
    IMAGE,
    RIGHTS,
    Built,
    Pod,
    Rights,
    explained,
    pod,
    send,
    status_of,
    until,
    watched,
)
from podman_lab import Container, Lab

# include/uapi/linux/capability.h
BITS = {"SYS_PTRACE": 19, "PERFMON": 38, "BPF": 39, "NET_RAW": 13}


def mask(*names: str) -> int:
    return sum(1 << BITS[name] for name in names)


def held(status: str) -> dict[str, int]:
    """The sets of capabilities in a status file of /proc, and whether more can be gained."""
    found = re.findall(r"^(Cap\w+|NoNewPrivs|Seccomp):\s+([0-9a-f]+)$", status, re.MULTILINE)
    return {name: int(value, 16) for name, value in found}


def exactly(*names: str) -> dict[str, int]:
    """What a process of uid 0 must have that was given these and no others."""
    these = mask(*names)
    return {
        "CapInh": 0, "CapPrm": these, "CapEff": these, "CapBnd": these, "CapAmb": 0,
        "NoNewPrivs": 1, "Seccomp": 2,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Beside:
    """A pod with an engine of uid 0, which has what a runtime gives by default: more than the
    sidecar has."""

    pod: Pod
    engine: Container


@pytest.fixture(scope="module")
def beside(lab: Lab, image: Built) -> Iterator[Beside]:
    with pod(lab) as made:
        engine = made.engine()
        send(engine, 1)
        yield Beside(made, engine)


def doctor(pod: Pod, rights: Rights, pid: int = 2, image: str = IMAGE) -> dict[str, dict[str, str]]:
    """The checks by name. The engine is the second process of the pod."""
    _, said = pod.run(rights, "doctor", "--pid", str(pid), "--json", image=image)
    return {check["name"]: check for check in json.loads(said)["checks"]}


@pytest.mark.ebpf
def test_the_sidecar_holds_exactly_three_and_works(beside: Beside) -> None:
    sidecar = beside.pod.sidecar(Rights())
    watch = watched(sidecar)
    assert held(Path(f"/proc/{sidecar.pid}/status").read_text()) == exactly(*RIGHTS)
    assert {each["name"]: each["state"] for each in watch["sources"]} == {
        "steps": "ok", "kernel": "ok", "proc": "ok", "stall": "ok", "nvml": "unavailable",
    }  # fmt: skip
    (request,) = send(beside.engine, 1)
    explained(sidecar, request)
    sidecar.remove()


def test_one_more_would_be_noticed(lab: Lab, image: Built) -> None:
    options = Rights(capabilities=(*RIGHTS, "NET_RAW")).options(lab)
    status = lab.podman("run", "--rm", *options, "--network=none", BASE, "cat", "/proc/self/status")
    assert held(status.stdout) == exactly(*RIGHTS, "NET_RAW")
    assert held(status.stdout) != exactly(*RIGHTS)


@pytest.mark.ebpf
@pytest.mark.parametrize("missing", ["BPF", "PERFMON"])
def test_without_one_of_two_the_kernel_is_not_seen_and_it_is_said(
    beside: Beside, missing: str
) -> None:
    rights = Rights(capabilities=[name for name in RIGHTS if name != missing])
    checks = doctor(beside.pod, rights)
    assert checks["capabilities"]["state"] == "fail"
    assert f"CAP_{missing} missing" in checks["capabilities"]["found"]
    assert checks["target's step ring"]["state"] == "ok"
    summary = attached(beside.pod, rights)
    kernel = next(each for each in summary["sources"] if each["name"] == "kernel")
    assert kernel["state"] == "unavailable"
    assert f"CAP_{missing}" in kernel["reason"]
    assert summary["uncounted_losses"] == 0


@pytest.mark.ebpf
def test_without_the_third_an_engine_with_more_rights_is_closed(beside: Beside) -> None:
    rights = Rights(capabilities=("BPF", "PERFMON"))
    checks = doctor(beside.pod, rights)
    assert checks["capabilities"]["state"] == "ok"
    assert checks["ptrace"]["state"] == "warn"
    assert checks["target's owner"]["state"] == "fail"
    code, said = beside.pod.run(rights, "attach", "2", "--duration", "1")
    assert code == 3
    assert "dsagent needs CAP_SYS_PTRACE" in said


def attached(pod: Pod, rights: Rights, image: str = IMAGE) -> dict[str, Any]:
    code, said = pod.run(rights, "attach", "2", "--duration", "1", "--json", image=image)
    assert code == 0, said
    return dict(json.loads(said[said.index("{") : said.rindex("}") + 1]))


# --- who is not root --------------------------------------------------------------------------


def test_the_unprivileged_tier_explains_an_engine_of_its_own_user(a_pod: Pod) -> None:
    """No capability at all: steps, processes and metrics, and nothing of the kernel."""
    engine = a_pod.engine("--user=1000:1000", "--cap-drop=ALL")
    sidecar = a_pod.sidecar(Rights(user="1000:1000", capabilities=()))
    watch = watched(sidecar)
    assert held(Path(f"/proc/{sidecar.pid}/status").read_text()) == exactly()
    states = {each["name"]: each["state"] for each in watch["sources"]}
    assert (states["steps"], states["proc"], states["kernel"]) == ("ok", "ok", "unavailable")
    requests = send(engine, 3)
    for request in requests:
        assert not explained(sidecar, request)["partial"]
    scraped = sidecar.exec("python3", "-c", SCRAPE).stdout
    assert re.search(r"^dsagent_requests_total\{[^}]*\} 3", scraped, re.MULTILINE), scraped[:2000]


SCRAPE = (
    "import urllib.request as r;"
    "print(r.urlopen('http://127.0.0.1:9464/metrics', timeout=30).read().decode())"
)


def test_another_users_engine_is_closed_to_it_and_it_waits_and_says_so(a_pod: Pod) -> None:
    engine = a_pod.engine("--user=1000:1000", "--cap-drop=ALL")
    send(engine, 1)
    sidecar = a_pod.sidecar(Rights(user="2000:2000", capabilities=()))

    def why() -> bool:
        reasons = status_of(sidecar).get("reasons", ())
        return any("CAP_SYS_PTRACE, or their own user" in reason for reason in reasons)

    until("the sidecar to say that it may not look", why, sidecar.logs)
    assert sidecar.state["Status"] == "running"


@pytest.mark.ebpf
@pytest.mark.parametrize("no_new_privileges", [False, True])
def test_capabilities_of_the_file_are_those_that_uid_0_has(
    a_pod: Pod, with_file_capabilities: str, no_new_privileges: bool
) -> None:
    """With no_new_privs too, where the runtime has them itself when it starts the program: then
    nothing is gained."""
    engine = a_pod.engine("--user=1000:1000", "--cap-drop=ALL")
    rights = Rights(user="10001:10001", no_new_privileges=no_new_privileges)
    sidecar = a_pod.sidecar(rights, with_file_capabilities)
    watch = watched(sidecar)
    now = held(Path(f"/proc/{sidecar.pid}/status").read_text())
    assert now == {**exactly(*RIGHTS), "NoNewPrivs": int(no_new_privileges)}
    assert {each["name"]: each["state"] for each in watch["sources"]}["kernel"] == "ok"
    (request,) = send(engine, 1)
    explained(sidecar, request)


def test_capabilities_of_the_file_are_void_where_they_would_be_gained(
    lab: Lab, with_file_capabilities: str
) -> None:
    """A shell of uid 10001 has none; no_new_privs keeps what it starts from having more."""
    rights = Rights(user="10001:10001", no_new_privileges=False)
    options = ["--rm", "--network=none", "--entrypoint=/bin/sh", *rights.options(lab)]
    script = "setpriv --no-new-privs dsagent doctor --json"
    done = lab.podman("run", *options, with_file_capabilities, "-c", script, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["capabilities"]["state"] == "fail"
    assert "no_new_privs" in checks["capabilities"]["fix"]


def test_a_file_that_wants_more_than_was_given_is_not_started(
    lab: Lab, with_file_capabilities: str
) -> None:
    rights = Rights(user="10001:10001", capabilities=("BPF", "PERFMON"), no_new_privileges=False)
    options = ["--rm", "--network=none", *rights.options(lab)]
    done = lab.podman("run", *options, with_file_capabilities, "doctor", check=False)
    assert done.returncode != 0
    assert "not permitted" in done.stderr
