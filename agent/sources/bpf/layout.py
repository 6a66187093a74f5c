"""sched.h in numpy: the same layouts, field by field."""

from __future__ import annotations

import struct

import numpy as np

from dsagent.agent.facts import FACT_DTYPE

THREAD_KINDS = 18
RUNS = 8
WORDS = 64
FOREIGNERS = 16
STATE_BITS = 5
MAX_THREADS = 4096
MAX_PROCESSES = 1024

_SUM = np.dtype([("ns", "u8"), ("start_ns", "u8"), ("end_ns", "u8"), ("count", "u8")])
_THREAD_SUMS = np.dtype(
    [("generation", "u8"), ("step", "u8"), ("used", "u8"), ("kinds", _SUM, (THREAD_KINDS,))]
)
THREAD = np.dtype(
    [
        ("since_state", "u8"),
        ("waking_ns", "u8"),
        ("run_start_ns", "u8"),
        ("run_step", "u8"),
        ("fault_ns", "u8"),
        ("file_fault_ns", "u8"),
        ("disk_ns", "u8"),
        ("reclaim_ns", "u8"),
        ("waker_pid", "u4"),
        ("waker_tid", "u4"),
        ("pid", "u4"),
        ("tid", "u4"),
        ("word", "u4"),
        ("cpu", "i4"),
        ("comm", "S16"),
        ("named", "u8"),
        ("sums", _THREAD_SUMS, (2,)),
    ]
)
_RUN = np.dtype([("start_ns", "u8"), ("end_ns", "u8"), ("pid", "u4"), ("tid", "u4")])
_FOREIGNER = np.dtype(
    [("pid", "u4"), ("count", "u4"), ("ns", "u8"), ("start_ns", "u8"), ("end_ns", "u8")]
)
_FOREIGN_SUMS = np.dtype(
    [("generation", "u8"), ("step", "u8"), ("by_pid", _FOREIGNER, (FOREIGNERS,))]
)
CPU = np.dtype(
    [
        ("watched", "u8"),
        ("run_start_ns", "u8"),
        ("foreign_pid", "u4"),
        ("running_tid", "u4"),
        ("switches", "u8"),
        ("wakings", "u8"),
        ("others", "u8"),
        ("glances", "u8"),
        ("timer_ns", "u8"),
        ("irq_start_ns", "u8"),
        ("irq", "u4"),
        ("steal_seen", "u4"),
        ("steal_ns", "u8"),
        ("cost_ns", "u8"),
        ("dropped", "u8"),
        ("missed", "u8"),
        ("head", "u8"),
        ("runs", _RUN, (RUNS,)),
        ("sums", _FOREIGN_SUMS, (2,)),
    ]
)
CONTROL = np.dtype(
    [("generation", "u8"), ("step", "u8"), ("untracked", "u8"), ("slots_used", "u8")]
)
# The ring's header of a record (length with two flag bits, page offset) and the fact.
RECORD = np.dtype([("length", "u4"), ("page", "u4"), ("fact", FACT_DTYPE)])


def constants(
    *,
    exact_ns: int,
    foreign_exact_ns: int,
    target_pid: int,
    pid_namespace: int,
    has_prev_state: bool,
    per_task_throttle: bool,
) -> bytes:
    """struct ds_config."""
    return struct.pack(
        "=QQIIBB6x",
        exact_ns,
        foreign_exact_ns,
        target_pid,
        pid_namespace,
        has_prev_state,
        per_task_throttle,
    )
