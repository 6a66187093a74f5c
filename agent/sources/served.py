"""The source "served": what the engine says of itself at its own /metrics, found by its sockets.

A thread of its own asks, since another process may take its time to answer.
What it counts is held against what we have counted meanwhile, each time that
both have come to rest; where the two differ, an event says so.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Event, Readings, Sample, SourceStatus, Target
from dsagent.agent.host import procfs
from dsagent.agent.host.sockets import Listening, listening
from dsagent.agent.metrics.exposition import parse
from dsagent.agent.metrics.served import NAMES, QUANTITIES, quantities

EVERY_NS = 5_000_000_000
TIMEOUT_S = 2.0  # of a whole question
MOST_BYTES = 8 << 20
MOST_PORTS = 16  # asked for /metrics when it is looked for
LOOK_AGAIN_ROUNDS = 15
TOLERANCE_RATIO = 0.02
# Processes of an engine that listen for their like only: what comes in there that is not meant for
# them (a store of torch.distributed's, ZeroMQ) may confuse them. Cut to 15 characters.
_INSIDE = (
    "VLLM::EngineCor",
    "VLLM::Worker",
    "VLLM::DPCoordi",
    "sglang::schedul",
    "sglang::detoken",
)
_NOT_ASKED = "not asked yet"

Counts = Mapping[str, float]  # by a quantity's key


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What both have counted between two moments at rest."""

    key: str
    ours: float
    theirs: float

    @property
    def agrees(self) -> bool:
        return abs(self.ours - self.theirs) <= max(1.0, TOLERANCE_RATIO * self.theirs)


class ServedSource:
    """agent/facts.py's Source. `counted`: our own counts so far, and None while something is going
    on that may change them."""

    name = "served"

    def __init__(
        self,
        target: Target,
        pids: Callable[[], Sequence[int]],
        counted: Callable[[], Counts | None] = lambda: None,
    ) -> None:
        self._target = target
        self._pids = pids
        self._counted = counted
        self._place: tuple[str, int] | None = None
        self._thread: threading.Thread | None = None
        self._answer: dict[str, float] | None = None
        self._why = _NOT_ASKED
        self._next_ns = 0
        self._round = 0
        self._at_rest: tuple[Counts, Counts] | None = None  # ours and theirs, last time
        self._rested: Counts | None = None  # ours when the question was put
        self._told: set[str] = set()
        self.reconciled: tuple[Reconciled, ...] = ()

    def start(self) -> None:
        if not _same_network(self._target.pid):
            raise SourceUnavailable("the target is in another network namespace")

    def poll(self, now_ns: int) -> Readings:
        readings = Readings()
        if self._thread is not None:
            if self._thread.is_alive():
                return readings
            self._thread = None
            self._take(now_ns, readings)
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + EVERY_NS
            self._rested = self._counted()
            self._thread = threading.Thread(target=self._ask, name="served", daemon=True)
            self._thread.start()
        return readings

    def _ask(self) -> None:
        """In the thread: asks where an answer came from before, or everywhere."""
        self._answer = None
        self._round += 1
        if self._place is None and self._round % LOOK_AGAIN_ROUNDS != 1 and self._round > 3:
            return
        places = [self._place] if self._place else _places(self._pids())
        self._why = "it listens on no TCP port"
        for place in places:
            try:
                found = quantities(parse(_get(*place), NAMES))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._why = f"no /metrics at port {place[1]}: {type(error).__name__}"
                continue
            if found:
                self._place, self._answer = place, found
                return
            self._why = f"nothing that is known at port {place[1]}'s /metrics"
        self._place = None

    def _take(self, now_ns: int, readings: Readings) -> None:
        if self._answer is None:
            return
        by_key = {quantity.key: quantity for quantity in QUANTITIES}
        readings.samples += [
            Sample(by_key[key].metric.name, value, now_ns) for key, value in self._answer.items()
        ]
        busy = self._answer.get("requests.running", 0) + self._answer.get("requests.waiting", 0)
        ours = self._counted()
        # At rest before the question and after the answer: nothing has changed in between.
        if busy or ours is None or ours != self._rested:
            return
        if self._at_rest is not None:
            readings.events += self._compare(ours, self._answer, now_ns)
        else:
            self._at_rest = ours, self._answer

    def _compare(self, ours: Counts, theirs: Counts, now_ns: int) -> list[Event]:
        assert self._at_rest is not None
        ours_before, theirs_before = self._at_rest
        self.reconciled = tuple(
            Reconciled(key, ours[key] - ours_before[key], theirs[key] - theirs_before[key])
            for key in ours
            if key in theirs and key in theirs_before and key in ours_before
        )
        if any(each.theirs < 0 for each in self.reconciled):  # it has been started anew
            self._at_rest = ours, theirs
            self.reconciled = ()
            return []
        events = []
        for each in self.reconciled:
            if each.agrees:
                self._told.discard(each.key)
            elif each.key not in self._told:
                self._told.add(each.key)
                message = (
                    f"{each.key}: the engine says {each.theirs:.0f}, we have seen {each.ours:.0f}"
                )
                events.append(Event("served.mismatch", now_ns, message))
        return events

    def status(self) -> SourceStatus:
        if self._why == _NOT_ASKED:
            return SourceStatus(self.name, "ok", self._why)
        if self._place is None:
            return SourceStatus(self.name, "unavailable", self._why)
        compared = ", ".join(
            f"{each.key} {each.ours:.0f} of {each.theirs:.0f}" for each in self.reconciled
        )
        reason = f"port {self._place[1]}" + (f"; seen by us: {compared}" if compared else "")
        return SourceStatus(self.name, "ok", reason)

    def stop(self) -> None:
        """The thread, if one is asking, ends within its timeout, or with the process."""


def _same_network(pid: int) -> bool:
    """The addresses of another namespace are not ours to reach."""
    try:
        theirs = os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return False
    return theirs == os.stat("/proc/self/ns/net").st_ino


def _places(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Where the target listens; only addresses of this machine."""
    sockets: dict[int, Listening] = {}
    for pid in pids:
        if not _is_inside(pid):
            for each in listening(pid):
                sockets.setdefault(each.inode, each)
    places = []
    for each in sockets.values():
        address = ipaddress.ip_address(each.address)
        if address.is_unspecified:
            host = "127.0.0.1" if address.version == 4 else "::1"
        else:
            host = each.address
        places.append((host, each.port))
    return list(dict.fromkeys(places))[:MOST_PORTS]


def _is_inside(pid: int) -> bool:
    try:
        return procfs.read_stat(pid).comm.startswith(_INSIDE)
    except (procfs.ProcessGone, PermissionError):
        return True


class _Hurried(socket.socket):
    """Whatever it still receives must have come by one moment: a time-out of each read alone would
    let a server that drips hold us for as long as it likes."""

    deadline_s = 0.0  # of time.monotonic()

    def recv_into(self, *arguments: Any) -> int:
        self.hurry()
        return super().recv_into(*arguments)

    def hurry(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.settimeout(left_s)


def _get(host: str, port: int) -> str:
    deadline_s = time.monotonic() + TIMEOUT_S
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        connection.sock = hurried = _Hurried(fileno=connection.sock.detach())
        hurried.deadline_s = deadline_s
        hurried.hurry()
        connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"status {answer.status}")
        body = answer.read(MOST_BYTES + 1)
    finally:
        connection.close()
    if len(body) > MOST_BYTES:
        raise ValueError("more than 8 MiB")
    return body.decode("utf-8", "replace")
