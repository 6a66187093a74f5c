"""The three costs, and the two ways to count the agent's own CPU time."""

from __future__ import annotations

import os

import numpy as np
import pytest

from dsagent.agent.facts import FACT_DTYPE, Kind
from dsagent.agent.session import overhead
from dsagent.agent.session.overhead import WINDOW_NS, OverheadMeter, cpu_overlap_ratio, hooks_ns

S = 1_000_000_000


@pytest.fixture
def cpu_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    used = [0]
    monkeypatch.setattr(overhead.time, "process_time_ns", lambda: used[0])
    monkeypatch.setattr(overhead, "_affinity", lambda _pid: frozenset({0, 1}))
    return used


def test_without_the_kernel_all_cpu_time_on_the_targets_cpus_counts(cpu_ns: list[int]) -> None:
    meter = OverheadMeter(os.getpid(), 0, sees_displacement=False)
    cpu_ns[0] = S // 10
    meter.update(10 * S, kernel_ns=S // 10, hooks_ns=S // 100)
    assert meter.agent_cpu_ratio == pytest.approx(0.01)
    assert meter.ratio == pytest.approx((0.1 + 0.1) / (10 * 2) + 0.01 / 10)


def test_with_the_kernel_only_what_the_target_waited_for_counts(
    cpu_ns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "INITIAL_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    meter = OverheadMeter(os.getpid(), 0, sees_displacement=True)
    facts = np.zeros(4, FACT_DTYPE)
    facts["kind"] = [Kind.RUNQUEUE, Kind.RUNQUEUE, Kind.FOREIGN, Kind.RUNQUEUE]
    facts["culprit_pid"] = [os.getpid(), 1, os.getpid(), os.getpid()]
    facts["ns"] = [S // 100, S, S, S // 100]
    cpu_ns[0] = S
    meter.add_facts(facts)
    meter.update(10 * S, kernel_ns=0, hooks_ns=0)
    assert meter.ratio == pytest.approx(0.001)
    assert meter.agent_cpu_ratio == pytest.approx(0.1)


def test_in_a_pid_namespace_we_would_not_find_ourselves(
    cpu_ns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "INITIAL_PID_NAMESPACE", 1)
    assert not OverheadMeter(os.getpid(), 0, sees_displacement=True).sees_displacement


def test_windows(cpu_ns: list[int]) -> None:
    meter = OverheadMeter(os.getpid(), 0, sees_displacement=False)
    assert not meter.update(WINDOW_NS - 1, 0, 0)
    assert meter.window is None
    cpu_ns[0] = WINDOW_NS // 10
    assert meter.update(WINDOW_NS, 0, 0)
    assert meter.window is not None
    assert meter.window.ratio == meter.window.agent_ratio == pytest.approx(0.05)
    assert meter.update(2 * WINDOW_NS, 0, 0)
    assert meter.window.ratio == 0.0
    assert meter.ratio == pytest.approx(0.025)


def test_parts() -> None:
    assert hooks_ns(0, 0) == 0
    assert hooks_ns(10, 640) == 10 * overhead.HOOK_NS + 640 * overhead.HOOK_NS_A_SHARE
    assert cpu_overlap_ratio(frozenset({0, 1}), frozenset({1, 2})) == 0.5
    assert cpu_overlap_ratio(frozenset({3}), frozenset({1, 2})) == 0.0


def test_the_switches_of_the_machine_are_counted_by_window(
    cpu_ns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = overhead._switches()
    os.sched_yield()
    assert overhead._switches() >= real > 0
    counted = iter((1_000, 6_000, 6_500))
    monkeypatch.setattr(overhead, "_switches", lambda: next(counted))
    meter = OverheadMeter(os.getpid(), 0, sees_displacement=False)
    meter.update(WINDOW_NS, 0, 0)
    assert meter.window is not None
    assert meter.window.switches_per_s == pytest.approx(1_000)
    meter.update(2 * WINDOW_NS, WINDOW_NS // 100, WINDOW_NS // 50)
    assert meter.window.switches_per_s == pytest.approx(100)
    assert meter.window.kernel_ratio == pytest.approx(0.005)
    assert meter.window.hooks_ratio == pytest.approx(0.02)
    assert meter.window.ratio == pytest.approx(0.025)


def test_each_span_of_time_is_counted_as_it_could_be_seen_then(
    cpu_ns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "INITIAL_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    meter = OverheadMeter(os.getpid(), 0, sees_displacement=True)
    cpu_ns[0] = S
    meter.update(10 * S, 0, 0)
    assert meter.ratio == 0.0  # nobody waited for us
    meter.see_displacement(False)
    cpu_ns[0] = 2 * S
    meter.update(20 * S, 0, 0)
    assert meter.window is not None
    assert meter.window.agent_ratio == pytest.approx(0.05)
    assert meter.ratio == pytest.approx(0.025)
