"""Limits of memory read from made cgroups, and what is given up when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsagent.agent.host.procfs import PAGE_BYTES
from dsagent.agent.sidecar.memory import CALM_NS, Pressure, Tidier, Usage, usage


class Machine:
    def __init__(self, base: Path) -> None:
        self.proc, self.cgroups = base / "proc", base / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.resident(1000)

    def resident(self, pages: int) -> None:
        (self.proc / "self" / "statm").write_text(f"9999 {pages} 10 0 0 0 0\n")

    def version_1(self, within: str, limit: int, used: int, inactive: int = 0) -> None:
        (self.proc / "self" / "cgroup").write_text(f"3:cpu:/x\n2:memory:{within}\n0::/\n")
        folder = self.cgroups / "memory" / within.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        stat = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
        (folder / "memory.stat").write_text(stat)
        (folder / "cgroup.procs").write_text("1\n2\n")

    def version_2(self, within: str, limit: str, used: int, inactive: int = 0) -> None:
        (self.proc / "self" / "cgroup").write_text(f"0::{within}\n")
        folder = self.cgroups / within.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
        (folder / "cgroup.procs").write_text("1\n2\n")

    def usage(self, max_bytes: int | None = None, *, ours: bool = True) -> Usage | None:
        return usage(max_bytes, proc=self.proc, cgroups=self.cgroups, is_ours=lambda _pids: ours)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_version_2_as_a_container_sees_it(machine: Machine) -> None:
    machine.version_2("/", "1000", 700, inactive=100)
    assert machine.usage() == Usage(600, 1000, "cgroup")


def test_version_2_below_the_root(machine: Machine) -> None:
    machine.version_2("/kubepods/pod1/c1", "1000", 700)
    assert machine.usage() == Usage(700, 1000, "cgroup")


def test_version_1(machine: Machine) -> None:
    machine.version_1("/docker/abc", 1000, 700, inactive=300)
    assert machine.usage() == Usage(400, 1000, "cgroup")


def test_version_1_in_a_container_whose_path_is_the_hosts(machine: Machine) -> None:
    machine.version_1("/", 1000, 700)
    (machine.proc / "self" / "cgroup").write_text("2:memory:/docker/of-the-host\n")
    assert machine.usage() == Usage(700, 1000, "cgroup")


def test_no_limit_is_none(machine: Machine) -> None:
    assert machine.usage() is None
    machine.version_2("/", "max", 700)
    assert machine.usage() is None
    machine.version_1("/x", 9223372036854771712, 700)
    assert machine.usage() is None


def test_the_limit_of_others_too_is_left_alone(machine: Machine) -> None:
    machine.version_2("/", "1000", 700)
    assert machine.usage(ours=False) is None


def test_a_path_that_climbs_out_is_not_followed(machine: Machine) -> None:
    machine.version_2("/", "1000", 700)
    (machine.proc / "self" / "cgroup").write_text("0::/../../other\n")
    assert machine.usage() == Usage(700, 1000, "cgroup")


def test_the_nearer_limit_counts(machine: Machine) -> None:
    machine.version_2("/", "1000", 700)
    machine.resident(50)
    assert machine.usage(PAGE_BYTES * 100) == Usage(700, 1000, "cgroup")
    machine.resident(90)
    assert machine.usage(PAGE_BYTES * 100) == Usage(
        90 * PAGE_BYTES, 100 * PAGE_BYTES, "--max-memory"
    )


@pytest.mark.parametrize("text", ["", "-5", "abc", "1 2", "9" * 400])
def test_nonsense_is_no_limit(machine: Machine, text: str) -> None:
    machine.version_2("/", text, 700)
    assert machine.usage() is None


def test_pressure_rises_at_once_and_falls_slowly() -> None:
    pressure = Pressure()
    assert not pressure.judge(0.74, 0)
    assert pressure.judge(0.93, 0)
    assert (pressure.level, pressure.relief.kernel) == (3, False)
    assert not pressure.judge(0.85, 1)  # not far enough below
    assert not pressure.judge(0.5, 2)
    assert not pressure.judge(0.5, 1 + CALM_NS)
    assert pressure.judge(0.5, 2 + CALM_NS)
    assert (pressure.level, pressure.relief.kernel) == (2, True)
    assert not pressure.judge(0.5, 3 + CALM_NS)
    assert not pressure.judge(0.80, 4 + CALM_NS)  # no calm minute: it begins anew
    assert not pressure.judge(0.5, 5 + CALM_NS)
    assert not pressure.judge(0.5, 4 + 2 * CALM_NS)
    assert pressure.judge(0.5, 5 + 2 * CALM_NS)
    assert pressure.level == 1


def test_more_is_given_up_at_each_level() -> None:
    pressure = Pressure()
    kept = []
    for ratio in (0.0, 0.76, 0.86, 0.99):
        pressure.judge(ratio, 0)
        kept.append(pressure.relief.ledger_bytes)
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


LARGE = """
import ctypes, os, sys
from dsagent.agent.sidecar.memory import give_back, take_little

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "little":
    take_little()
libc.free(libc.malloc(20 << 20))  # after this glibc thinks of 1 MiB as small
before = libc.mallinfo2().hblks
libc.malloc(1 << 20)
mapped = libc.mallinfo2().hblks - before
give_back()
print(mapped)
"""


def test_what_is_large_is_mapped_however_large_the_last_one_was() -> None:
    """So that it goes back to the kernel when it is freed, whatever lies beside it."""

    def mapped(how: str) -> str:
        command = [sys.executable, "-c", LARGE, how]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    if mapped("as it comes") != "0\n":
        pytest.skip("this C library does so by itself")
    assert mapped("little") == "1\n"


def test_after_each_coming_and_going_memory_is_given_back_once_it_is_quiet() -> None:
    given: list[str] = []
    tidier = Tidier(lambda: given.append("back"))
    tidier.look(0, is_quiet=True)
    assert given == []
    tidier.look(1, is_quiet=False)
    tidier.look(2, is_quiet=False)
    assert given == []
    tidier.look(2, is_quiet=True)
    tidier.look(2, is_quiet=True)
    assert given == ["back"]
    tidier.look(3, is_quiet=True)
    assert given == ["back", "back"]
