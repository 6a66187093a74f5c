"""The checks against frozen machines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dsagent.agent.checks import doctor
from dsagent.agent.checks.doctor import Check, Places, run_checks
from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.host.privileges import BPF_OBJECT
from dsagent.agent.sources.kernel import check as check_kernel_source

ALL_CAPABILITIES = "000001ffffffffff"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A machine where all is well, but for a GPU."""
    files = {
        "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "proc/self/status": f"Name:\tx\nCapEff:\t{ALL_CAPABILITIES}\nCapBnd:\t0\n",
        "proc/self/ns/pid": "",
        "sys/kernel/btf/vmlinux": "",
        "sys/kernel/security/lockdown": "[none] integrity confidentiality\n",
        "sched.bpf.o": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Places(
        proc=tmp_path / "proc",
        sys=tmp_path / "sys",
        dev=tmp_path / "dev",
        bpf_object=tmp_path / "sched.bpf.o",
        can_load=lambda library: library == "libbpf.so.1",
    )


def _by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_a_good_machine_has_no_findings(places: Places) -> None:
    checks = _by_name(run_checks(None, places))
    assert {check.state for check in checks.values()} <= {"ok", "warn", "not_applicable"}
    assert checks["NVML"].state == "not_applicable"
    # A frozen /proc/self/ns/pid has an inode like a container's.
    assert checks["pid namespace"].state == "warn"


@pytest.mark.parametrize("release", ["5.14.0-427.el9", "4.18.0", "weird"])
def test_an_old_kernel_fails(places: Places, release: str) -> None:
    (places.proc / "sys/kernel/osrelease").write_text(release)
    check = doctor.kernel(places)
    assert check.state == "fail"
    assert "5.15" in check.fix


@pytest.mark.parametrize("release", ["5.15.0-122-generic", "6.1.0", "7.0-rc1"])
def test_a_new_enough_kernel_is_ok(places: Places, release: str) -> None:
    (places.proc / "sys/kernel/osrelease").write_text(release)
    assert doctor.kernel(places).state == "ok"


def test_without_type_information_it_fails(places: Places) -> None:
    (places.sys / "kernel/btf/vmlinux").unlink()
    assert doctor.type_information(places).state == "fail"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("none [integrity] confidentiality", "ok"),
        ("none integrity [confidentiality]", "fail"),
        ("garbage", "not_applicable"),
    ],
)
def test_lockdown(places: Places, text: str, state: str) -> None:
    (places.sys / "kernel/security/lockdown").write_text(text)
    assert doctor.lockdown(places).state == state


@pytest.mark.parametrize(
    ("effective", "state", "missing"),
    [
        ("0000000000000000", "fail", "CAP_BPF and CAP_PERFMON"),
        (f"{1 << 39:016x}", "fail", "CAP_PERFMON"),
        (f"{1 << 39 | 1 << 38:016x}", "ok", ""),
        (f"{1 << 21:016x}", "ok", ""),  # CAP_SYS_ADMIN stands for both
    ],
)
def test_capabilities(places: Places, effective: str, state: str, missing: str) -> None:
    (places.proc / "self/status").write_text(f"Name:\tx\nCapEff:\t{effective}\n")
    check = doctor.capabilities(places)
    assert check.state == state
    assert missing in check.found


@pytest.mark.parametrize(
    ("uid", "bounding", "privs", "fix"),
    [
        ("0", "0000000000000000", "1", "run as root or grant them"),
        ("0", "000000c000080000", "1", "run as root or grant them"),  # it has let go of them
        ("1000", "0000000000000000", "1", "run as root or grant them"),
        ("1000", "000000c000080000", "0", "to the program's file"),
        ("1000", "000000c000080000", "1", "no_new_privs"),
    ],
)
def test_who_is_not_root_is_told_where_its_containers_capabilities_went(
    places: Places, uid: str, bounding: str, privs: str, fix: str
) -> None:
    (places.proc / "self/status").write_text(
        f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t0000000000000000\nCapBnd:\t{bounding}\n"
        f"NoNewPrivs:\t{privs}\n"
    )
    assert fix in _by_name(run_checks(places=places))["capabilities"].fix


def test_a_process_without_capabilities_may_only_see_its_own_users(places: Places) -> None:
    (places.proc / "self/status").write_text("CapEff:\t0000000000000000\n")
    assert doctor.ptrace_permission(places).state == "warn"


def test_ptrace_switched_off_costs_the_stacks(places: Places) -> None:
    scope = places.proc / "sys/kernel/yama/ptrace_scope"
    scope.parent.mkdir()
    scope.write_text("3\n")
    assert doctor.ptrace_permission(places).state == "warn"
    scope.write_text("1\n")
    assert doctor.ptrace_permission(places).state == "ok"


def test_a_driver_without_its_library(places: Places) -> None:
    places.dev.mkdir()
    (places.dev / "nvidiactl").write_text("")
    assert doctor.nvml(places).state == "warn"
    assert doctor.nvml(replace(places, can_load=lambda _: True)).state == "ok"


def test_each_failure_stops_the_kernel_source_with_one_line(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.bpf_object.unlink()
    with pytest.raises(SourceUnavailable, match=r"not built.*make bpf") as caught:
        check_kernel_source(places.bpf_object)
    assert "\n" not in str(caught.value)


def test_a_target_that_is_gone(places: Places) -> None:
    (found,) = doctor.target_checks(4242, places)
    assert found.state == "fail"


def test_a_real_process_without_a_ring() -> None:
    checks = _by_name(doctor.target_checks(os.getpid(), Places()))
    assert checks["target"].state == "ok"
    assert checks["target's owner"].state == "ok"
    assert checks["target's clock"].state == "ok"
    assert checks["target's step ring"].state in ("warn", "ok", "fail")


def test_every_finding_says_what_to_do(places: Places) -> None:
    (places.sys / "kernel/btf/vmlinux").unlink()
    places.bpf_object.unlink()
    bare = replace(places, can_load=lambda _: False)
    findings = [check for check in run_checks(None, bare) if check.state in ("warn", "fail")]
    assert len(findings) >= 3
    for check in findings:
        assert check.consequence
        assert check.fix
        assert set(check.to_json()) == {"name", "state", "found", "consequence", "fix"}


def test_the_objects_are_looked_for_where_they_are_built() -> None:
    """A machine without them skips what needs them: nobody would see that nobody can find them."""
    assert BPF_OBJECT.with_suffix(".c").is_file()
