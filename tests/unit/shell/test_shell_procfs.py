"""Frozen and hostile /proc files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import ProcessGone

STAT = (
    b"4242 (a) R) (x\n) S 17 4242 4242 0 -1 4194560 7919 0 23 0 331 47 0 0 20 0 9 0 "
    b"123456 2936012800 170211 18446744073709551615 1 1 0 0 0 0 0 16781312 16386 0 0 0 17 1\n"
)


def test_stat_with_a_hostile_name() -> None:
    stat = procfs.parse_stat(STAT)
    assert (stat.pid, stat.ppid, stat.state) == (4242, 17, "S")
    assert stat.comm == "a) R) (x\\n"
    assert (stat.minor_faults, stat.major_faults) == (7919, 23)
    assert stat.user_ns == 331 * procfs.CLOCK_TICK_NS
    assert stat.system_ns == 47 * procfs.CLOCK_TICK_NS
    assert (stat.threads, stat.start_ticks) == (9, 123456)
    assert stat.rss_bytes == 170211 * procfs.PAGE_BYTES


def test_a_truncated_stat_is_a_process_gone() -> None:
    with pytest.raises(ProcessGone):
        procfs.parse_stat(STAT[:40])


def test_escape_is_safe_on_a_terminal() -> None:
    assert procfs.escape("plain ünï ✓") == "plain ünï ✓"
    assert procfs.escape("\x1b[31mred\x00\r\n\u202e") == "\\x1b[31mred\\x00\\r\\n\\u202e"
    assert len(procfs.escape("x" * 1000)) == 256


def test_files_are_read_up_to_a_bound() -> None:
    assert len(procfs.read_bytes(Path("/dev/zero"))) == procfs.MAX_FILE_BYTES


def test_tree() -> None:
    parent_of = {1: 0, 10: 1, 11: 10, 12: 10, 13: 11, 99: 1}
    assert procfs.descendants(10, parent_of) == (11, 12, 13)
    assert procfs.ancestors(13, parent_of) == (11, 10, 1)
    assert procfs.ancestors(5, {5: 6, 6: 5}) == (6, 5)  # never ends in a circle


def test_process_tree_reads_only_what_is_new(tmp_path: Path) -> None:
    def put(pid: int, ppid: int) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        text = STAT.replace(b"4242 (", b"%d (" % pid).replace(b"S 17", b"S %d" % ppid)
        (tmp_path / str(pid) / "stat").write_bytes(text)

    tree = procfs.ProcessTree(tmp_path)
    put(10, 1)
    put(11, 10)
    assert tree.parents() == {10: 1, 11: 10}
    put(12, 11)
    (tmp_path / "11" / "stat").unlink()  # known already: not read again
    assert tree.parents() == {10: 1, 11: 10, 12: 11}
    (tmp_path / "11").rmdir()
    assert tree.parents() == {10: 1, 12: 11}


def test_container_id(tmp_path: Path) -> None:
    digits = "0123456789abcdef" * 4
    for path, found in (
        (f"0::/system.slice/docker-{digits}.scope", digits),
        (f"4:memory:/kubepods/burstable/pod12/{digits}", digits),
        ("0::/user.slice/session-1.scope", None),
        (f"0::/{digits}ff", None),
    ):
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / "cgroup").write_text(f"1:cpu:/\n{path}\n")
        assert procfs.container_id(7, tmp_path) == found
    assert procfs.container_id(8, tmp_path) is None


def test_own_memory_and_switches() -> None:
    pid = os.getpid()
    pss_bytes = procfs.pss_bytes(pid)
    assert pss_bytes is not None
    assert 1 << 20 < pss_bytes <= procfs.read_stat(pid).rss_bytes * 2
    voluntary, involuntary = procfs.context_switches(pid, pid)
    assert voluntary + involuntary > 0
    assert pid in procfs.threads(pid)
    assert procfs.pss_bytes(1 << 30) is None
    assert procfs.threads(1 << 30) == ()


def test_what_may_not_be_seen_is_no_process_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hidepid=1: the folders of others are there, their files are not for us."""

    def read_stat(pid: int, proc: Path) -> procfs.ProcessStat:
        if pid == 11:
            raise PermissionError
        return procfs.parse_stat(STAT)

    for pid in (10, 11):
        (tmp_path / str(pid)).mkdir()
    monkeypatch.setattr(procfs, "read_stat", read_stat)
    assert procfs.parents(tmp_path) == {10: 17}
    tree = procfs.ProcessTree(tmp_path)
    assert tree.parents() == tree.parents() == {10: 17}


def test_own_memory_has_the_helpers_and_not_what_was_started_for_others() -> None:
    def started(**options: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "x = bytearray(400 << 20); print(flush=True); input()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    alone = procfs.own_pss_bytes()
    assert alone is not None
    children = [started(process_group=0)]
    with_engine = procfs.own_pss_bytes()
    children.append(started())
    with_helper = procfs.own_pss_bytes()
    for child in children:
        child.communicate(b"\n", timeout=60)
    assert with_engine is not None
    assert with_helper is not None
    # Far apart: our own proportional share moves by some 10 MB as others with our libraries end.
    assert with_engine < alone + (200 << 20)
    assert with_helper > alone + (200 << 20)


def test_command_lines() -> None:
    assert "pytest" in " ".join(procfs.command_line(os.getpid()))
    assert procfs.command_line(1 << 30) == ()


def test_pids_that_go_round_in_a_circle_end_nowhere_else() -> None:
    """A pid may be given to a grandchild of the process that had it, while they are read."""
    parent_of = {10: 12, 11: 10, 12: 11, 13: 12, 14: 14}
    assert procfs.descendants(10, parent_of) == (11, 12, 13)
    assert procfs.descendants(14, parent_of) == ()
    assert procfs.ancestors(10, parent_of) == (12, 11, 10)


def test_a_long_line_of_processes_is_followed_in_linear_time() -> None:
    """A million and more steps for one of them would be seconds for each look at all of them."""
    length = 100_000
    parent_of = {pid: pid - 1 for pid in range(2, length + 1)}
    assert len(procfs.ancestors(length, parent_of)) == length - 1
    assert len(procfs.descendants(1, parent_of)) == length - 1
    assert procfs.below(1, procfs.children(parent_of), 3) == (2, 3, 4)
