"""What was really done to each request, known without the agent.

*logged*: the injector's clock says when. *kernel account*: a counter of the kernel that
the agent does not read (schedstat's run_delay), sampled while the lab runs: it says what
strangers did.
*counterfactual*: what the request took beyond the pace of its likes in the
neighbouring, unharmed times of the same run, by its client's clock.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count as count_from
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

from load import Sent

from dsagent.agent.attribution.account import Account

How = Literal["logged", "counterfactual"]
SAMPLE_S = 0.02
THREADS_EVERY = 25  # samples: threads come and go


class Timeline:
    """Injected time so far, as a function of time: linear between its points."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._at = [at for at, _ in points]
        self._sum = [total for _, total in points]

    @classmethod
    def of(cls, intervals: Sequence[tuple[int, int]]) -> Timeline:
        points: list[tuple[int, float]] = []
        total = 0
        for start, end in sorted(intervals):
            points.append((start, total))
            total += end - start
            points.append((end, total))
        return cls(points)

    def _until(self, moment_ns: int) -> float:
        i = bisect_left(self._at, moment_ns)
        if i == 0:
            return self._sum[0] if self._sum else 0.0
        if i == len(self._at):
            return self._sum[-1]
        low, high = self._at[i - 1], self._at[i]
        share = (moment_ns - low) / (high - low) if high > low else 1.0
        return self._sum[i - 1] + share * (self._sum[i] - self._sum[i - 1])

    def within(self, start_ns: int, end_ns: int) -> float:
        return max(0.0, self._until(end_ns) - self._until(start_ns))


@dataclass(frozen=True, slots=True)
class Injection:
    """One deed. `timeline` None: its size is the victims' excess over their pace."""

    fault: str
    start_ns: int
    end_ns: int
    timeline: Timeline | None = None
    culprits: frozenset[str] = frozenset()  # commands, threads, or trace ids: any of them
    senders: frozenset[str] = frozenset()  # trace ids of requests that are the deed
    victims: frozenset[str] | None = None  # trace ids; None: whoever was there


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of deed: what an account should say of it, and how its size is known."""

    name: str
    causes: frozenset[str]
    how: How
    # What of a request's life the deed can lengthen: [start, end).
    span: Callable[[Account, Injection], tuple[int, int]]
    sized: bool = True  # False: only the direction is known
    # Counterfactual: of the gaps between tokens only those so many times the usual count. A
    # batch that has grown slows every token a little, which is a thing of its own.
    least_gap: float = 0.0
    # Of two deeds at once: what a second one that takes the CPU away should be called. Its size is
    # the kernel's account.
    queued: frozenset[str] = frozenset()


def life(account: Account, _: Injection) -> tuple[int, int]:
    return account.record.received_ns, account.record.sent_ns


def in_engine(account: Account, _: Injection) -> tuple[int, int]:
    """From the queue to the last output: what holds up the loop cannot lengthen the rest."""
    record = account.record
    start_ns = record.queued_ns if record.queued_ns is not None else record.received_ns
    return start_ns, record.finished_ns if record.finished_ns is not None else record.sent_ns


def decoding(account: Account, injection: Injection) -> tuple[int, int]:
    """From the first token on; nothing where that came after the deed began."""
    record = account.record
    first_ns = record.first_token_ns
    if first_ns is None or first_ns > injection.start_ns:
        return record.sent_ns, record.sent_ns
    return first_ns, record.sent_ns


def until_first_token(account: Account, _: Injection) -> tuple[int, int]:
    record = account.record
    return record.received_ns, record.first_token_ns or record.sent_ns


def after_output(account: Account, _: Injection) -> tuple[int, int]:
    """Between the last output and the last byte's sending."""
    record = account.record
    return record.finished_ns or record.sent_ns, record.sent_ns


def before_queue(account: Account, _: Injection) -> tuple[int, int]:
    record = account.record
    start_ns = record.received_ns
    return start_ns, start_ns if record.queued_ns is None else record.queued_ns


class Pace:
    """What requests took where nothing was done, by how many clients were at work."""

    def __init__(self, sent: Sequence[Sent], injections: Sequence[Injection]) -> None:
        self._gaps: dict[int, list[int]] = {}
        self._firsts: dict[int, list[int]] = {}
        for one in sent:
            if one.error or one.end_ns is None or one.first_ns is None:
                continue
            if any(i.start_ns < one.end_ns and i.end_ns > one.sent_ns for i in injections):
                continue
            gaps = [b - a for a, b in pairwise(one.chunk_ns)]
            self._gaps.setdefault(one.clients, []).extend(gaps[:-2])  # the last two: no token
            self._firsts.setdefault(one.clients, []).append(one.first_ns - one.sent_ns)

    def gap_ns(self, clients: int) -> float | None:
        found = self._gaps.get(clients)
        return sum(found) / len(found) if found else None

    def first_ns(self, clients: int) -> float | None:
        found = self._firsts.get(clients)
        return median(found) if found else None

    def excess_ns(
        self, sent: Sent, start_ns: int, end_ns: int, least_gap: float = 0.0
    ) -> float | None:
        """What its tokens within [start, end) took beyond the usual. None: no likes."""
        gap_ns, first_ns = self.gap_ns(sent.clients), self.first_ns(sent.clients)
        if gap_ns is None or first_ns is None or not sent.chunk_ns:
            return None
        total = 0.0
        marks = [sent.sent_ns, *sent.chunk_ns]
        for i, (begin, end) in enumerate(pairwise(marks)):
            if end > start_ns and begin < end_ns and end > begin:
                usual_ns = first_ns if i == 0 else gap_ns
                if end - begin >= least_gap * usual_ns:
                    total += end - begin - usual_ns
        return total


HURT_RATIO = 0.10  # of its time by its client's clock, from which on a request was hurt


def hurts(
    injection: Injection, fault: Fault, sent: Sequence[Sent], injections: Sequence[Injection]
) -> bool:
    """Whether the deed took so much from anybody, as far as the clients alone can tell: who has no
    likes to compare with may have been."""
    victims = injection.victims
    if victims is not None and not any(one.trace_id in victims for one in sent):
        return bool(victims)  # the injector's own requests, which it does not show
    pace = Pace(sent, injections)
    for one in sent:
        if one.end_ns is None or one.error or one.trace_id in injection.senders:
            continue
        start_ns = max(one.sent_ns, injection.start_ns)
        end_ns = min(one.end_ns, injection.end_ns)
        if end_ns <= start_ns or (victims is not None and one.trace_id not in victims):
            continue
        if injection.timeline is not None:
            done_ns: float | None = injection.timeline.within(start_ns, end_ns)
        else:
            done_ns = pace.excess_ns(one, start_ns, end_ns, fault.least_gap)
        if done_ns is None or done_ns >= HURT_RATIO * (one.end_ns - one.sent_ns):
            return True
    return False


class KernelAccounts:
    """Samples what schedstat counts of the loop's threads, in a thread of its own.

    The loop's threads work as a gang, and the one that waits for a CPU holds up all. In each
    sample the most that one of them waited is what was lost at least, their sum what was lost
    at most."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._points: list[tuple[int, float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> KernelAccounts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def waited_least(self) -> Timeline:
        return Timeline([(at, least) for at, least, _, _ in self._points])

    @property
    def waited_most(self) -> Timeline:
        return Timeline([(at, most) for at, _, most, _ in self._points])

    @property
    def stolen(self) -> Timeline:
        """What the hypervisor took, of all CPUs together."""
        return Timeline([(at, stolen) for at, _, _, stolen in self._points])

    def _run(self) -> None:
        last: dict[Path, int] = {}
        least = most = 0.0
        threads: list[Path] = []
        for count in count_from(0):
            if self._stop.wait(SAMPLE_S):
                return
            if count % THREADS_EVERY == 0:
                threads = self._loop_threads()
            now_ns = time.monotonic_ns()
            waits = []
            for path in threads:
                with suppress(OSError):  # it has ended
                    run_delay_ns = int(path.read_text().split()[1])
                    waits.append(run_delay_ns - last.get(path, run_delay_ns))
                    last[path] = run_delay_ns
            least += max(waits, default=0)
            most += sum(waits)
            self._points.append((now_ns, least, most, _stolen_ns()))

    def _loop_threads(self) -> list[Path]:
        found = []
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            with suppress(OSError):
                if (task / "comm").read_text() == "engine-loop\n":
                    found.append(task / "schedstat")
        return found


def _stolen_ns() -> float:
    """By /proc/stat, since the machine began; in ticks of the kernel's clock."""
    with Path("/proc/stat").open() as lines:
        return int(lines.readline().split()[8]) * 1e9 / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Evidence:
    """All that one run leaves to judge by."""

    faults: dict[str, Fault]
    injections: list[Injection]
    accounts: dict[str, Account]
    sent: list[Sent] = field(default_factory=list)
    # On the run queue, at least and at most, by the kernel's account.
    waited_least: Timeline = field(default_factory=lambda: Timeline([]))
    waited_most: Timeline = field(default_factory=lambda: Timeline([]))
    stolen: Timeline = field(default_factory=lambda: Timeline([]))  # by the hypervisor

    def unharmed(self) -> Iterator[Account]:
        """Whole requests that no deed came near."""
        for account in self.accounts.values():
            record = account.record
            if not account.partial and not any(
                i.start_ns < record.sent_ns and i.end_ns > record.received_ns
                for i in self.injections
            ):
                yield account
