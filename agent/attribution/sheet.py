"""Adds charges up into the parts of an account, with their evidence and culprits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsagent.agent.attribution.account import Culprit, DelayedBy, Evidence, How, Part
from dsagent.agent.attribution.pieces import Blame

UNATTRIBUTED = "unattributed"
# Other requests are to blame for all of these: their lists add up to the part.
DELAYED_BY = frozenset({"batch.prefill_interference", "batch.not_scheduled", "queue.wait"})
MOST_CULPRITS = 16
KERNEL_PID = 0


@dataclass(slots=True)
class Charge:
    """Some nanoseconds, charged to one cause."""

    cause: str
    ns: int
    how: How = "measured"
    by_request: Mapping[int, int] = field(default_factory=dict)  # request_key → ns
    blames: tuple[Blame, ...] = ()
    facts: int = 0
    tokens: int = 0  # of other requests, where they are the cause
    stretches: int = 1  # that it stands for


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some of a request's life with what it is charged to; Σ charges == its length."""

    start_ns: int
    end_ns: int
    charges: Sequence[Charge]


@dataclass(slots=True)
class _Line:
    """One cause's line of the sheet."""

    ns: int = 0
    stretches: int = 0
    by_how: dict[How, int] = field(default_factory=dict)
    by_request: dict[int, int] = field(default_factory=dict)
    by_task: dict[tuple[int, int], int] = field(default_factory=dict)
    facts: int = 0
    tokens: int = 0

    def add(self, charge: Charge) -> None:
        self.ns += charge.ns
        self.stretches += charge.stretches
        self.by_how[charge.how] = self.by_how.get(charge.how, 0) + charge.ns
        self.facts += charge.facts
        self.tokens += charge.tokens
        for key, ns in charge.by_request.items():
            self.by_request[key] = self.by_request.get(key, 0) + ns
        for blame in charge.blames:
            task = (blame.pid, blame.tid)
            self.by_task[task] = self.by_task.get(task, 0) + blame.ns


def sum_up(
    stretches: Sequence[Stretch],
    names: Mapping[int, str],
    requests: Mapping[int, tuple[str, str]],
    of_model: Sequence[Evidence],
) -> tuple[tuple[Part, ...], int, tuple[DelayedBy, ...]]:
    """Parts (largest first), unattributed nanoseconds, and which request delayed this one.

    `names`: comm by pid or tid. `requests`: id and trace id by request_key. `of_model`: what
    modelled parts rest on."""
    lines: dict[str, _Line] = {}
    for stretch in stretches:
        for charge in stretch.charges:
            if charge.ns:
                line = lines.get(charge.cause)
                if line is None:
                    line = lines[charge.cause] = _Line()
                line.add(charge)
    unattributed = lines.pop(UNATTRIBUTED, _Line())
    parts = []
    delayed_by = []
    for cause, line in sorted(lines.items(), key=lambda item: -item[1].ns):
        by_request = sorted(line.by_request.items(), key=lambda item: -item[1])
        named = [(ns, *_request(key, requests)) for key, ns in by_request]
        if cause in DELAYED_BY:
            delayed_by += [DelayedBy(cause, id_, trace, ns) for ns, id_, trace in named]
        culprits = [Culprit("request", id_, ns, None, id_, trace) for ns, id_, trace in named]
        culprits += _tasks(line.by_task, names)
        parts.append(
            Part(
                cause,
                line.ns,
                max(line.by_how, key=line.by_how.__getitem__),
                tuple(_evidence(line, of_model)),
                tuple(sorted(culprits, key=lambda culprit: -culprit.ns)[:MOST_CULPRITS]),
            )
        )
    return tuple(parts), unattributed.ns, tuple(delayed_by)


def _evidence(line: _Line, of_model: Sequence[Evidence]) -> list[Evidence]:
    found = []
    if line.facts:
        found.append(Evidence("kernel", "intervals", line.facts, "{interval}"))
    else:
        found.append(Evidence("steps", "stretches", line.stretches, "{stretch}"))
    if line.tokens:
        found.append(Evidence("steps", "tokens of other requests", line.tokens, "{token}"))
    if "modelled" in line.by_how or "assumed" in line.by_how:
        found += of_model
    return found


def _request(key: int, requests: Mapping[int, tuple[str, str]]) -> tuple[str, str]:
    """Its id and trace id; one that was opened before the agent came and has not ended has
    neither yet."""
    return requests.get(key) or (f"unknown-{key:016x}", "0" * 32)


def _tasks(by_task: Mapping[tuple[int, int], int], names: Mapping[int, str]) -> list[Culprit]:
    culprits = []
    for (pid, tid), ns in by_task.items():
        if pid == KERNEL_PID:
            culprits.append(Culprit("process", names.get(0, "kernel"), ns, 0))
        elif tid and tid != pid:
            culprits.append(Culprit("thread", names.get(tid, f"tid {tid}"), ns, pid))
        else:
            culprits.append(Culprit("process", names.get(pid, f"pid {pid}"), ns, pid))
    return culprits
