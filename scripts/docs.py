"""Writes what is generated in docs/: the tables of a recording, metrics, probes, boards."""

from __future__ import annotations

import json
from pathlib import Path

from dsagent.agent.fleet.measured import load_measured
from dsagent.agent.fleet.size import Fleet, figure, size
from dsagent.agent.metrics.catalog import (
    AGENT_METRICS,
    ANOMALY_METRICS,
    ENGINE_METRICS,
    ENGINE_SPAN_METRICS,
    GPU_METRICS,
    KERNEL_METRICS,
    PROCESS_METRICS,
    REQUEST_METRICS,
    SIDECAR_METRICS,
    SLO_METRICS,
    STEP_METRICS,
    TALLY_METRICS,
)
from dsagent.agent.metrics.metric import prometheus_label
from dsagent.agent.metrics.served import QUANTITIES, SERVED_METRICS
from dsagent.agent.probes import (
    OBJECTS,
    OUTSIDE_OBJECTS,
    OUTSIDE_PROBES,
    PROBES,
    PROGRAM_TIERS,
    Probe,
    Program,
)
from dsagent.agent.sinks.schema import document
from dsagent.dashboards.generate import generated as boards

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKER = "<!-- generated from here on by scripts/docs.py -->\n"

GROUPS = {
    "Requests": REQUEST_METRICS,
    "Objectives (with --slo)": SLO_METRICS,
    "Anomalies (with --anomalies)": ANOMALY_METRICS,
    "Engine steps": STEP_METRICS,
    "The kernel": KERNEL_METRICS,
    "The agent itself": AGENT_METRICS,
    "The sidecar itself": SIDECAR_METRICS,
    "Devices": GPU_METRICS,
    "Processes": PROCESS_METRICS,
    "The engine's own spans": ENGINE_SPAN_METRICS,
    "Experts and drafts": TALLY_METRICS,
    "What the engine says of itself": SERVED_METRICS,
    "Of the reference engine's own /metrics": ENGINE_METRICS,
}


def metrics() -> str:
    lines = []
    for title, group in GROUPS.items():
        lines += [f"## {title}", "", "| OTLP | Prometheus | kind, unit | labels | meaning |"]
        lines.append("|---|---|---|---|---|")
        for metric in group:
            labels = ", ".join(prometheus_label(name) for name in metric.attributes)
            lines.append(
                f"| {metric.name} | {metric.prometheus} | {metric.kind}, {metric.unit} "
                f"| {labels} | {metric.description} |"
            )
        lines.append("")
    lines += [
        "## By what names engines say it",
        "",
        "| metric | the engine's own name | of which engine |",
        "|---|---|---|",
    ]
    lines += [
        f"| {quantity.metric.name} | {spelling.name} | {spelling.who} |"
        for quantity in QUANTITIES
        for spelling in quantity.spellings
    ]
    lines.append("")
    return "\n".join(lines)


def panels() -> str:
    """Board by board, what its panels show."""
    lines = []
    for text in boards().values():
        board = json.loads(text)
        lines += [f"### {board['title'].removeprefix('dsagent: ')}", ""]
        lines += ["| panel | what it shows |", "|---|---|"]
        lines += [
            f"| {panel['title']} | {panel['description']} |"
            for panel in board["panels"]
            if panel["type"] not in ("row", "text")
        ]
        lines.append("")
    return "\n".join(lines)


def probes() -> str:
    """Probe by probe, then program by program."""
    lines = ["| probe | tier | measures | programs | limits |", "|---|---|---|---|---|"]
    lines += [_probe(probe, probe.tier) for probe in PROBES]
    lines += [_probe(probe, "outside") for probe in OUTSIDE_PROBES]
    lines += ["", "| program | tier | object | attached to | a run |", "|---|---|---|---|---|"]
    for name, group in OBJECTS.items():
        lines += [_program(program, PROGRAM_TIERS[program.name], name) for program in group]
    for name, group in OUTSIDE_OBJECTS.items():
        lines += [_program(program, "outside", name) for program in group]
    return "\n".join([*lines, ""])


def _probe(probe: Probe, tier: str) -> str:
    ways = "; else ".join(", ".join(way) for way in probe.ways)
    return f"| {probe.name} | {tier} | {probe.measures} | {ways} | {probe.limits} |"


def _program(program: Program, tier: str, owner: str) -> str:
    cost_ns = program.cost_ns
    cost = "not measured" if cost_ns is None else f"{cost_ns / 1000:.2f} µs"
    return f"| {program.name} | {tier} | {owner} | {program.hook} | {cost} |"


def fleet() -> str:
    """What a pod was measured to send, and what 10,000 such need."""
    one = load_measured()
    lines = ["### One pod, measured", "", "| | |", "|---|---|"]
    for name, value in one.json().items():
        shown = value if isinstance(value, str) else figure(value)
        lines.append(f"| {name} | {shown} |")
    lines += [
        "",
        "### 10,000 such pods",
        "",
        "| who | what | | by | source |",
        "|---|---|---|---|---|",
    ]
    for line in size(one, Fleet(10_000)):
        value = f"{figure(line.value)} {line.unit}".strip()
        lines.append(f"| {line.who} | {line.what} | {value} | {line.rule} | {line.source} |")
    return "\n".join([*lines, ""])


def generated() -> dict[Path, str]:
    """What each file should hold: its written beginning, then what is generated."""
    ends = {
        DOCS / "schemas.md": document(),
        DOCS / "metrics.md": metrics(),
        DOCS / "probes.md": probes(),
        DOCS / "dashboards.md": panels(),
        DOCS / "fleet.md": fleet(),
    }
    return {
        path: f"{path.read_text(encoding='utf-8').partition(MARKER)[0]}{MARKER}\n{end}"
        for path, end in ends.items()
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
