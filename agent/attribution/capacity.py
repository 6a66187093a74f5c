"""Who occupied the CPUs that the target may use. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dsagent.agent.attribution.pieces import Blame, split

Foreign = Iterable[tuple[int, ...]]  # facts of kind FOREIGN: start_ns, end_ns, culprit_pid, ns


def occupied(foreign: Foreign, start_ns: int, end_ns: int) -> dict[int, float]:
    """pid → nanoseconds it ran on the target's CPUs within [start_ns, end_ns), all CPUs together.
    Of a sum, its part is by its overlap."""
    by_pid: dict[int, float] = {}
    for begin, finish, pid, ran in foreign:
        overlap = min(finish, end_ns) - max(begin, start_ns)
        if overlap > 0:
            by_pid[pid] = by_pid.get(pid, 0.0) + ran * overlap / (finish - begin)
    return by_pid


def blame_by_capacity(by_pid: Mapping[int, float], ns: int, own_pid: int) -> tuple[Blame, ...]:
    """Who took the CPU for `ns` of a time in which the tasks outside the target `occupied` the CPUs
    it may use: they, in proportion. Who came next on that CPU says little: it is often the
    target's own other thread. What they did not occupy, the target's own threads did."""
    occupied_ns = sum(by_pid.values())
    if ns > occupied_ns:
        by_pid = {**by_pid, own_pid: by_pid.get(own_pid, 0.0) + ns - occupied_ns}
    sizes = zip(by_pid, split(ns, list(by_pid.values())), strict=True)
    return tuple([Blame(pid, 0, share) for pid, share in sizes if share])
