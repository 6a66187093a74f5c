"""All faults, in the order of the table."""

from __future__ import annotations

from bench import Injector
from faults import clients, combined, cpu, inside, interrupts, memory, requests, stops

ALL: tuple[Injector, ...] = (
    combined.NONE,
    stops.SIGSTOP,
    stops.DEBUGGER,
    cpu.CPU_HOG,
    cpu.SIBLING_HOG,
    cpu.QUOTA,
    interrupts.INTERRUPT_STORM,
    inside.GIL,
    inside.LOCK,
    inside.LOOP_HANG,
    inside.SLOW_SAMPLER,
    inside.SLOW_TOKENIZER,
    inside.DISK_STALL,
    memory.MAJOR_FAULTS,
    memory.RECLAIM,
    requests.LONG_PREFILL,
    requests.SHORT_BEHIND_LONG,
    requests.PREFIX_MISS,
    requests.QUEUE_OVERLOAD,
    requests.KV_EXHAUSTION,
    clients.SLOW_READER,
    clients.SLOW_UPLOADER,
    clients.RETRANSMITS,
    combined.STOP_AND_HOG,
    combined.SAMPLER_AND_HOG,
    combined.READER_AND_HOG,
)
