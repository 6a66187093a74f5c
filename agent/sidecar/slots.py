"""Places for engines. A place outlasts the process in it: the engine that is started anew finds
its counters, its objectives and its number where they were.

The number is a label of every series and a folder of the recording, so it must not be a pid: each
restart would be new series. A place that has been empty for ten minutes is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.session.outlets import Judged
from dsagent.agent.sidecar.backoff import SECOND_NS
from dsagent.agent.sidecar.kept import Kept
from dsagent.agent.sidecar.options import AttachOptions
from dsagent.agent.sinks.collected import CollectedSink

EMPTY_NS = 600 * SECOND_NS


@dataclass(slots=True)
class Slot:
    """`command`: of the engine that it is for."""

    number: int
    command: str
    judged: Judged
    collected: CollectedSink
    kept: tuple[Kept, ...]
    occupied: bool = False
    occupations: int = 0
    empty_since_ns: int = 0

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def restarts(self) -> int:
        return max(0, self.occupations - 1)

    def end(self) -> None:
        for sink in self.kept:
            sink.end(0.0)


class Slots:
    """One thread, but for `all`."""

    def __init__(
        self,
        tell: Callable[[str, str], None] = lambda _slot, _line: None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`tell`: what alerts say, with the slot's name."""
        self._tell = tell
        self._now_ns = now_ns
        self._slots: dict[int, Slot] = {}

    def all(self) -> tuple[Slot, ...]:
        """In the order of their numbers; from any thread."""
        return tuple(sorted(self._slots.values(), key=lambda slot: slot.number))

    def take(self, command: str, options: AttachOptions, most: int) -> Slot | None:
        """A place for an engine with this command line: its own if it had one, else a new one,
        else the one that has been empty for longest. None where all are occupied. Raises
        DsagentError where its objectives cannot be had."""
        empty = [slot for slot in self._slots.values() if not slot.occupied]
        slot = next((slot for slot in empty if slot.command == command), None)
        if slot is None:
            if len(self._slots) >= most:
                if not empty:
                    return None
                self._give_up(min(empty, key=lambda each: each.empty_since_ns))
            number = next(n for n in range(most + len(self._slots)) if n not in self._slots)
            slot = self._slots[number] = self._made(number, command, options)
        slot.occupied = True
        slot.occupations += 1
        return slot

    def _made(self, number: int, command: str, options: AttachOptions) -> Slot:
        judged = Judged(options.outlets, lambda line: self._tell(str(number), line), options.slo)
        collected = CollectedSink(judged.limits, judged.sampler, judged.resource, judged.figures)
        sinks = [] if judged.sink is None else [judged.sink]
        kept = tuple(Kept(each) for each in (*sinks, collected))
        return Slot(number, command, judged, collected, kept)

    def leave(self, slot: Slot) -> None:
        slot.occupied = False
        slot.empty_since_ns = self._now_ns()

    def expire(self) -> None:
        """Gives up what has been empty for long."""
        for slot in tuple(self._slots.values()):
            if not slot.occupied and self._now_ns() - slot.empty_since_ns >= EMPTY_NS:
                self._give_up(slot)

    def give_up_all(self) -> None:
        """The settings have changed, or this is the end: none is occupied any more."""
        for slot in tuple(self._slots.values()):
            self._give_up(slot)

    def _give_up(self, slot: Slot) -> None:
        del self._slots[slot.number]
        slot.end()


def folder_of(base: Path, slot: Slot) -> Path:
    """Where a place keeps what is on disk."""
    return base / f"engine-{slot.name}"
