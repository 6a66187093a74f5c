"""Nothing at all, and two things at once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from bench import Bench, Injector
from faults.clients import slow_reader
from faults.cpu import run_hogs
from faults.stops import stop_for
from truth import Fault, Injection, Timeline, after_output, in_engine, life


def nothing(bench: Bench, dice: random.Random) -> Injection:
    """Time passes under load; whoever comes after this moment until the next deed is unharmed."""
    del dice
    now_ns = time.monotonic_ns()
    bench.load.wait_for(4)
    return Injection("none", now_ns, now_ns, Timeline.of([]))


def stop_and_hog(bench: Bench, dice: random.Random) -> Injection:
    """A hog on every core, and the process stopped in the midst of it."""

    def stop() -> Timeline:
        time.sleep(0.4)
        return Timeline.of([stop_for(bench.target, dice.uniform(0.3, 1.0))])

    return _among_hogs("stop_and_hog", bench, dice, dice.uniform(1.0, 1.8), stop)


def sampler_and_hog(bench: Bench, dice: random.Random) -> Injection:
    """A hog on every core, and a sampler that is slow at the same time."""

    def sample() -> Timeline:
        settings = {"amount": dice.uniform(0.01, 0.06), "calls": dice.randint(10, 20)}
        return Timeline.of(bench.target.fault("sampler", limit_s=10, **settings))

    return _among_hogs("sampler_and_hog", bench, dice, dice.uniform(1.0, 2.0), sample)


def reader_and_hog(bench: Bench, dice: random.Random) -> Injection:
    """A client that reads slowly what an engine beside a hog has written."""
    seconds = dice.uniform(1.5, 4.5)
    hogs = threading.Thread(target=_hogs, args=(bench, 0.8 * seconds, 5))
    hogs.start()
    injection = slow_reader(bench, dice, seconds)
    hogs.join()
    return replace(injection, fault="reader_and_hog")


def _among_hogs(
    fault: str, bench: Bench, dice: random.Random, seconds: float, deed: Callable[[], Timeline]
) -> Injection:
    done: list[Timeline] = []
    other = threading.Thread(target=lambda: done.append(deed()))
    other.start()
    start_ns, end_ns = _hogs(bench, seconds, dice.choice((0, 5)))
    other.join()
    return Injection(fault, start_ns, max(end_ns, time.monotonic_ns()), done[0])


def _hogs(bench: Bench, seconds: float, niceness: int) -> tuple[int, int]:
    return run_hogs(os.sched_getaffinity(bench.target.pid), seconds, niceness)


_HOG = frozenset({"cpu.runqueue"})
NONE = Injector(Fault("none", frozenset(), "logged", life), "smollm2", nothing)
STOP_AND_HOG = Injector(
    Fault("stop_and_hog", frozenset({"process.stopped"}), "logged", life, queued=_HOG),
    "smollm2",
    stop_and_hog,
)
SAMPLER_AND_HOG = Injector(
    Fault("sampler_and_hog", frozenset({"engine.host"}), "logged", in_engine, queued=_HOG),
    "smollm2",
    sampler_and_hog,
)
READER_AND_HOG = Injector(
    Fault("reader_and_hog", frozenset({"net.backpressure"}), "logged", after_output, queued=_HOG),
    "tiny-llama",
    reader_and_hog,
)
