"""The probes: what the agent reads from the kernel, by name. A table, nothing else.

A probe is one fact, told by one or more BPF programs; `docs/probes.md` is
written from this table, and the kernel source loads what it names. A tier is a
set of probes: each tier has those of the tiers before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# core: who ran, who waited and why. default: what runs unasked. full: what all processes of the
# machine pay for with each page fault.
Tier = Literal["core", "default", "full"]
TIERS: tuple[Tier, ...] = get_args(Tier)
PERF_MAJOR, PERF_MINOR = "perf:page-faults-major", "perf:page-faults-minor"


@dataclass(frozen=True, slots=True)
class Program:
    """One BPF program, named as in its object, and where it is attached: a tracepoint of the
    kernel's type information, a `perf:` software event, or `iter:task`."""

    name: str
    hook: str
    unless: str = ""  # not needed where the kernel has this tracepoint
    arguments: int = 0  # the tracepoint has had this many since it says what is read; 0: always
    # CPU time of one run on the development machine, 0.07 µs of it to take the time
    cost_ns: int | None = None  # None: did not run there


# Each object is loaded on its own, in this order; the first one has what all others share.
OBJECTS: dict[str, tuple[Program, ...]] = {
    "sched": (
        Program("on_switch", "sched_switch", cost_ns=270),
        Program("on_waking", "sched_waking", cost_ns=140),
        Program("on_tick", "hrtimer_expire_entry", cost_ns=290),
        Program("on_fork", "sched_process_fork", cost_ns=1160),
        Program("on_exec", "sched_process_exec", cost_ns=210),
        Program("scan", "iter:task", cost_ns=390),
    ),
    "memory": (
        Program("on_fault_user", "page_fault_user", cost_ns=90),
        Program("on_fault_kernel", "page_fault_kernel", cost_ns=70),
        Program("on_file_fault", "mm_filemap_fault", cost_ns=100),
        Program("on_fault_major", PERF_MAJOR, cost_ns=300),
        Program("on_fault_minor", PERF_MINOR, cost_ns=70),
        Program("on_reclaim_begin", "mm_vmscan_direct_reclaim_begin"),
        Program("on_reclaim_end", "mm_vmscan_direct_reclaim_end"),
        Program("on_group_reclaim_begin", "mm_vmscan_memcg_reclaim_begin", cost_ns=200),
        Program("on_group_reclaim_end", "mm_vmscan_memcg_reclaim_end", cost_ns=300),
        Program("on_oom", "mark_victim", arguments=2, cost_ns=760),
    ),
    "irq": (
        Program("on_irq_entry", "irq_handler_entry", cost_ns=130),
        Program("on_irq_exit", "irq_handler_exit", cost_ns=80),
        Program("on_timer_entry", "local_timer_entry", cost_ns=340),
        Program("on_timer_exit", "local_timer_exit", cost_ns=110),
        Program("on_softirq_entry", "softirq_entry", cost_ns=130),
        Program("on_softirq_exit", "softirq_exit", cost_ns=100),
        Program("on_tick_end", "hrtimer_expire_exit", cost_ns=460),
    ),
    "io": (
        Program("on_block_start", "block_io_start", cost_ns=220),
        Program("on_block_done", "block_io_done", cost_ns=360),
        Program("on_block_issue", "block_rq_issue", unless="block_io_start", cost_ns=3020),
        Program("on_block_complete", "block_rq_complete", unless="block_io_start", cost_ns=910),
    ),
    "net": (
        Program("on_send", "sock_send_length", cost_ns=120),
        Program("on_retransmit", "tcp_retransmit_skb", cost_ns=2330),
        Program("on_segment", "tcp_probe", cost_ns=140),
        Program("on_socket_state", "inet_sock_set_state", cost_ns=120),
    ),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """`ways`: sets of programs, each of which tells the fact; the first that runs does."""

    name: str
    measures: str
    ways: tuple[tuple[str, ...], ...]
    limits: str = ""
    tier: Tier = "core"


_RUN, _SWITCH = ("on_switch",), ("on_switch", "on_waking")

PROBES: tuple[Probe, ...] = (
    Probe(
        "cpu.oncpu",
        "time that each thread ran, per step",
        (_RUN,),
        "a run is told when it ends; where it went through a change of step, as an interval of "
        "its own",
    ),
    Probe(
        "cpu.runqueue",
        "time in which a thread could have run and did not, from waking or preemption to running; "
        "who ran longest on that CPU meanwhile",
        (_SWITCH,),
        "the culprit is looked for among the last 8 tasks of the CPU where it waited or then ran",
    ),
    Probe(
        "cpu.throttled",
        "time in which a thread's cgroup had used up its CPU quota, until it ran again",
        (_SWITCH,),
        "before Linux 6.18 a thread that is woken into a throttled group counts as run queue",
    ),
    Probe(
        "cpu.foreign",
        "time that tasks outside the target ran on CPUs which it may use, per step and process, "
        "and their names; runs from 1 ms on as intervals, in pieces while they last",
        (_RUN,),
        "one process in sixteen may share a place in the sums, then a sum is sent early, never "
        "mixed",
    ),
    Probe(
        "cpu.tick",
        "which task runs on each CPU, checked at each tick: what ran before the agent came, and "
        "after a switch that was not reported",
        (("on_tick",),),
        "a CPU without ticks (nohz_full) is known from its first switch on",
    ),
    Probe(
        "cpu.irq",
        "time that interrupts ran on top of a thread of the target",
        (
            ("on_irq_entry", "on_irq_exit", "on_timer_entry", "on_timer_exit"),
            ("on_irq_entry", "on_irq_exit"),
        ),
        "interrupts between CPUs are not seen, the local timer's on x86 only",
        tier="default",
    ),
    Probe(
        "cpu.softirq",
        "time that soft interrupts (network, timers, block) ran on top of a thread of the target",
        (("on_softirq_entry", "on_softirq_exit"),),
        "what ksoftirqd runs is cpu.foreign",
        tier="default",
    ),
    Probe(
        "cpu.steal",
        "time that the hypervisor gave to others while a thread of the target had the CPU",
        (("on_tick_end",),),
        "booked at the tick that follows, so its place is known to a tick; nothing where the "
        "hypervisor does not tell it",
        tier="default",
    ),
    Probe(
        "sched.yield",
        "that a thread gave the CPU away itself: time after sched_yield is no one's fault",
        (_RUN,),
    ),
    Probe("off.futex", "time blocked in futex: locks, the GIL, condition variables", (_SWITCH,)),
    Probe(
        "futex.waker",
        "who ended a wait in futex",
        (_SWITCH,),
        "counts only while it is in a system call that wakes futexes and no timer has just "
        "expired there, so a timeout blames nobody",
    ),
    Probe(
        "off.disk",
        "time blocked for a block device",
        (_SWITCH,),
        "what sleeps in io_schedule; other uninterruptible sleeps are mostly for the memory "
        "map's lock",
    ),
    Probe("off.fsync", "time blocked in fsync, fdatasync, msync, sync and syncfs", (_SWITCH,)),
    Probe("off.other", "time blocked otherwise: poll, sleep, pipes, sockets", (_SWITCH,)),
    Probe(
        "process.stop",
        "SIGSTOP, ptrace, a frozen cgroup: from stopping to being continued, in pieces of 50 ms "
        "while it lasts",
        (_SWITCH,),
        "a thread that sleeps when a v1 freezer catches it is shown as sleeping",
    ),
    Probe(
        "process.fork",
        "which threads and processes belong to the target",
        (("on_fork", "scan"),),
        "4,096 threads and 1,024 processes at a time; what is beyond is counted",
    ),
    Probe("process.exec", "that a process of the target runs another binary", (("on_exec",),)),
    Probe("process.exit", "that a thread of the target has ended", (_RUN,)),
    Probe(
        "memory.major_fault",
        "page faults that read from disk or swap, from the fault to its end",
        (("on_file_fault", "on_fault_major"), ("on_fault_major",)),
        "of files, from asking for the page on; of swap, and where the kernel has not that "
        "tracepoint, from beginning to wait for the device; in tier full all from the fault on. "
        "One that did not wait, and whose beginning is not known, counts with no time",
        tier="default",
    ),
    Probe(
        "memory.minor_fault",
        "page faults served from memory, from the fault to its end",
        (("on_fault_user", "on_fault_kernel", "on_fault_minor"),),
        "also those in system calls that touch the thread's memory; each page fault of the "
        "machine pays for it",
        tier="full",
    ),
    Probe(
        "memory.reclaim",
        "time in which a thread freed memory before it got any, for the machine or its cgroup",
        (
            (
                "on_reclaim_begin",
                "on_reclaim_end",
                "on_group_reclaim_begin",
                "on_group_reclaim_end",
            ),
        ),
        "what kswapd frees is cpu.foreign",
        tier="default",
    ),
    Probe(
        "memory.oom",
        "that the kernel kills a process of the target to get its memory",
        (("on_oom",),),
        "since Linux 6.9",
        tier="default",
    ),
    Probe(
        "block.io",
        "requests to block devices made by threads of the target, from submission to completion",
        (("on_block_start", "on_block_done"), ("on_block_issue", "on_block_complete")),
        "before Linux 6.5 not those that a worker of the kernel issues",
        tier="default",
    ),
    Probe(
        "net.retransmit",
        "time in which a TCP segment of the target was missing: from when it was written to each "
        "time that it is sent again, and until it is acknowledged",
        (("on_send", "on_retransmit", "on_segment", "on_socket_state"),),
        "of sockets that were written to since the agent came; charged to the thread that last "
        "did; of more that was written meanwhile, from the last acknowledgement on; a client that "
        "takes nothing more loses nothing",
        tier="default",
    ),
    Probe(
        "net.backpressure",
        "time in which a TCP socket of the target took no more because its client read too "
        "slowly, until more was written",
        (("on_send", "on_socket_state"),),
        "since Linux 6.3; told when it ends",
        tier="default",
    ),
    Probe(
        "step.tag",
        "the number of the step running, read from the engine's ring, so that all else is tagged "
        "by step in the kernel",
        (_RUN,),
        "read when a thread of that process leaves a CPU, or bears something; what ends at "
        "another moment gets the step last seen",
    ),
)


def probes_of(tier: Tier) -> frozenset[str]:
    """Names of the probes that a tier has."""
    return frozenset(p.name for p in PROBES if TIERS.index(p.tier) <= TIERS.index(tier))


def programs_of(tier: Tier) -> frozenset[str]:
    """Names of the programs that tell them."""
    names = probes_of(tier)
    return frozenset(
        program for p in PROBES if p.name in names for way in p.ways for program in way
    )


# The first tier that runs each program.
PROGRAM_TIERS: dict[str, Tier] = {
    program: tier for tier in reversed(TIERS) for program in programs_of(tier)
}

# What `--instrument outside` loads besides, whatever the tier: it is then the only way to know of
# requests and steps.
OUTSIDE_OBJECTS: dict[str, tuple[Program, ...]] = {
    "http": (
        Program("on_http_received", "sock_recv_length", cost_ns=230),
        Program("on_http_sent", "sock_send_length", cost_ns=2990),
        Program("on_http_segment", "tcp_probe", cost_ns=190),
        Program("on_http_state", "inet_sock_set_state", cost_ns=470),
        Program("find_followed", "iter:task"),
    ),
    "marker": (Program("on_mark", "uprobe.multi", cost_ns=810),),
}
OUTSIDE_PROBES: tuple[Probe, ...] = (
    Probe(
        "http.messages",
        "the beginning, the length and the time of each message on the TCP sockets on which the "
        "target serves HTTP, and the ends of its connections",
        (tuple(program.name for program in OUTSIDE_OBJECTS["http"]),),
        "since Linux 6.3; of each call 4 KiB at most are copied, looked at and forgotten; what is "
        "ciphered or goes through io_uring is only counted",
    ),
    Probe(
        "step.mark",
        "that the target enters a function which it enters once a step",
        (("on_mark",),),
        "since Linux 6.6; calls within 0.2 ms of each other are one step; of several ranks, those "
        "of the first process to call",
    ),
)
