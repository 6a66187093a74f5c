"""CPU time lost to others, to a quota, or given away: told apart, and agreeing with the kernel's
other books."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_lab import Child, Watch, last_cpu, measured, overlap_ns, require_kernel_source, within

from dsagent.agent.facts import Facts, Kind
from dsagent.agent.sources import kernel
from dsagent.agent.sources.bpf import layout

pytestmark = pytest.mark.ebpf

HOG = "say(ready=True)\nspin(60)"
SPIN = """
say(ready=True); hear()
start, cpu = now(), time.thread_time_ns()
spin(0.6)
say(start=start, end=now(), cpu=time.thread_time_ns() - cpu); hear()
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def _ns(facts: Facts, told: dict[str, Any]) -> int:
    """All nanoseconds in the told time: exact ones and sums that began in it."""
    sums = within(facts[facts["exact"] == 0], told["start"], 1 << 62)
    return overlap_ns(facts, told["start"], told["end"]) + int(sums["ns"].sum())


def test_a_hog_on_the_same_cpu_is_the_culprit() -> None:
    cpu = last_cpu()
    with Child(SPIN, cpu=cpu) as child, Child(HOG, cpu=cpu, name="hog-a-lot") as hog:
        child.hear()
        hog.hear()
        with Watch(child.pid) as watch:
            hog_ns = _cpu_time_ns(hog.pid)
            child.say()
            told = child.hear()
            hog_ns = _cpu_time_ns(hog.pid) - hog_ns
            watch.until(told["end"])
    waited_ns = told["end"] - told["start"] - told["cpu"]
    waits = watch.of(Kind.RUNQUEUE, tid=child.pid)
    # Two books of one event: the scheduler's run time, and the intervals between.
    assert _ns(waits, told) == pytest.approx(waited_ns, rel=0.1)
    long = waits[waits["exact"] == 1]
    to_hog = long[long["culprit_pid"] == hog.pid]
    assert to_hog["ns"].sum() > 0.5 * min(hog_ns, int(long["ns"].sum()))
    foreign = watch.of(Kind.FOREIGN)
    assert set(foreign["pid"].tolist()) == {child.pid}
    ran = foreign[foreign["culprit_pid"] == hog.pid]
    assert _ns(ran, told) == pytest.approx(hog_ns, rel=0.1, abs=20_000_000)
    assert watch.names[hog.pid] == "hog-a-lot"
    assert not (foreign["culprit_pid"] == child.pid).any()


def test_the_time_of_a_running_hog_is_told_before_it_ends() -> None:
    """A hog alone on a CPU is hardly ever switched out: it is told in pieces all the same."""
    with Child(HOG, cpu=last_cpu()) as hog, Child("say(ready=True); hear()") as child:
        hog.hear()
        child.hear()
        with Watch(child.pid) as watch:
            watch.until(time.monotonic_ns())
            ran_ns, start = _cpu_time_ns(hog.pid), time.monotonic_ns()
            watch.until(start + 400_000_000)
            ran_ns, end = _cpu_time_ns(hog.pid) - ran_ns, watch.complete_ns
    ran = watch.of(Kind.FOREIGN)
    ran = ran[ran["culprit_pid"] == hog.pid]
    assert re.fullmatch(r"python[0-9.]* -c", watch.names[hog.pid])  # not what it was told to run
    exact = sorted(ran[ran["exact"] == 1][["start_ns", "end_ns"]].tolist())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(exact))
    assert _ns(ran, {"start": start, "end": end}) == pytest.approx(ran_ns, rel=0.1, abs=20_000_000)


def _cpu_time_ns(pid: int) -> int:
    """What the scheduler has booked for a process so far: its CPU clock (clock_getcpuclockid)."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def test_a_thread_that_is_renamed_is_known_by_its_new_name() -> None:
    body = """
say(ready=True); hear()
libc.prctl(15, b"engine-loop", 0, 0, 0)
say(renamed=True); hear()
say(end=now()); hear()
"""

    def look(child: Child, watch: Watch) -> dict[str, Any]:
        child.hear()
        watch.poll()
        child.say()
        return {}

    watch, told = measured(body, during=look)
    assert watch.names[told["pid"]] == "engine-loop"


def test_cpus_that_the_target_may_not_use_do_not_matter() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    body = "say(ready=True, end=now()); hear()"
    with Child(HOG, cpu=cpus[-1]) as hog, Child(body, cpu=cpus[0]) as child:
        hog.hear()
        told = child.hear()
        with Watch(child.pid) as watch:
            watch.until(told["end"] + 100_000_000)
    foreign = watch.of(Kind.FOREIGN)
    assert not (foreign["culprit_pid"] == hog.pid).any()
    assert set(foreign["cpu"].tolist()) <= {cpus[0]}


def test_time_after_a_yield_is_not_run_queue_delay() -> None:
    body = """
say(ready=True); hear()
start, cpu = now(), time.thread_time_ns()
while now() - start < 400_000_000:
    libc.sched_yield()
say(start=start, end=now(), cpu=time.thread_time_ns() - cpu); hear()
"""
    cpu = last_cpu()
    with Child(body, cpu=cpu) as child, Child(HOG, cpu=cpu) as hog:
        child.hear()
        hog.hear()
        with Watch(child.pid) as watch:
            child.say()
            told = child.hear()
            watch.until(told["end"])
    off_ns = told["end"] - told["start"] - told["cpu"]
    assert off_ns > 100_000_000
    # What little there is: a tick that found it between two yields.
    assert _ns(watch.of(Kind.RUNQUEUE, tid=child.pid), told) < 0.2 * off_ns


@pytest.fixture
def quota() -> Iterator[Path]:
    """A cgroup that may use a fifth of a CPU."""
    controller = Path("/sys/fs/cgroup/cpu")
    if not (controller / "cpu.cfs_quota_us").exists():
        pytest.skip("no cgroup v1 cpu controller")
    group = controller / f"dsagent-test-{os.getpid()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("50000")
    (group / "cpu.cfs_quota_us").write_text("10000")
    (group / "cpu.shares").write_text("100000")  # nobody else delays what has quota left
    yield group
    group.rmdir()


@pytest.mark.parametrize("per_task", [True, False], ids=["this kernel", "older kernels"])
def test_throttling_agrees_with_cpu_stat(
    quota: Path, per_task: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer kernels mark the task, older ones its run queue; both are read here."""
    monkeypatch.setattr(
        kernel,
        "constants",
        lambda **given: layout.constants(**given | {"per_task_throttle": per_task}),
    )
    with Child(SPIN, cpu=last_cpu()) as child:
        child.hear()
        (quota / "cgroup.procs").write_text(str(child.pid))
        with Watch(child.pid) as watch:
            before_ns = _throttled_ns(quota)
            child.say()
            told = child.hear()
            stat_ns = _throttled_ns(quota) - before_ns
            watch.until(told["end"])
    throttled = watch.of(Kind.THROTTLED, tid=child.pid)
    throttled_ns = _ns(throttled, told)
    assert stat_ns > 200_000_000
    # Ours ends when it runs again, cpu.stat's when it may.
    assert 0.9 * stat_ns < throttled_ns < 1.3 * stat_ns
    # Nothing of it is told a second time as waiting for the CPU.
    waited = watch.of(Kind.RUNQUEUE, tid=child.pid)
    exact = throttled[throttled["exact"] == 1]
    for start_ns, end_ns in exact[["start_ns", "end_ns"]].tolist():
        assert overlap_ns(waited, start_ns, end_ns) == 0


def _throttled_ns(group: Path) -> int:
    fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    return int(fields["throttled_time"])
