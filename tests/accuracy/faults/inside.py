"""The engine's own code is slow, or its threads are in one another's way."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench import Bench, Inject, Injector
from truth import Fault, Injection, Timeline, before_queue, in_engine

Settings = Callable[[random.Random], dict[str, float]]


def _inject(fault: str, command: str, settings: Settings, culprit: str | None = None) -> Inject:
    def inject(bench: Bench, dice: random.Random) -> Injection:
        intervals = bench.target.fault(command, **settings(dice))
        if not intervals:
            return Injection(fault, 0, 0, Timeline.of([]))
        culprits = frozenset({culprit} if culprit else ())
        start_ns, end_ns = intervals[0][0], max(end for _, end in intervals)
        return Injection(fault, start_ns, end_ns, Timeline.of(intervals), culprits)

    return inject


def _held(dice: random.Random) -> dict[str, float]:
    seconds = dice.uniform(0.02, 0.2)
    return {"seconds": seconds, "times": dice.randint(2, 5), "pause_s": 0.03}


def _contended(dice: random.Random) -> dict[str, float]:
    """The step in which it is taken goes on until it needs it, hence longer."""
    return {**_held(dice), "seconds": dice.uniform(0.08, 0.3)}


def _hang(dice: random.Random) -> dict[str, float]:
    return {"amount": dice.uniform(2.2, 3.5), "calls": 1, "limit_s": 10}


def _slow_sampler(dice: random.Random) -> dict[str, float]:
    return {"amount": dice.uniform(0.01, 0.06), "calls": dice.randint(8, 16), "limit_s": 10}


def _slow_tokenizer(dice: random.Random) -> dict[str, float]:
    return {"amount": dice.uniform(0.15, 0.6), "calls": 3, "limit_s": 10}


def _through(dice: random.Random) -> dict[str, float]:
    """Megabytes that the loop waits for on their way to the disk in each of some steps."""
    return {"amount": dice.uniform(40, 120), "calls": dice.randint(4, 10), "limit_s": 20}


DISK_STALL = Injector(
    Fault("disk_stall", frozenset({"io.block"}), "logged", in_engine),
    "smollm2",
    _inject("disk_stall", "disk", _through),
)
GIL = Injector(
    Fault("gil", frozenset({"lock.wait"}), "logged", in_engine),
    "smollm2",
    _inject("gil", "gil", _held, "lab-gil"),
)
LOCK = Injector(
    Fault("lock_contention", frozenset({"lock.wait"}), "logged", in_engine),
    "smollm2",
    _inject("lock_contention", "lock", _contended, "lab-lock"),
)
LOOP_HANG = Injector(
    Fault("loop_hang", frozenset({"engine.stalled"}), "logged", in_engine),
    "smollm2",
    _inject("loop_hang", "sampler", _hang),
)
SLOW_SAMPLER = Injector(
    Fault("slow_sampler", frozenset({"engine.host"}), "logged", in_engine),
    "smollm2",
    _inject("slow_sampler", "sampler", _slow_sampler),
)
SLOW_TOKENIZER = Injector(
    Fault("slow_tokenizer", frozenset({"frontend.in"}), "logged", before_queue),
    "smollm2",
    _inject("slow_tokenizer", "tokenizer", _slow_tokenizer),
)
