"""What the operating system did to the engine's threads."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.dashboards.board import start
from dsagent.dashboards.panels import buckets, lines, query
from dsagent.dashboards.queries import OF_AGENT, by, heat, rate

HOW_TO_READ = """\
Each heatmap holds one observation a step: what that kind took from the engine's threads in it, \
summed over them. **Run queue**: others wanted the same CPU (`dsagent why` names them). \
**Throttled**: the cgroup's CPU quota is used up; raise limits.cpu. **Major faults**: memory \
that had been given to others came back from a disk. **Steal**: the hypervisor's other guests. \
Futex sleeps include the team's own barriers, so that a steady band there is normal; a *new* one \
is not. No colour: it did not happen. That nobody looked shows on *the agent itself*."""

HEATMAPS = (
    ("Run queue", "runqueue", "Runnable, not running: another task had the CPU."),
    ("Throttled", "throttled", "Runnable, held back by the cgroup's CPU quota."),
    ("Major faults", "major_fault", "Page faults that waited for a disk, from fault to return."),
    ("Minor faults", "minor_fault", "Page faults served from memory, from fault to return."),
    ("Interrupts", "irq", "Interrupts and softirqs on top of the engine's threads."),
    ("Steal", "steal", "The hypervisor gave the CPU to somebody else."),
    ("Futex sleeps", "off_futex", "Asleep for a lock, or for the team at a barrier."),
    (
        "Disk, stops, freeing memory",
        "off_disk|off_fsync|reclaim|stopped",
        "Waiting for a disk, freeing memory before getting some, or stopped.",
    ),
)


def board() -> dashboard.Dashboard:
    made = start("kernel", "What the operating system took from the engine.", HOW_TO_READ)
    made.with_row(dashboard.Row("Taken from each step"))
    for title, kinds, what in HEATMAPS:
        matchers = f'{OF_AGENT},kind=~"{kinds}"'
        made.with_panel(buckets(title, "s", what, heat(catalog.KERNEL_DELAY, matchers)))
    made.with_row(dashboard.Row("Altogether"))
    made.with_panel(
        lines(
            "Taken, by kind",
            "percentunit",
            "Thread-seconds per second of steps: with several threads this may exceed 1.",
            query(by("kind", rate(catalog.KERNEL_DELAY, suffix="_sum")), "{{kind}}"),
        )
    )
    made.with_panel(
        lines(
            "What of it delayed requests",
            "percentunit",
            "Seconds of requests' lives per second, by cause: what counted, of the above.",
            query(
                by(
                    "cause",
                    rate(
                        catalog.REQUEST_CAUSE,
                        f'{OF_AGENT},cause=~"cpu[.].*|memory[.].*|io[.].*|lock[.].*|process[.].*"',
                    ),
                ),
                "{{cause}}",
            ),
            stacked=True,
        )
    )
    _processes(made)
    return made


def _processes(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Processes of the target"))
    process = "process_executable_name"
    for title, unit, what, target in (
        (
            "CPU",
            "percentunit",
            "In cores, by process.",
            query(by(process, rate(catalog.PROCESS_CPU_TIME)), f"{{{{{process}}}}}"),
        ),
        (
            "Time throttled by the cgroup",
            "percentunit",
            catalog.CGROUP_CPU_THROTTLED.description,
            query(f"sum({rate(catalog.CGROUP_CPU_THROTTLED)})", "throttled"),
        ),
        (
            "Page faults",
            "cps",
            catalog.PROCESS_PAGING_FAULTS.description,
            query(
                by("system_paging_fault_type", rate(catalog.PROCESS_PAGING_FAULTS)),
                "{{system_paging_fault_type}}",
            ),
        ),
        (
            "Context switches",
            "cps",
            "Involuntary ones: the CPU was taken from a thread that could go on.",
            query(
                by("process_context_switch_type", rate(catalog.PROCESS_CONTEXT_SWITCHES)),
                "{{process_context_switch_type}}",
            ),
        ),
        (
            "Memory",
            "bytes",
            "Resident, by process.",
            query(
                f"sum by ({process}) ({catalog.PROCESS_MEMORY_USAGE.prometheus}{{{OF_AGENT}}})",
                f"{{{{{process}}}}}",
            ),
        ),
        (
            "CPUs of the machine",
            "percentunit",
            "All CPUs, by mode, in cores: whether there was any to be had.",
            query(by("cpu_mode", rate(catalog.SYSTEM_CPU_TIME)), "{{cpu_mode}}"),
        ),
    ):
        made.with_panel(lines(title, unit, what, target))
