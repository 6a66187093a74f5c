"""Which process a pid leads to, over a made-up /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError
from dsagent.agent.host import privileges, procfs
from dsagent.agent.host import target as targets
from dsagent.agent.host.privileges import Capability
from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.host.target import NotAnEngine, Rings, check_alive, is_starting, resolve

# launcher 10 ── shell 11 ── api 20 ── worker 21
#                               └───── helper 22
#             └─ other 30
PARENTS = {1: 0, 10: 1, 11: 10, 20: 11, 21: 20, 22: 20, 30: 10, 40: 1}


def put(
    proc: Path, pid: int, ppid: int, *, ticks: int = 500, state: str = "S", comm: str = ""
) -> None:
    folder = proc / str(pid)
    (folder / "fdinfo").mkdir(parents=True, exist_ok=True)
    (folder / "ns").mkdir(exist_ok=True)
    namespace = folder / "ns" / "pid"
    if not namespace.is_symlink():
        (proc / "pidns").touch()
        namespace.symlink_to(proc / "pidns")
    fields = f"{state} {ppid} " + "0 " * 17 + f"{ticks} 0 0 0\n"
    (folder / "stat").write_text(f"{pid} ({comm or f'p{pid}'}) {fields}")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for pid, ppid in PARENTS.items():
        put(tmp_path, pid, ppid)
    return tmp_path


def rings(**engines: int) -> Callable[[int], Rings]:
    """p20=1: process 20 holds a ring of engine 1."""

    def of(pid: int) -> Rings:
        engine_id = engines.get(f"p{pid}")
        return Rings() if engine_id is None else Rings(frozenset({engine_id}))

    return of


@pytest.mark.parametrize("pid", [10, 11, 20, 21, 22])
def test_any_process_of_the_server_leads_to_its_highest(proc: Path, pid: int) -> None:
    target = resolve(pid, proc=proc, rings_of=rings(p20=1, p21=1))
    assert target.pid == 20
    assert target.children == (21, 22)
    assert (target.comm, target.start_ticks) == ("p20", 500)


def test_a_gap_between_two_processes_of_an_engine_is_bridged(proc: Path) -> None:
    assert resolve(20, proc=proc, rings_of=rings(p10=1, p20=1)).pid == 10


def test_an_ancestor_of_another_engine_is_not_taken(proc: Path) -> None:
    assert resolve(20, proc=proc, rings_of=rings(p10=2, p20=1)).pid == 20


# vllm 100 ─┬─ VLLM::APIServer 110, 111   launcher 99 of it
#           └─ VLLM::EngineCor 120 ── VLLM::Worker 130
VLLM_SERVER = ((99, 1, ""), (100, 99, "vllm"), (110, 100, "VLLM::APIServer"),
               (111, 100, "VLLM::APIServer"), (120, 100, "VLLM::EngineCor"),
               (130, 120, "VLLM::Worker"))  # fmt: skip


def vllm_rings(**engines: int) -> Callable[[int], Rings]:
    def of(pid: int) -> Rings:
        engine_id = engines.get(f"p{pid}")
        return Rings() if engine_id is None else Rings(frozenset({engine_id}), vllm=True)

    return of


@pytest.mark.parametrize("pid", [99, 100, 110, 111, 120, 130])
def test_a_vllm_server_is_one_target(proc: Path, pid: int) -> None:
    for its_pid, ppid, comm in VLLM_SERVER:
        put(proc, its_pid, ppid, comm=comm)
    of = vllm_rings(p110=1, p111=2, p120=3, p130=3)
    target = resolve(pid, proc=proc, rings_of=of)
    assert (target.pid, target.engine, target.service_name) == (100, "vllm", "vllm")
    assert target.children == (110, 111, 120, 130)


@pytest.mark.parametrize("pid", [10, 20, 21, 22])
def test_a_vllm_that_names_nothing_is_one_by_its_rings(proc: Path, pid: int) -> None:
    assert resolve(pid, proc=proc, rings_of=vllm_rings(p20=1, p21=2)).pid == 20


def test_a_launcher_of_two_vllm_servers_must_be_narrowed_down(proc: Path) -> None:
    with pytest.raises(DsagentError, match=r"several engines; give one of: 20, 30"):
        resolve(10, proc=proc, rings_of=vllm_rings(p20=1, p21=2, p30=3))


def test_a_launcher_of_several_engines_must_be_narrowed_down(proc: Path) -> None:
    with pytest.raises(DsagentError, match=r"several engines; give one of: 20, 30") as raised:
        resolve(10, proc=proc, rings_of=rings(p20=1, p30=2))
    assert raised.value.exit_code == CANNOT_ATTACH


def test_a_thread_leads_to_its_process(proc: Path) -> None:
    put(proc, 2101, 20)
    (proc / "2101" / "status").write_text("Name:\tworker\nTgid:\t21\nPid:\t2101\n")
    assert resolve(2101, proc=proc, rings_of=rings(p20=1, p21=1)).pid == 20


@pytest.mark.parametrize(
    ("uid", "owner", "capable", "message"),
    [
        (1000, 0, False, "process 20, which belongs to root; run dsagent as root"),
        (1000, 4711, False, "belongs to user 4711; run dsagent as root or as user 4711"),
        (1000, 1000, False, "; run dsagent as root"),
        (0, 0, False, "belongs to root; dsagent needs CAP_SYS_PTRACE for that"),
        (0, 4711, True, "although CAP_SYS_PTRACE is in effect: it is outside the reach"),
        (1000, 0, True, "although CAP_SYS_PTRACE is in effect: it is outside the reach"),
    ],
)
def test_what_would_help_is_said(
    proc: Path, monkeypatch: pytest.MonkeyPatch, uid: int, owner: int, capable: bool, message: str
) -> None:
    def forbidden(_path: object) -> list[str]:
        raise PermissionError

    held = frozenset({Capability.CAP_SYS_PTRACE} if capable else ())
    monkeypatch.setattr(privileges, "effective_capabilities", lambda: held)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(os, "listdir", forbidden)
    monkeypatch.setattr(os, "stat", lambda _path: SimpleNamespace(st_uid=owner))
    with pytest.raises(DsagentError) as raised:
        targets._check_permitted(20, proc)
    monkeypatch.undo()
    assert str(raised.value).endswith(message) or capable
    assert message in str(raised.value)
    assert raised.value.exit_code == CANNOT_ATTACH


def test_errors_say_which_and_end_with_3(proc: Path) -> None:
    put(proc, 50, 1, state="Z")
    cases: list[tuple[int, Callable[[int], Rings], str]] = [
        (999, rings(), "there is no process 999"),
        (50, rings(), "a zombie"),
        (40, rings(p20=1), "is not an engine"),
        (40, lambda _: Rings(refused=("it has version 9",)), "refused: it has version 9"),
        (os.getpid(), rings(), "dsagent itself"),
    ]
    put(proc, os.getpid(), 1)
    for pid, of, message in cases:
        with pytest.raises(DsagentError, match=message) as raised:
            resolve(pid, proc=proc, rings_of=of)
        assert raised.value.exit_code == CANNOT_ATTACH


def test_processes_that_go_or_are_not_ours_have_no_rings(proc: Path) -> None:
    def of(pid: int) -> Rings:
        if pid == 21:
            raise ProcessGone("21")
        if pid == 22:
            raise PermissionError
        return rings(p20=1)(pid)

    assert resolve(11, proc=proc, rings_of=of).pid == 20


def test_it_dies_while_attaching(proc: Path) -> None:
    def of(pid: int) -> Rings:
        (proc / "20" / "stat").unlink(missing_ok=True)
        return rings(p20=1)(pid)

    with pytest.raises(DsagentError, match="there is no process 20"):
        resolve(20, proc=proc, rings_of=of)


def test_its_pid_is_reused_while_attaching(proc: Path) -> None:
    def of(pid: int) -> Rings:
        put(proc, 11, 10, ticks=501)
        return rings(p20=1)(pid)

    with pytest.raises(DsagentError, match="its pid was reused"):
        resolve(11, proc=proc, rings_of=of)


def test_alive_means_the_same_process(proc: Path) -> None:
    target = resolve(20, proc=proc, rings_of=rings(p20=1))
    check_alive(target, proc)
    put(proc, 20, 11, ticks=777)
    with pytest.raises(DsagentError, match="reused"):
        check_alive(target, proc)
    put(proc, 20, 11, state="Z")
    with pytest.raises(DsagentError, match="ended"):
        check_alive(target, proc)


def test_a_shifted_monotonic_clock_is_refused(proc: Path) -> None:
    (proc / "self").mkdir()
    (proc / "self" / "timens_offsets").write_text("monotonic 0 0\nboottime 0 0\n")
    offsets = proc / "20" / "timens_offsets"
    offsets.write_text("monotonic           0         0\nboottime            0         0\n")
    assert resolve(20, proc=proc, rings_of=rings(p20=1)).pid == 20
    offsets.write_text("monotonic       86400         0\nboottime            0         0\n")
    with pytest.raises(DsagentError, match="time namespace"):
        resolve(20, proc=proc, rings_of=rings(p20=1))


REFERENCE = b"python\0-m\0dsagent.instrumentation.reference\0--port\0000\0"


@pytest.mark.parametrize(
    ("command", "age_s", "state", "starting"),
    [
        (REFERENCE, 5, "S", True),
        (b"/x/bin/python\0/x/bin/dsagent\0serve\0--model\0m\0", 5, "R", True),
        (REFERENCE, 90, "S", False),  # old enough to have had its rings
        (REFERENCE, 5, "Z", False),
        (b"sleep\0600\0", 5, "S", False),
        (b"dsagent\0attach\0serve\0", 5, "S", False),
        (b"", 5, "S", False),
    ],
)
def test_an_engine_that_starts_is_known_by_its_command_and_its_age(
    proc: Path, command: bytes, age_s: float, state: str, starting: bool
) -> None:
    now_ticks = round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e9 / procfs.CLOCK_TICK_NS)
    ticks = now_ticks - round(age_s * 1e9 / procfs.CLOCK_TICK_NS)
    put(proc, 21, 20, ticks=ticks, state=state)
    (proc / "21" / "cmdline").write_bytes(command)
    assert is_starting(20, proc) is starting  # a process below the one asked for counts


def test_waiting_ends_with_the_engine_and_is_said_once(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    seen = iter([True, True, False])
    monkeypatch.setattr(targets, "is_starting", lambda _pid, _proc: next(seen))
    monkeypatch.setattr(targets, "START_TICK_S", 0.0)
    with pytest.raises(NotAnEngine, match="is not an engine"):
        targets.resolve_starting(40, said.append, proc)
    assert said == ["waiting for process 40 to become an engine"]
