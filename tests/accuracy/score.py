"""From judged requests to the table. Pure: no clock, no files, no agent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

AFFECTED_RATIO = 0.10  # of e2e, from which on a request counts as affected
LEAST_SIZE = 3.0  # times the A/A spread, from which on a size is scored


@dataclass(frozen=True, slots=True)
class Case:
    """One request: what was done to it, what the account says, what the baseline says."""

    fault: str
    e2e_ns: int
    done_ns: float  # injected, by the truth; 0: nothing
    said_ns: float  # charged to the right causes
    right: bool  # the top cause is one of them
    named: bool | None  # the culprit is right; None: there is none to name
    false_alarm: bool  # names a fault that was not there
    baseline_right: bool
    unattributed_ns: int = 0
    measured_ns: int = 0
    modelled_ns: int = 0
    assumed_ns: int = 0
    spread_ns: float = 0.0  # of the truth itself where nothing was done
    sized: bool = True
    detail: str = ""  # the account in one line, for who looks into it

    @property
    def affected(self) -> bool:
        return self.done_ns >= AFFECTED_RATIO * self.e2e_ns

    @property
    def size_error(self) -> float | None:
        if not self.sized or not self.affected or self.done_ns < LEAST_SIZE * self.spread_ns:
            return None
        return abs(self.said_ns - self.done_ns) / self.done_ns


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. Absent figures are None."""

    name: str
    size_ratio: float | None  # injected time by e2e, the median affected request
    requests: int  # affected ones
    top1_ratio: float | None
    culprit_ratio: float | None
    size_error_p50: float | None
    false_alarm_ratio: float | None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many requests stand behind a row's figures."""

    right: int
    affected: int
    named: int
    nameable: int
    sized: int
    alarms: int
    unaffected: int
    baseline_right: int


@dataclass(frozen=True, slots=True)
class Score:
    rows: tuple[Row, ...]
    counts: dict[str, Counts]
    baseline_top1_ratio: float | None
    baseline_by_fault: dict[str, float | None]
    top1_ratio: float | None
    culprit_ratio: float | None
    false_alarm_ratio: float | None
    size_error_p50: float | None
    unattributed_ratio_p50: float | None
    how_ratios: dict[str, float]  # measured, modelled, assumed, unattributed: of all time

    def to_json(self, not_run: dict[str, str]) -> dict[str, Any]:
        """build/accuracy.json."""
        return {
            "faults": [asdict(row) for row in self.rows],
            "not_run": [{"name": n, "reason": reason} for n, reason in not_run.items()],
            "baseline": {"top1_ratio": self.baseline_top1_ratio},
            "top1_ratio": self.top1_ratio,
            "culprit_ratio": self.culprit_ratio,
            "false_alarm_ratio": self.false_alarm_ratio,
            "size_error_p50": self.size_error_p50,
            "unattributed_ratio_p50": self.unattributed_ratio_p50,
        }


def ratio(found: int, of: int) -> float | None:
    return found / of if of else None


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return median(listed) if listed else None


def score(cases: Sequence[Case], order: Sequence[str]) -> Score:
    """The table of the faults in `order`; those of which there is no case are left out."""
    rows: list[Row] = []
    counts: dict[str, Counts] = {}
    baseline: dict[str, float | None] = {}
    for name in order:
        mine = [case for case in cases if case.fault == name]
        if not mine:
            continue
        row, count = _row(name, mine)
        rows.append(row)
        counts[name] = count
        baseline[name] = ratio(count.baseline_right, count.affected)
    affected = [case for case in cases if case.affected]
    unaffected = [case for case in cases if not case.done_ns]
    nameable = [case for case in affected if case.named is not None]
    errors = [case.size_error for case in affected]
    total_ns = sum(case.e2e_ns for case in cases) or 1
    return Score(
        rows=tuple(rows),
        counts=counts,
        baseline_top1_ratio=ratio(sum(c.baseline_right for c in affected), len(affected)),
        baseline_by_fault=baseline,
        top1_ratio=ratio(sum(c.right for c in affected), len(affected)),
        culprit_ratio=ratio(sum(bool(c.named) for c in nameable), len(nameable)),
        false_alarm_ratio=ratio(sum(c.false_alarm for c in unaffected), len(unaffected)),
        size_error_p50=_median(error for error in errors if error is not None),
        unattributed_ratio_p50=_median(c.unattributed_ns / c.e2e_ns for c in unaffected),
        how_ratios={
            "measured": sum(c.measured_ns for c in cases) / total_ns,
            "modelled": sum(c.modelled_ns for c in cases) / total_ns,
            "assumed": sum(c.assumed_ns for c in cases) / total_ns,
            "unattributed": sum(c.unattributed_ns for c in cases) / total_ns,
        },
    )


def _row(name: str, cases: Sequence[Case]) -> tuple[Row, Counts]:
    affected = [case for case in cases if case.affected]
    unaffected = [case for case in cases if not case.done_ns]
    nameable = [case for case in affected if case.named is not None]
    errors = [error for case in affected if (error := case.size_error) is not None]
    counts = Counts(
        right=sum(c.right for c in affected),
        affected=len(affected),
        named=sum(bool(c.named) for c in nameable),
        nameable=len(nameable),
        sized=len(errors),
        alarms=sum(c.false_alarm for c in unaffected),
        unaffected=len(unaffected),
        baseline_right=sum(c.baseline_right for c in affected),
    )
    row = Row(
        name=name,
        size_ratio=_median(c.done_ns / c.e2e_ns for c in affected),
        requests=len(affected),
        top1_ratio=ratio(counts.right, counts.affected),
        culprit_ratio=ratio(counts.named, counts.nameable),
        size_error_p50=_median(errors),
        false_alarm_ratio=ratio(counts.alarms, counts.unaffected),
    )
    return row, counts


def wilson(found: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence bounds of a ratio; (0, 1) of nothing."""
    if not of:
        return 0.0, 1.0
    p = found / of
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * (p * (1 - p) / of + z * z / (4 * of * of)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


COLUMNS = (
    *("fault", "injected / e2e", "affected", "top cause right", "culprit right"),
    *("size error p50 (requests)", "false alarms", "baseline right"),
)


def table(result: Score, not_run: dict[str, str]) -> str:
    """Markdown: each figure with the number of requests behind it."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * (len(COLUMNS) - 1)]
    for row in result.rows:
        count = result.counts[row.name]
        cells = [
            row.name,
            "" if row.size_ratio is None else f"{row.size_ratio:.2f}",
            str(row.requests),
            _of(count.right, count.affected),
            _of(count.named, count.nameable),
            "" if row.size_error_p50 is None else f"{row.size_error_p50:.1%} ({count.sized})",
            _of(count.alarms, count.unaffected),
            _of(count.baseline_right, count.affected),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    total = {
        "top cause right": result.top1_ratio,
        "culprit right": result.culprit_ratio,
        "size error, median": result.size_error_p50,
        "false alarms": result.false_alarm_ratio,
        "unattributed share of e2e, median unaffected request": result.unattributed_ratio_p50,
        "trivial baseline, top cause right": result.baseline_top1_ratio,
    }
    lines += ["", "| over all requests | |", "|---|---|"]
    lines += [f"| {k} | {'' if v is None else f'{v:.1%}'} |" for k, v in total.items()]
    lines += [f"| time {name} | {share:.1%} |" for name, share in result.how_ratios.items()]
    if not_run:
        lines += ["", "| not run | why |", "|---|---|"]
        lines += [f"| {name} | {reason} |" for name, reason in not_run.items()]
    return "\n".join(lines)


def _of(found: int, of: int) -> str:
    return f"{found} of {of}" if of else ""
