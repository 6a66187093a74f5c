"""Finds engines among the processes of this pid namespace, at little cost.

A process with a step ring is an engine. One without is a server to be seen from
outside if it listens, and its command line is a known server's or the one asked for.
What is neither is looked at again, ever more rarely once it is two minutes old: rings
come late, a process may become another by exec, and rights may be given later. A process
that looks like an engine, and is none yet, is looked at each time.

A vLLM server is one engine: it is found as soon as its engine's core has a ring, which
is before it serves. A core or a worker that has outlived its server is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import PROC, ProcessGone, ProcessTree
from dsagent.agent.host.sockets import listening
from dsagent.agent.host.target import VLLM_TITLE, Rings, is_starting, probe_rings, vllm_root
from dsagent.agent.sidecar.backoff import SECOND_NS, Backoff
from dsagent.agent.sidecar.processes import command_text, is_left_over

WayIn = Literal["rings", "outside"]

YOUNG_S = 120.0  # importing a large engine takes that long, whatever it is called
MOST_NS = 16 * SECOND_NS  # between two looks at a process that is none
MOST_BELOW = 128  # of the processes below one, nearest first: an engine's core is near
KERNEL_THREADS = 2  # the parent of them all
# Servers that are looked at from outside without being asked for, by their command lines.
KNOWN = re.compile(
    r"(?:^|[/\s])(?:vllm\s+serve|llama-server|ollama\s+serve|trtllm-serve|tritonserver"
    r"|text-generation-(?:launcher|router|server)|lmdeploy\s+serve|dsagent\s+serve)(?:\s|$)"
    r"|\b(?:vllm\.entrypoints|sglang\.launch_server|dsagent\.instrumentation\.reference)\b"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A process that belongs to an engine nobody watches yet, and how to get in."""

    pid: int
    way_in: WayIn


@dataclass(frozen=True, slots=True)
class ScanStatus:
    """Of the last look."""

    processes: int = 0
    looked_into: int = 0
    not_permitted: int = 0  # that may not be looked into; they are tried again


@dataclass(slots=True)
class _Seen:
    start_ticks: int
    backoff: Backoff
    not_permitted: bool = False


class Scanner:
    """`look` once a second or so. One thread."""

    def __init__(
        self,
        match: re.Pattern[str] | None = None,
        *,
        proc: Path = PROC,
        rings_of: Callable[[int], Rings] = probe_rings,
        listens: Callable[[int], bool] | None = None,
        starts: Callable[[int, tuple[int, ...]], bool] | None = None,
        own_pid: int | None = None,
    ) -> None:
        """`match`: attach only to servers whose command line it is found in, whatever they are."""
        self.match = match
        self._proc = proc
        self._rings_of = rings_of
        self._listens = listens or (lambda pid: bool(listening(pid, proc)))
        self._starts = starts or (lambda pid, below: is_starting(pid, proc, below))
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._tree = ProcessTree(proc)
        self._seen: dict[int, _Seen] = {}
        self.status = ScanStatus()
        self.expects = False  # some process is on its way to be an engine: look again soon

    def forget(self) -> None:
        """Everything is looked at anew: the settings have changed."""
        self._seen.clear()

    def look(self, now_ns: int, watched: Collection[int]) -> list[Found]:
        """Engines that nobody watches yet. `watched`: the roots of those that are: what they
        have forked belongs to them."""
        parent_of = self._tree.parents()
        for gone in self._seen.keys() - parent_of.keys():
            del self._seen[gone]
        children_of = procfs.children(parent_of)
        belong = {self._own_pid, *watched} - {0}  # 0: the parent of what came from outside
        belong = {*belong, *(each for one in belong for each in procfs.below(one, children_of))}
        found = []
        looked_into = 0
        self.expects = False
        for pid in sorted(parent_of):
            seen = self._seen.get(pid)
            if seen is not None and not seen.backoff.due(now_ns):
                continue
            if pid in belong or self._is_kernels(pid, parent_of[pid]):
                continue
            looked_into += 1
            one = self._look_into(pid, now_ns, children_of)
            if one is not None:
                found.append(one)
        barred = sum(seen.not_permitted for seen in self._seen.values())
        self.status = ScanStatus(len(parent_of), looked_into, barred)
        return found

    def _is_kernels(self, pid: int, parent: int) -> bool:
        return KERNEL_THREADS in (pid, parent) and not command_text(pid, self._proc)

    def _look_into(self, pid: int, now_ns: int, children_of: dict[int, list[int]]) -> Found | None:
        try:
            stat = procfs.read_stat(pid, self._proc)
        except (ProcessGone, PermissionError):
            return None
        seen = self._seen.get(pid)
        if seen is None or seen.start_ticks != stat.start_ticks:
            seen = self._seen[pid] = _Seen(stat.start_ticks, Backoff(most_ns=MOST_NS))
        if stat.state in "ZXx":
            return None
        text = command_text(pid, self._proc)
        is_wanted = (self.match or KNOWN).search(text) is not None
        way_in: WayIn | None = None
        if self.match is None or is_wanted:
            try:
                way_in = self._way_in(pid, stat.comm, is_wanted, children_of)
                seen.not_permitted = False
            except PermissionError:
                seen.not_permitted = True
            except ProcessGone:
                return None
        is_likely = is_wanted or procfs.age_s(stat.start_ticks) < YOUNG_S
        if way_in is None and (seen.not_permitted or not is_likely):
            seen.backoff.failed(now_ns)
        return None if way_in is None else Found(pid, way_in)

    def _way_in(
        self, pid: int, comm: str, is_wanted: bool, children_of: dict[int, list[int]]
    ) -> WayIn | None:
        if self._rings_of(pid).engine_ids:
            if comm.startswith(VLLM_TITLE) and is_left_over(pid, self._proc):
                return None
            return "rings"
        if not is_wanted:
            return None
        below = procfs.below(pid, children_of, MOST_BELOW)
        if self._core_has_rings(pid, below):
            return "rings"
        if self._starts(pid, below):
            self.expects = True
            return None
        return "outside" if self._listens(pid) else None

    def _core_has_rings(self, pid: int, below: tuple[int, ...]) -> bool:
        """Whether this is the front end of a vLLM server whose other processes have theirs."""
        for each in below:
            try:
                is_its = vllm_root(each, self._proc) == pid
                if is_its and self._rings_of(each).vllm:
                    return True
            except (PermissionError, ProcessGone):
                continue
        return False
