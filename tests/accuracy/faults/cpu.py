"""The CPU is taken away: by a hog, by a quota."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable

from bench import Bench, Injector
from ending import end
from truth import Fault, Injection, life

HOG = "lab-hog"
# What a hog does, a little of it at a time. Beyond the CPU it takes what the cores share: to write
# and to read far more than a cache holds takes the memory's bandwidth, and the cache.
WORK = {
    "spin": ("", "pass"),
    "write": ("import numpy; big = numpy.ones(1 << 26, numpy.float32)", "big.fill(2)"),
    "read": ("import numpy; big = numpy.ones(1 << 26, numpy.float32)", "big.max()"),
    "copy": (
        "import numpy; big = numpy.ones(1 << 25, numpy.float32); other = big.copy()",
        "numpy.copyto(other, big)",
    ),
}
_HOG_CODE = """
import ctypes, os, sys, time
os.sched_setaffinity(0, {{int(sys.argv[1])}})
os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[4]))
ctypes.CDLL(None).prctl(15, sys.argv[2].encode(), 0, 0, 0)
{prepare}
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    {work}
"""


def run_hogs(
    cpus: Iterable[int], seconds: float, niceness: int, work: str = "spin"
) -> tuple[int, int]:
    """One busy process on each of `cpus`, for so long, that does `work`; start and end."""
    prepare, once = WORK[work]
    code = _HOG_CODE.format(prepare=prepare, work=once)
    hogs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(cpu), HOG, str(seconds), str(niceness)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for cpu in sorted(cpus)
    ]
    for hog in hogs:
        assert hog.stdout is not None
        if hog.stdout.readline() != "ready\n":
            raise RuntimeError("a hog did not start")
    start_ns = time.monotonic_ns()
    for hog in hogs:
        end(hog, seconds)
    return start_ns, time.monotonic_ns()


def hog(bench: Bench, dice: random.Random) -> Injection:
    """The lighter the hog's weight, the less visible it is."""
    niceness = dice.choice((-5, 0, 0, 5))
    cpus = os.sched_getaffinity(bench.target.pid)
    start_ns, end_ns = run_hogs(cpus, dice.uniform(1.0, 2.5), niceness)
    return Injection("cpu_hog", start_ns, end_ns, None, frozenset({HOG}))


def sibling_hog(bench: Bench, dice: random.Random) -> Injection:
    """A hog on one core; the engine, of one thread here, has the other to itself but for what
    the scheduler moves about. What it loses is a shared cache's and bus's doing: one that only
    spins takes nothing from it."""
    cpu = dice.choice(sorted(os.sched_getaffinity(bench.target.pid)))
    work = dice.choice(("write", "write", "read", "copy"))
    start_ns, end_ns = run_hogs([cpu], dice.uniform(1.5, 3.5), 0, work)
    return Injection("sibling_hog", start_ns, end_ns, None, frozenset({HOG}))


def quota(bench: Bench, dice: random.Random) -> Injection:
    """The engine's cgroup gets a part of what it needs. cpu.stat does not tell the size: it adds
    up the CPUs, and whether their halts coincide it does not say."""
    assert bench.cgroup is not None
    cpus = len(os.sched_getaffinity(bench.target.pid))
    ratio = dice.uniform(0.25, 0.7)
    file = bench.cgroup / "cpu.cfs_quota_us"
    start_ns = time.monotonic_ns()
    file.write_text(str(round(100_000 * cpus * ratio)))
    try:
        time.sleep(dice.uniform(0.8, 2.0))
    finally:
        file.write_text("-1")
    end_ns = time.monotonic_ns()
    return Injection("quota", start_ns, end_ns)


def _no_cgroup(bench: Bench) -> str:
    return "" if bench.cgroup is not None else "no writable cgroup v1 cpu controller"


def _one_cpu(bench: Bench) -> str:
    return "" if len(os.sched_getaffinity(bench.target.pid)) > 1 else "the engine has but one CPU"


CPU_HOG = Injector(
    Fault("cpu_hog", frozenset({"cpu.runqueue"}), "counterfactual", life), "smollm2", hog
)
SIBLING_HOG = Injector(
    Fault("sibling_hog", frozenset({"cpu.slowed", "cpu.runqueue"}), "counterfactual", life),
    "smollm2, one thread",
    sibling_hog,
    refused=_one_cpu,
)
QUOTA = Injector(
    Fault("quota", frozenset({"cpu.throttled"}), "counterfactual", life),
    "smollm2",
    quota,
    refused=_no_cgroup,
)
