"""Whether the devices work, and what holds them back."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.catalog import Metric
from dsagent.dashboards.board import AGENTS, label_variable, start
from dsagent.dashboards.panels import lines, query, rows, shares, states
from dsagent.dashboards.queries import OF_AGENT, by, rate, ratio, series

HOW_TO_READ = """\
A row is a device. *Busy* is the share of time in which **some** kernel ran: 100 % may still be \
a small kernel on a large device, so read it beside power: busy and far below the power limit is \
waiting for memory or launches. **One row darker or lighter than its peers** is imbalance: with \
tensor parallelism all wait for the slowest (cause rank.wait). *Held back* says why clocks fell: \
power cap and thermal reasons make every step slower, idle is no fault."""

DEVICES = label_variable("device", "Device", "hw_id", catalog.GPU_MEMORY_LIMIT)
OF_DEVICE = f'{OF_AGENT},hw_id=~"$device"'


def board() -> dashboard.Dashboard:
    made = start("GPU", "The devices: busy, memory, power, clocks.", HOW_TO_READ, [AGENTS, DEVICES])
    made.with_row(dashboard.Row("By device"))
    made.with_panel(
        rows(
            "Busy",
            "percentunit",
            catalog.GPU_UTILIZATION.description,
            query(_device(catalog.GPU_UTILIZATION, "avg"), "{{hw_id}}"),
        )
    )
    made.with_panel(
        shares(
            "Memory in use",
            "Red is full.",
            query(_device(catalog.GPU_MEMORY_UTILIZATION, "max"), "{{hw_id}}"),
            cell="30s",
            good_is_high=False,
            width=12,
        )
    )
    power = ratio(_device(catalog.GPU_POWER, "max"), _device(catalog.GPU_POWER_LIMIT, "max"))
    made.with_panel(
        rows(
            "Power, of its limit",
            "percentunit",
            "Power drawn over the limit in force: near 100 % clocks are held back.",
            query(power, "{{hw_id}}"),
        )
    )
    made.with_panel(
        rows(
            "Clock, of the highest",
            "percentunit",
            "The clock of the multiprocessors over the highest it can have.",
            query(
                ratio(
                    by("hw_id", series(catalog.GPU_CLOCK, f'{OF_DEVICE},clock="sm"'), "max"),
                    by("hw_id", series(catalog.GPU_CLOCK_LIMIT, f'{OF_DEVICE},clock="sm"'), "max"),
                ),
                "{{hw_id}}",
            ),
        )
    )
    _lines(made)
    return made


def _device(metric: Metric, function: str) -> str:
    return by("hw_id", series(metric, OF_DEVICE), function)


def _lines(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("What holds them back"))
    made.with_panel(
        states(
            "Held back",
            catalog.GPU_THROTTLED.description,
            query(
                by("hw_id, reason", series(catalog.GPU_THROTTLED, OF_DEVICE), "max"),
                "{{hw_id}} {{reason}}",
            ),
            {0: ("no", "transparent"), 1: ("held back", "orange")},
        )
    )
    for title, unit, what, target in (
        (
            "Temperature",
            "celsius",
            "Of each device.",
            query(_device(catalog.GPU_TEMPERATURE, "max"), "{{hw_id}}"),
        ),
        (
            "Power",
            "watt",
            "Drawn by each device.",
            query(_device(catalog.GPU_POWER, "max"), "{{hw_id}}"),
        ),
        (
            "Memory of the target",
            "bytes",
            catalog.GPU_TARGET_MEMORY_USAGE.description,
            query(_device(catalog.GPU_TARGET_MEMORY_USAGE, "max"), "{{hw_id}}"),
        ),
        (
            "Errors",
            "cps",
            "By kind. Any uncorrected one is a reason to replace the device.",
            query(
                by("hw_id, error_type", rate(catalog.GPU_ERRORS, OF_DEVICE)),
                "{{hw_id}} {{error_type}}",
            ),
        ),
        (
            "Processes on the device",
            "short",
            "More than the target's own: somebody shares it.",
            query(_device(catalog.GPU_PROCESSES, "max"), "{{hw_id}}"),
        ),
    ):
        made.with_panel(lines(title, unit, what, target))
