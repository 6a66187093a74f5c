"""Nothing at all, and two things at once."""

from __future__ import annotations

import os
import random
import threading
import time

from bench import Bench, Injector
from faults.cpu import run_hogs
from faults.stops import stop_for
from truth import Fault, Injection, Timeline, life


def nothing(bench: Bench, dice: random.Random) -> Injection:
    """Time passes under load; whoever comes after this moment until the next deed is unharmed."""
    del dice
    now_ns = time.monotonic_ns()
    bench.load.wait_for(4)
    return Injection("none", now_ns, now_ns, Timeline.of([]))


def stop_and_hog(bench: Bench, dice: random.Random) -> Injection:
    """A hog on every core, and the process stopped in the midst of it: the stop is made the
    larger of the two for all that it hits."""
    stops: list[tuple[int, int]] = []
    seconds = dice.uniform(0.5, 1.0)

    def stop() -> None:
        time.sleep(0.4)
        stops.append(stop_for(bench.target, seconds))

    stopper = threading.Thread(target=stop)
    stopper.start()
    cpus = os.sched_getaffinity(bench.target.pid)
    start_ns, end_ns = run_hogs(cpus, seconds + 0.8, 5)
    stopper.join()
    return Injection("stop_and_hog", start_ns, end_ns, Timeline.of(stops))


NONE = Injector(Fault("none", frozenset(), "logged", life), "smollm2", nothing)
STOP_AND_HOG = Injector(
    Fault("stop_and_hog", frozenset({"process.stopped"}), "logged", life), "smollm2", stop_and_hog
)
