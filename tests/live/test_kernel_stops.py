"""Stops: seen while they last, whole afterwards, each nanosecond once."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_lab import Child, Watch, overlap_ns, require_kernel_source

from dsagent.agent.facts import Facts, Kind

pytestmark = pytest.mark.ebpf

BUSY = """
tids = [threading.get_native_id()]
def work():
    tids.append(threading.get_native_id())
    while True:
        nap(1000)
threading.Thread(target=work, daemon=True).start()
while len(tids) < 2:
    nap(100)
say(tids=tids)
hear()
say(end=now()); hear()
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def _one_stop(facts: Facts) -> tuple[int, int]:
    """Start and end of pieces that must follow one another without gap or overlap."""
    pieces = sorted(facts[["start_ns", "end_ns", "ns", "exact"]].tolist())
    assert pieces
    for start_ns, end_ns, ns, exact in pieces:
        assert exact == 1
        assert ns == end_ns - start_ns
    for earlier, later in itertools.pairwise(pieces):
        assert earlier[1] == later[0]
    return pieces[0][0], pieces[-1][1]


def test_a_stop_of_300_ms_is_told_while_it_lasts_and_is_whole_at_its_end() -> None:
    with Child(BUSY) as child:
        tids = child.hear()["tids"]
        with Watch(child.pid) as watch:
            before = time.monotonic_ns()
            os.kill(child.pid, signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            stopped = time.monotonic_ns()
            watch.until(stopped + 150_000_000)
            seen_early = watch.of(Kind.STOPPED, tid=child.pid).copy()
            time.sleep(0.15)
            resuming = time.monotonic_ns()
            os.kill(child.pid, signal.SIGCONT)
            child.say()
            resumed = child.hear()["end"]
            watch.until(resumed)
    assert overlap_ns(seen_early, stopped, resuming) >= 90_000_000
    for tid in tids:
        start, end = _one_stop(watch.of(Kind.STOPPED, tid=tid))
        # The stop began between our signal and its report, and ended between our second signal
        # and the child's first words: two clocks, one event.
        assert before <= start
        assert tid != child.pid or start <= stopped
        assert resuming <= end <= resumed


def test_a_stop_that_had_begun_before_we_came_counts_from_then_on() -> None:
    with Child(BUSY) as child:
        child.hear()
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        before = time.monotonic_ns()
        with Watch(child.pid) as watch:
            attached = time.monotonic_ns()
            watch.until(attached + 120_000_000)
            resuming = time.monotonic_ns()
            os.kill(child.pid, signal.SIGCONT)
            child.say()
            resumed = child.hear()["end"]
            watch.until(resumed)
    start, end = _one_stop(watch.of(Kind.STOPPED, tid=child.pid))
    assert before <= start <= attached
    assert resuming <= end <= resumed


@pytest.fixture
def freezer() -> Iterator[Path]:
    controller = Path("/sys/fs/cgroup/freezer")
    if not (controller / "cgroup.procs").exists():
        pytest.skip("no cgroup v1 freezer")
    group = controller / f"dsagent-test-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "freezer.state").write_text("THAWED")
    for pid in (group / "cgroup.procs").read_text().split():
        (controller / "cgroup.procs").write_text(pid)
    group.rmdir()


def test_a_frozen_cgroup_is_a_stop(freezer: Path) -> None:
    body = "say(ready=True)\nwhile not os.path.exists('/proc/1/nothing'):\n    pass"
    with Child(body) as child:
        child.hear()
        (freezer / "cgroup.procs").write_text(str(child.pid))
        with Watch(child.pid) as watch:
            before = time.monotonic_ns()
            (freezer / "freezer.state").write_text("FROZEN")
            while (freezer / "freezer.state").read_text().strip() != "FROZEN":
                pass
            frozen = time.monotonic_ns()
            watch.until(frozen + 100_000_000)
            thawing = time.monotonic_ns()
            (freezer / "freezer.state").write_text("THAWED")
            watch.until(thawing + 50_000_000)
    start, end = _one_stop(watch.of(Kind.STOPPED, tid=child.pid))
    assert before <= start <= frozen
    assert thawing <= end


def test_long_waits_are_told_in_pieces_too() -> None:
    with Child("say(ready=True); hear()\nnap(400_000)\nsay(end=now()); hear()") as child:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            end = child.hear()["end"]
            watch.until(end)
            before_end = watch.of(Kind.OFF_OTHER, tid=child.pid, least_ns=1_000_000)
    assert len(before_end) == 1  # nobody looked while it lasted

    with Child("say(ready=True); hear()\nnap(400_000)\nsay(end=now()); hear()") as child:
        child.hear()
        with Watch(child.pid) as watch:
            child.say()
            watch.until(time.monotonic_ns() + 250_000_000)
            early = watch.of(Kind.OFF_OTHER, tid=child.pid, least_ns=50_000_000)
            assert len(early) >= 1
            watch.until(child.hear()["end"])
    start, end = _one_stop(watch.of(Kind.OFF_OTHER, tid=child.pid, least_ns=1_000_000))
    assert end - start > 390_000_000
