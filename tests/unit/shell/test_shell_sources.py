"""The sources over real rings and the real /proc of this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Target
from dsagent.agent.host.procfs import ProcessGone, read_stat
from dsagent.agent.sources import proc as procs
from dsagent.agent.sources.proc import ProcSource
from dsagent.agent.sources.steps import DISCOVER_NS, StepsSource
from dsagent.engine.observe import RequestLife, StepReport, StepShare
from dsagent.instrumentation.reference import ReferenceObserver

S = 1_000_000_000


def own_target() -> Target:
    stat = read_stat(os.getpid())
    return Target(stat.pid, stat.start_ticks, 1, stat.comm, (), "reference")


@pytest.fixture
def observer() -> Iterator[ReferenceObserver]:
    observer = ReferenceObserver(engine_id=77)
    observer.idle()
    yield observer
    observer.close()


def step(observer: ReferenceObserver, step_id: int, start_ns: int, end_ns: int) -> None:
    observer.step_started(step_id, start_ns)
    share = StepShare("r1", False, 1, 0, 40, 1, False)
    observer.step_finished(
        StepReport(
            step_id, start_ns, end_ns, 1, 1, 1, 1, 1, 0, 1, 0, 1, 0, 3, 64, 0, False, (share,)
        )
    )


def test_steps_requests_and_pace(observer: ReferenceObserver) -> None:
    source = StepsSource(own_target())
    source.start()
    words = source.new_step_words()
    assert list(words) == [os.getpid()]
    assert source.new_step_words() == {}
    for number in range(1, 101):
        step(observer, number, number * 1000, number * 1000 + number)
    life = RequestLife("r1", "chat", "m", 5)
    observer.request_opened(life)  # the front end's ring is made only now
    readings = source.poll(10 * DISCOVER_NS * S)
    assert [each.step_id for each in readings.steps] == list(range(1, 101))
    assert [each.request_id for each in readings.opened] == ["r1"]
    assert source.step_p99_ns() == 99
    assert source.last_step_end_ns == 100_100
    assert source.oldest_open_ns() == 5
    life.sent_ns = time.monotonic_ns()
    observer.request_closed(life)
    observer.step_started(101, 7_000_000)
    readings = source.poll(0)
    assert [each.request_id for each in readings.closed] == ["r1"]
    assert source.oldest_open_ns() is None
    assert [each[:3] for each in source.running()] == [(os.getpid(), 101, 7_000_000)]
    assert source.uncounted_losses == 0
    assert (source.status().state, source.status().dropped) == ("ok", 0)
    source.stop()
    source.stop()
    assert source.status().state == "unavailable"


def test_lapped_records_are_counted_not_lost(observer: ReferenceObserver) -> None:
    observer.close()
    small = ReferenceObserver(engine_id=78, capacity_bytes=128 << 10)
    small.idle()
    source = StepsSource(own_target())
    source.start()
    for number in range(1, 3001):
        step(small, number, number, number + 1)
    read = len(source.poll(0).steps)
    status = source.status()
    assert status.state == "lagging"
    while source.behind:
        read += len(source.poll(0).steps)
    assert read + source.status().dropped == 3000
    assert source.uncounted_losses == 0
    source.poll(0)
    assert source.status().state == "ok"
    source.stop()
    assert source.status().dropped == status.dropped
    small.close()


def test_without_a_ring_it_is_unavailable() -> None:
    with pytest.raises(SourceUnavailable, match="no step ring"):
        StepsSource(own_target()).start()


def test_proc_counts_from_attaching_on() -> None:
    source = ProcSource(own_target(), lambda: (os.getpid(), 1 << 30))
    source.start()
    first = {s.name + str(sorted(s.attributes.items())): s for s in source.poll(S).samples}
    comm = read_stat(os.getpid()).comm
    cpu = [s for s in first.values() if s.name == "process.cpu.time"]
    assert {s.attributes["cpu.mode"] for s in cpu} == {"user", "system"}
    assert all(s.value == 0 and s.attributes["process.executable.name"] == comm for s in cpu)
    assert source.poll(S + 1).samples == []  # once a second
    thread = threading.Thread(target=sum, args=(range(3_000_000),))
    thread.start()
    thread.join()
    source.poll(3 * S)
    again = {s.name + str(sorted(s.attributes.items())): s for s in source.poll(5 * S).samples}
    assert sum(s.value for s in again.values() if s.name == "process.cpu.time") > 0
    names = {s.name for s in again.values()}
    assert names >= {
        "process.memory.usage",
        "process.thread.count",
        "process.paging.faults",
        "process.context_switches",
        "process.unix.file_descriptor.count",
        "system.cpu.time",
        "dsagent.agent.cpu.time",
        "dsagent.agent.memory.pss",
    }
    assert source.status().state == "ok"


def test_every_sample_is_in_the_catalogue() -> None:
    from dsagent.agent.metrics.catalog import SAMPLE_METRICS

    source = ProcSource(own_target(), lambda: (os.getpid(),))
    for sample in source.poll(S).samples:
        metric = SAMPLE_METRICS[sample.name]
        assert set(sample.attributes) <= set(metric.attributes), sample


def test_names_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ProcSource(own_target(), lambda: ())
    labels = {source._label(f"comm{number}") for number in range(100)}
    assert len(labels) == procs.MAX_NAMES + 1
    assert "~other" in labels


def test_throttled_time_of_both_cgroup_versions(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    cgroup = tmp_path / "7" / "cgroup"
    cgroup.write_text("3:cpuset:/\n2:cpu,cpuacct:/a\n0::/b\n")
    one, two = tmp_path / "fs/cgroup/cpu,cpuacct/a", tmp_path / "fs/cgroup/b"
    assert procs.read_throttled_s(7, tmp_path, tmp_path) is None
    two.mkdir(parents=True)
    (two / "cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n")
    assert procs.read_throttled_s(7, tmp_path, tmp_path) == 1.5
    one.mkdir(parents=True)
    (one / "cpu.stat").write_text("nr_periods 9\nnr_throttled 2\nthrottled_time 2500000000\n")
    assert procs.read_throttled_s(7, tmp_path, tmp_path) == 2.5


def test_a_process_that_ends_between_two_of_its_files_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path("/proc") / str(os.getpid())
    for name in ("stat", "io", "task"):
        (tmp_path / "7").mkdir(exist_ok=True)
        (tmp_path / "7" / name).symlink_to(own / name)
    with pytest.raises(ProcessGone):  # all but its descriptors
        procs.read_process(7, tmp_path)
    proper = procs.read_process

    def read_process(pid: int) -> procs.Reading:
        return proper(7, tmp_path) if pid == 1 << 30 else proper(pid)

    monkeypatch.setattr(procs, "read_process", read_process)
    source = ProcSource(own_target(), lambda: (1 << 30, os.getpid()))
    assert any(sample.name == "process.cpu.time" for sample in source.poll(S).samples)
    assert source.status().state == "ok"


def test_a_cgroup_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert procs.read_throttled_s(7, tmp_path, tmp_path) is None
