"""Known workloads for the kernel source: a child that does exactly what it is told, and says
when by the same clock; and a watch that gathers the facts about it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Event, Facts, Kind, Target, no_facts
from dsagent.agent.sources.kernel import KernelSource, check

PRELUDE = """
import ctypes, json, mmap, os, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
now = time.monotonic_ns
def say(**what):
    print(json.dumps(what), flush=True)
def hear():
    return sys.stdin.readline().strip()
def nap(microseconds):
    # Not time.sleep: that sleeps until a moment, and so not at all after a long preemption.
    libc.usleep(microseconds)
def spin(seconds):
    end = now() + int(seconds * 1e9)
    while now() < end:
        pass
"""


def require_kernel_source() -> None:
    """Skip, with the reason, where BPF cannot run."""
    try:
        check()
    except SourceUnavailable as reason:
        pytest.skip(str(reason))


class Child:
    """A process running PRELUDE and `body`; talks JSON lines, hears plain ones."""

    def __init__(
        self,
        body: str,
        *,
        cpu: int | None = None,
        name: str | None = None,
        installed: bool = False,  # whether the body may import what is installed
    ) -> None:
        text = PRELUDE
        if cpu is not None:
            text += f"os.sched_setaffinity(0, {{{cpu}}})\n"
        if name is not None:
            text += f"libc.prctl(15, {name.encode()!r}, 0, 0, 0)\n"
        self.process = subprocess.Popen(
            [sys.executable, *(() if installed else ("-S",)), "-c", text + body],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that what it forks can be ended with it
        )
        self.pid = self.process.pid

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended without a word"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def say(self, word: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Watch:
    """A KernelSource on a child, and all facts so far."""

    def __init__(self, pid: int, step_words: Mapping[int, int] | None = None, **how: Any) -> None:
        children: Sequence[int] = how.pop("children", ())
        target = Target(pid, 0, 0, "child", tuple(children), "reference")
        self.source = KernelSource(target, step_words or {}, **how)
        self.facts = no_facts()
        self.names: dict[int, str] = {}
        self.events: list[Event] = []
        self.complete_ns = 0
        self.missed = 0  # switches that the kernel did not report, as the source says at its end

    def __enter__(self) -> Watch:
        self.source.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.source.stop()
        self.status = self.source.status()
        said = re.search(r"did not report (\d+)", self.status.reason)
        self.missed = int(said[1]) if said else 0

    def poll(self) -> None:
        readings = self.source.poll(time.monotonic_ns())
        self.facts = np.concatenate((self.facts, readings.facts))
        self.names |= readings.names
        self.events += readings.events
        if readings.facts_complete_ns is not None:
            self.complete_ns = readings.facts_complete_ns

    def until(self, end_ns: int) -> None:
        """Poll until the facts are complete up to `end_ns`."""
        while self.complete_ns < end_ns:
            time.sleep(0.01)
            self.poll()

    def of(self, kind: Kind, *, tid: int | None = None, least_ns: int = 0) -> Facts:
        facts: Facts = self.facts[(self.facts["kind"] == kind) & (self.facts["ns"] >= least_ns)]
        return facts if tid is None else facts[facts["tid"] == tid]


def measured(
    body: str,
    *,
    during: Callable[[Child, Watch], dict[str, Any]] = lambda child, watch: {},
    step_words: Callable[[int], Mapping[int, int]] = lambda pid: {},
    installed: bool = False,
    **how: Any,
) -> tuple[Watch, dict[str, Any]]:
    """Watch a child from its first word, at our "go", until the `end` that it tells.

    Gives what it told at its end, with its `pid` and what `during` made of the time between. Is
    repeated, five times at most, until the kernel has reported every switch of the child: some
    virtual machines hide those of a supervisor's threads, and with them the moment at which the
    next thread begins to run. Exact counts are promised of what is reported.
    """
    for _ in range(5):
        with Child(body, installed=installed) as child:
            child.hear()
            with Watch(child.pid, step_words(child.pid), **how) as watch:
                child.say()
                told = {"pid": child.pid} | during(child, watch)
                told |= child.hear()
                watch.until(told["end"])
        if not watch.missed:
            break
    return watch, told


def within(facts: Facts, start_ns: int, end_ns: int) -> Facts:
    """Those that lie in [start_ns, end_ns]."""
    return facts[(facts["start_ns"] >= start_ns) & (facts["end_ns"] <= end_ns)]


def overlap_ns(facts: Facts, start_ns: int, end_ns: int) -> int:
    """Nanoseconds of exact facts in [start_ns, end_ns]."""
    exact = facts[facts["exact"] == 1]
    ends = np.minimum(exact["end_ns"], end_ns)
    return int(np.maximum(0, ends - np.maximum(exact["start_ns"], start_ns)).sum())


def last_cpu() -> int:
    return max(os.sched_getaffinity(0))
