"""All faults, in the order of the table, and those that cannot be done yet."""

from __future__ import annotations

from bench import Injector
from faults import clients, combined, cpu, inside, requests, stops

ALL: tuple[Injector, ...] = (
    combined.NONE,
    stops.SIGSTOP,
    stops.DEBUGGER,
    cpu.CPU_HOG,
    cpu.SIBLING_HOG,
    cpu.QUOTA,
    inside.GIL,
    inside.LOCK,
    inside.LOOP_HANG,
    inside.SLOW_SAMPLER,
    inside.SLOW_TOKENIZER,
    requests.LONG_PREFILL,
    requests.SHORT_BEHIND_LONG,
    requests.PREFIX_MISS,
    requests.QUEUE_OVERLOAD,
    requests.KV_EXHAUSTION,
    clients.SLOW_READER,
    clients.SLOW_UPLOADER,
    combined.STOP_AND_HOG,
)
_NO_PROBE = ("retransmits", "major_faults", "reclaim", "disk_stall", "interrupt_storm")
NOT_YET: dict[str, str] = dict.fromkeys(_NO_PROBE, "probe not there yet")
