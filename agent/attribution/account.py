"""The answer for one request: where each nanosecond went, and who is to blame."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dsagent.instrumentation.records import RequestRecord

How = Literal["measured", "modelled", "assumed"]
CulpritKind = Literal["process", "thread", "request", "cpu", "device"]

CAUSES = (
    "frontend.in",
    "frontend.out",
    "queue.wait",
    "queue.kv_blocks",
    "batch.not_scheduled",
    "preempted",
    "prefill.compute",
    "decode.compute",
    "batch.prefill_interference",
    "batch.decode_sharing",
    "rank.wait",
    "engine.host",
    "engine.gap",
    "engine.stalled",
    "cpu.runqueue",
    "cpu.throttled",
    "cpu.steal",
    "cpu.irq",
    "cpu.slowed",
    "lock.wait",
    "memory.major_fault",
    "memory.minor_fault",
    "memory.reclaim",
    "io.block",
    "net.retransmit",
    "net.backpressure",
    "process.stopped",
    "gpu.launch_gap",
    "gpu.throttled",
    "unobserved",
)


# What a request costs when nothing is wrong: its own work, and the price of a full batch. Used
# as long as nothing better is known than the cause's name (norms.py).
USUAL = frozenset(
    {
        "frontend.in",
        "frontend.out",
        "prefill.compute",
        "decode.compute",
        "batch.decode_sharing",
        "engine.host",
    }
)
USUAL_FACT = "usual for such a request"
WORTH_NAMING_RATIO = 0.05


def excess_ns(cause: str, ns: int, usual_ns: float | None) -> int:
    """Of `ns`, what is more than usual; judged by the cause's name where that is not known."""
    if usual_ns is None:
        return 0 if cause in USUAL else ns
    return round(max(0, ns - usual_ns))


@dataclass(frozen=True, slots=True)
class Culprit:
    kind: CulpritKind
    name: str
    ns: int
    pid: int | None = None
    request_id: str | None = None
    trace_id: str | None = None  # 32 hex digits


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact a part rests on: which source said it, what, how much."""

    source: str
    fact: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Part:
    cause: str
    ns: int
    how: How
    evidence: tuple[Evidence, ...] = ()
    culprits: tuple[Culprit, ...] = ()

    @property
    def excess_ns(self) -> int:
        """What is more than usual."""
        usual_ns = next((e.value for e in self.evidence if e.fact == USUAL_FACT), None)
        return excess_ns(self.cause, self.ns, usual_ns)


@dataclass(frozen=True, slots=True)
class DelayedBy:
    """How much of a part another request is to blame for."""

    cause: str
    request_id: str
    trace_id: str
    ns: int


@dataclass(frozen=True, slots=True)
class EngineSpanFigure:
    """The same figure by the engine's own span and by our account."""

    figure: str  # the span's attribute
    engine: int
    ours: int
    unit: str  # ns, tokens
    agrees: bool  # within a bound


@dataclass(frozen=True, slots=True)
class JoinedEngineSpan:
    """The SERVER span that the engine itself exported for the request; ours is below it."""

    span_id: str  # 16 hex digits
    name: str
    scope: str  # the instrumentation scope's name
    figures: tuple[EngineSpanFigure, ...]
    replaced_trace_id: str | None = None  # what we had made up for a request without context

    def to_json(self) -> dict[str, Any]:
        return {
            "span_id": self.span_id,
            "name": self.name,
            "scope": self.scope,
            "figures": [asdict(figure) for figure in self.figures],
        }


@dataclass(frozen=True, slots=True)
class Account:
    """Σ parts + unattributed_ns == e2e_ns, and Σ ttft_parts + ttft_unattributed_ns == ttft_ns."""

    record: RequestRecord
    partial: bool  # it began before the agent attached
    finished: bool
    e2e_ns: int
    parts: tuple[Part, ...]
    unattributed_ns: int
    ttft_parts: tuple[Part, ...]
    ttft_unattributed_ns: int | None
    delayed_by: tuple[DelayedBy, ...]
    step_ids: tuple[int, ...] = field(default=())  # the steps it took part in, in order
    engine_id: int = 0
    engine_span: JoinedEngineSpan | None = None
    # what the agent, to save cost, did not look at meanwhile: probes, or a source
    not_looked_at: tuple[str, ...] = ()

    @property
    def trace_id(self) -> str:
        return f"{self.record.trace_id:032x}"

    @property
    def top(self) -> Part | None:
        """Why it was slow: the part that exceeds most what is usual, if by a twentieth of e2e or
        more; else the largest of all."""
        worst = max(self.parts, key=lambda part: part.excess_ns, default=None)
        if worst is not None and worst.excess_ns >= WORTH_NAMING_RATIO * self.e2e_ns:
            return worst
        return max(self.parts, key=lambda part: part.ns, default=None)

    def to_json(self) -> dict[str, Any]:
        """The document `explain --json` prints, less `others`; docs/schemas.md describes it."""
        record = self.record
        return {
            "trace_id": self.trace_id,
            "request_id": record.request_id,
            "external_id": record.external_id,
            "model": record.model,
            "finished": self.finished,
            "finish_reason": record.finish_reason,
            "error": record.error,
            "e2e_ns": self.e2e_ns,
            "ttft_ns": record.ttft_ns,
            "tpot_ns": None if record.tpot_ns is None else round(record.tpot_ns),
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "partial": self.partial,
            "inferred": record.inferred,
            "top_cause": None if self.top is None else self.top.cause,
            "parts": [part_json(part) for part in self.parts],
            "unattributed_ns": self.unattributed_ns,
            "ttft_parts": [part_json(part) for part in self.ttft_parts],
            "ttft_unattributed_ns": self.ttft_unattributed_ns,
            "delayed_by": [
                {"cause": d.cause, "request_id": d.request_id, "trace_id": d.trace_id, "ns": d.ns}
                for d in self.delayed_by
            ],
            "steps": len(self.step_ids),
            "not_looked_at": list(self.not_looked_at),
            "engine_span": None if self.engine_span is None else self.engine_span.to_json(),
        }


def part_json(part: Part) -> dict[str, Any]:
    return {
        "cause": part.cause,
        "ns": part.ns,
        "how": part.how,
        "evidence": [
            {"source": e.source, "fact": e.fact, "value": e.value, "unit": e.unit}
            for e in part.evidence
        ],
        "culprits": [culprit_json(culprit) for culprit in part.culprits],
    }


def culprit_json(culprit: Culprit) -> dict[str, Any]:
    return {
        "kind": culprit.kind,
        "name": culprit.name,
        "pid": culprit.pid,
        "request_id": culprit.request_id,
        "trace_id": culprit.trace_id,
        "ns": culprit.ns,
    }
