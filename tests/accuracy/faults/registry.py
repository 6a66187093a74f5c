"""All faults, in the order of the table, and those that cannot be done yet."""

from __future__ import annotations

from bench import Injector
from faults import clients, combined, cpu, inside, memory, requests, stops

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
    inside.DISK_STALL,
    memory.MAJOR_FAULTS,
    requests.LONG_PREFILL,
    requests.SHORT_BEHIND_LONG,
    requests.PREFIX_MISS,
    requests.QUEUE_OVERLOAD,
    requests.KV_EXHAUSTION,
    clients.SLOW_READER,
    clients.SLOW_UPLOADER,
    clients.RETRANSMITS,
    combined.STOP_AND_HOG,
)
NOT_YET: dict[str, str] = {
    "reclaim": "not tried: the engine takes no new memory once it is warm, so hardly reclaims",
    "interrupt_storm": "not tried: loopback packets are worked off in the sender's own time",
}
