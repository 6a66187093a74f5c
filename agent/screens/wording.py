"""Causes, figures and the sentence on top, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsagent.agent.attribution.account import USUAL, USUAL_FACT, WORTH_NAMING_RATIO, excess_ns
from dsagent.agent.host.procfs import escape
from dsagent.agent.screens.remedies import REMEDIES

# What the time was spent on, to follow "Slow because: 62% …" and to stand beside a cause.
CAUSE_TEXT = {
    "frontend.in": "HTTP and tokenising",
    "frontend.out": "detokenising and sending the tail",
    "queue.wait": "waiting for a place in the batch",
    "queue.kv_blocks": "waiting for KV memory",
    "batch.not_scheduled": "left out of steps whose budget went to others",
    "preempted": "taken out of the batch and computed again",
    "prefill.compute": "computing its own prompt",
    "decode.compute": "computing its own tokens",
    "batch.prefill_interference": "waiting behind others' prefill",
    "batch.decode_sharing": "sharing steps with others' decodes",
    "rank.wait": "waiting for the slowest rank",
    "engine.host": "scheduling, sampling and Python in the step",
    "engine.gap": "the engine idle between steps",
    "engine.stalled": "the engine's loop standing still",
    "cpu.runqueue": "waiting while other tasks had the CPU",
    "cpu.throttled": "held back by its CPU quota",
    "cpu.steal": "the CPU taken by the hypervisor",
    "cpu.irq": "interrupts",
    "cpu.slowed": "running slower beside a busy neighbour",
    "lock.wait": "waiting for a lock",
    "memory.major_fault": "pages read back from disk",
    "memory.minor_fault": "page faults",
    "memory.reclaim": "the kernel freeing memory",
    "io.block": "waiting for a disk",
    "net.retransmit": "lost segments sent again",
    "net.backpressure": "a client that reads slowly",
    "process.stopped": "the process stopped (SIGSTOP, freezer, debugger)",
    "gpu.launch_gap": "the GPU waiting for launches",
    "gpu.throttled": "the GPU holding its clocks back",
    "unobserved": "before the agent attached, or a source was off",
    "unattributed": "not explained by any evidence",
}


def ms(ns: float) -> str:
    """Three significant digits, in ms, or in s from one second on."""
    if ns == 0:
        return "0 ms"
    if ns < 999_500:
        return f"{ns / 1e6:.2f} ms"
    unit, value = ("ms", ns / 1e6) if ns < 999.5e6 else ("s", ns / 1e9)
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def counted(count: int, noun: str) -> str:
    """`1 step`, `20 steps`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(identifier: str) -> str:
    """Of a long id its beginning, which is enough for `dsagent explain`."""
    return escape(identifier if len(identifier) <= 20 else identifier[:17] + "…")


def percent(ratio: float) -> str:
    value = ratio * 100
    if 0 < value < 0.1:
        return "<0.1%"
    return f"{value:.1f}%" if 0 < value < 9.95 else f"{value:.0f}%"


def blame(culprits: Sequence[Mapping[str, Any]]) -> str:
    """Who is to blame most, and how many others are."""
    ranked = sorted(culprits, key=lambda each: -each["ns"])
    if not ranked:
        return ""
    return who(ranked[0]) + (f" +{len(ranked) - 1}" if len(ranked) > 1 else "")


def how_text(part: Mapping[str, Any]) -> str:
    """How a part is known, and who is to blame for most of it."""
    blamed = blame(part["culprits"])
    return f"{part['how']}: {blamed}" if blamed else str(part["how"])


def because(document: Mapping[str, Any]) -> str:
    """One sentence: what was unusual about its time and who is to blame; what its usual work
    took where nothing was."""
    total_ns = max(1, document["e2e_ns"])
    ranked = sorted(document["parts"], key=lambda part: -part["ns"])
    unusual = _unusual(document)
    if _is_unexplained(document, unusual):
        ratio = document["unattributed_ns"] / total_ns
        return f"Mostly unexplained: no evidence names a cause for {percent(ratio)} of it."
    if unusual:
        return "Slow because: " + ", ".join(_clause(part, total_ns) for part in unusual[:3]) + "."
    if ranked:
        return "Nothing held it up: " + ", ".join(_clause(p, total_ns) for p in ranked[:2]) + "."
    return "Nothing is known of where its time went."


def remedy(document: Mapping[str, Any]) -> str:
    """What to do about what held the request up most; empty where nothing did."""
    unusual = _unusual(document)
    if _is_unexplained(document, unusual):
        return REMEDIES["unattributed"]
    return REMEDIES[unusual[0]["cause"]] if unusual else ""


def remedy_of_all(causes: Sequence[Mapping[str, Any]]) -> str:
    """The same for many requests: about the largest cause that is not their own work."""
    ranked = sorted(causes, key=lambda each: -each["ratio"])
    for each in ranked:
        if each["cause"] not in USUAL and each["ratio"] >= WORTH_NAMING_RATIO:
            return REMEDIES[each["cause"]]
    return ""


def _unusual(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts that took enough more than usual to be named, the worst first."""
    least_ns = WORTH_NAMING_RATIO * max(1, document["e2e_ns"])
    named = (part for part in document["parts"] if _excess_ns(part) >= least_ns)
    return sorted(named, key=lambda part: (-_excess_ns(part), -part["ns"]))


def _is_unexplained(document: Mapping[str, Any], unusual: Sequence[Mapping[str, Any]]) -> bool:
    largest_ns = max((part["ns"] for part in unusual[:1] or document["parts"]), default=0)
    return bool(document["unattributed_ns"] > largest_ns)


def _excess_ns(part: Mapping[str, Any]) -> int:
    usual_ns = next((e["value"] for e in part["evidence"] if e["fact"] == USUAL_FACT), None)
    return excess_ns(part["cause"], part["ns"], usual_ns)


def _clause(part: Mapping[str, Any], total_ns: int) -> str:
    clause = f"{percent(part['ns'] / total_ns)} {CAUSE_TEXT.get(part['cause'], part['cause'])}"
    culprits = sorted(part["culprits"], key=lambda each: -each["ns"])
    if not culprits:
        return clause
    return f"{clause} (most of all {who(culprits[0])})"


def who(culprit: Mapping[str, Any]) -> str:
    if culprit["kind"] == "request":
        return f"request {short(culprit['request_id'] or culprit['name'])}"
    return escape(culprit["name"])
