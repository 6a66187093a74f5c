"""What sources hand over: kernel facts, samples, their own state.

Kernel facts are numpy arrays of `FACT_DTYPE`, since a busy engine makes
thousands a second and the join must not pay Python for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from dsagent.agent.profiles.stacks import Recorded
from dsagent.instrumentation.records import RankStep, RequestOpen, RequestRecord, Step


class Kind(IntEnum):
    """What a kernel fact measures: nanoseconds of one thread, unless said otherwise."""

    ONCPU = 1  # ran (per step and thread, summed)
    RUNQUEUE = 2  # runnable, not running, not throttled
    THROTTLED = 3  # runnable, its cgroup's quota used up
    OFF_FUTEX = 4  # blocked in futex (locks, the GIL, condition variables)
    OFF_DISK = 5  # uninterruptible, waiting for a block device
    OFF_OTHER = 6  # blocked otherwise (poll, sleep, pipes)
    STOPPED = 7  # SIGSTOP, ptrace, frozen cgroup
    FOREIGN = 8  # a task outside the target (culprit_pid) ran on a CPU the target may use
    STEAL = 9  # the hypervisor took the CPU that the thread ran on
    IRQ = 10  # an interrupt or softirq ran on top of the thread
    MAJOR_FAULT = 11  # a page fault that had to read from disk or swap, from fault to return
    MINOR_FAULT = 12  # a page fault served from memory
    RECLAIM = 13  # direct reclaim: the thread freed memory before it got any
    RETRANSMIT = 14  # a socket of the target sent a segment again; until it was acknowledged
    BACKPRESSURE = 15  # a socket of the target could not take more: its client reads slowly
    BLOCK_IO = 16  # a request of the thread to a block device, which it need not wait for
    OFF_FSYNC = 17  # uninterruptible, in fsync and its like


FACT_DTYPE = np.dtype(
    [
        ("kind", "u1"),
        # 1: [start_ns, end_ns) is one interval and ns == end_ns - start_ns.
        # 0: ns is the sum of `count` intervals that ended within [start_ns, end_ns].
        ("exact", "u1"),
        ("cpu", "i2"),  # -1 where it has none
        ("count", "u4"),
        ("pid", "u4"),  # of the target's thread; the target's pid for FOREIGN
        ("tid", "u4"),  # 0 for FOREIGN
        ("culprit_pid", "u4"),  # 0: unknown. RUNQUEUE: who ran on that CPU; FUTEX: the waker's pid
        ("culprit_tid", "u4"),
        ("step_id", "u8"),  # the step running when it ended, tagged in the kernel; 0: none
        ("start_ns", "i8"),
        ("end_ns", "i8"),
        ("ns", "i8"),
    ]
)

Facts = npt.NDArray[np.void]  # dtype FACT_DTYPE


def no_facts() -> Facts:
    return np.empty(0, FACT_DTYPE)


def one_array(brought: Sequence[Readings]) -> Facts:
    """The facts of all readings, in their order."""
    arrays = [readings.facts for readings in brought if len(readings.facts)]
    if len(arrays) > 1:
        return np.concatenate(arrays)
    return arrays[0] if arrays else no_facts()


def facts_complete_ns(brought: Sequence[Readings]) -> int | None:
    """Up to when they are complete, as the last source says that knows it."""
    told = [r.facts_complete_ns for r in brought if r.facts_complete_ns is not None]
    return told[-1] if told else None


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one thing at one time, by its catalogue name."""

    name: str
    value: float
    mono_ns: int
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something rare worth telling: a stalled loop, a lost source, a child that came or went."""

    name: str
    mono_ns: int
    message: str
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    trace_ids: tuple[str, ...] = ()  # 32 hex digits; that which shows it best first


@dataclass(frozen=True, slots=True)
class View:
    """What accounts are made with: whether the kernel's facts are waited for, and which causes are
    not looked at since when (None: nothing has changed since attaching)."""

    waits_for_kernel: bool = True
    not_looked_at: tuple[str, ...] = ()
    since_ns: int | None = None


SourceState = Literal["ok", "unavailable", "lagging", "failed"]


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How a source does; itself exported."""

    name: str
    state: SourceState
    reason: str = ""
    dropped: int = 0
    lag_ns: int = 0
    cost_ns: int = 0  # CPU spent by it so far, in the kernel or in the agent


@dataclass(frozen=True, slots=True)
class EngineSpan:
    """A request's SERVER span as the engine itself exported it. Times are wall-clock ns."""

    trace_id: int
    span_id: int
    parent_span_id: int | None
    name: str
    scope: str  # the instrumentation scope's name
    request_id: str
    start_unix_ns: int
    end_unix_ns: int
    figures: Mapping[str, float] = field(default_factory=dict)  # by attribute, as they came
    process_id: int | None = None  # whose span it is, as the engine numbers its process


@dataclass(frozen=True, slots=True)
class OtlpBody:
    """An ExportTraceServiceRequest as it was received, and how many spans it holds."""

    data: bytes
    spans: int


@dataclass(slots=True)
class Readings:
    """What one poll of one source brought; a source fills what it has."""

    steps: list[Step] = field(default_factory=list)
    rank_steps: list[RankStep] = field(default_factory=list)
    opened: list[RequestOpen] = field(default_factory=list)
    closed: list[RequestRecord] = field(default_factory=list)
    # request_keys of opened requests that cannot be open any more: their end was lost
    forgotten: list[int] = field(default_factory=list)
    facts: Facts = field(default_factory=no_facts)
    # Facts are complete up to this time; None: this source brings none.
    facts_complete_ns: int | None = None
    # comm of each culprit pid and target tid seen, control characters escaped
    names: dict[int, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    engine_spans: list[EngineSpan] = field(default_factory=list)
    otlp_bodies: list[OtlpBody] = field(default_factory=list)  # to be passed on unchanged
    profiles: list[Recorded] = field(default_factory=list)

    @property
    def ended(self) -> list[int]:
        """The request_keys of all that is not open any more."""
        return [*(record.request_key for record in self.closed), *self.forgotten]


class Source(Protocol):
    """Reads one kind of fact. One thread calls all its methods."""

    name: str

    def start(self) -> None:
        """Begin. Raises SourceUnavailable with the reason where it cannot run."""

    def poll(self, now_ns: int) -> Readings:
        """What came since the last poll; bounded work, never blocks."""

    def status(self) -> SourceStatus: ...

    def stop(self) -> None:
        """Leave nothing behind; may be called twice."""


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """Ties CLOCK_MONOTONIC to the wall clock at one moment, with an error bound."""

    mono_ns: int
    unix_ns: int
    error_ns: int

    def unix(self, mono_ns: int) -> int:
        return self.unix_ns + (mono_ns - self.mono_ns)


@dataclass(frozen=True, slots=True)
class Target:
    """The process tree attached to. `start_ticks` defeats pid reuse."""

    pid: int
    start_ticks: int
    pid_namespace: int
    comm: str
    children: tuple[int, ...]
    engine: str  # reference, vllm, http
    container_id: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    service_name: str = "reference"
