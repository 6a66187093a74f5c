"""The source "kernel": where the time of the target's threads went, as the kernel saw it.

The BPF programs (bpf/*.bpf.c, named in agent/probes.py) sum short intervals per thread and step and
send long ones alone; this side reads both in batches, cuts open intervals into
pieces and knows what all that costs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dsagent.agent.checks.doctor import Places, kernel_checks
from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import FACT_DTYPE, Facts, Kind, Readings, SourceStatus, Target
from dsagent.agent.host import privileges
from dsagent.agent.host.command_names import named_by_script
from dsagent.agent.probes import Tier
from dsagent.agent.sources import kernel_tables as tables
from dsagent.agent.sources.bpf.layout import (
    CONTROL,
    CPU,
    MAX_PROCESSES,
    MAX_THREADS,
    THREAD,
    WORDS,
    constants,
)
from dsagent.agent.sources.bpf.libbpf import Library, Map
from dsagent.agent.sources.bpf.loader import Loaded
from dsagent.agent.sources.bpf.ringbuf import FactRing
from dsagent.agent.sources.open_intervals import OpenIntervals

_FACTS_A_POLL_MAX = 200_000
# A program that had taken its time stamp when a poll began has ended this much later.
_MARGIN_NS = 100_000
_CPUS_EVERY_NS = 1_000_000_000
# What the kernel spends to enter and leave a program, which the program cannot see; and all of a
# run that finds nothing to do.
_ENTRY_NS = 20
_GLANCE_NS = 50


class KernelSource:
    """agent/facts.py's Source. `step_words`: pid → address of its running-step word there.

    Pids and tids of the target's threads are those of the agent's pid namespace;
    those of culprits outside the target are the initial namespace's.
    """

    name = "kernel"

    def __init__(
        self,
        target: Target,
        step_words: Mapping[int, int],
        *,
        tier: Tier = "default",
        why_tier: str = "",
        exact_ns: int = 200_000,
        foreign_exact_ns: int = 1_000_000,
        ring_bytes: int = 1 << 22,
        object_path: Path = privileges.BPF_OBJECT,
    ) -> None:
        self._target = target
        self._step_words = dict(step_words)
        self._tier: Tier = tier
        self._why_tier = why_tier
        self._exact_ns, self._foreign_exact_ns = exact_ns, foreign_exact_ns
        self._ring_bytes = ring_bytes
        self._object_path = object_path
        self._running: _Running | None = None
        self._last = SourceStatus(self.name, "unavailable", "not started")

    def start(self) -> None:
        """Load, attach, find the target's threads. Raises SourceUnavailable."""
        check(self._object_path)
        library = Library()
        loaded = Loaded(
            library,
            self._object_path.parent,
            constants(
                exact_ns=self._exact_ns,
                foreign_exact_ns=self._foreign_exact_ns,
                target_pid=self._target.pid,
                pid_namespace=_own_pid_namespace(),
                has_prev_state=(library.arguments_of("sched_switch") or 0) >= 4,
                per_task_throttle=True,
            ),
            {"cpus": library.possible_cpus(), "facts": self._ring_bytes},
        )
        try:
            self._running = _Running(self._target, loaded, self._foreign_exact_ns, self._tier)
            self._running.why_tier = self._why_tier
            self._running.want(
                dict.fromkeys((self._target.pid, *self._target.children), 0) | self._step_words
            )
        except BaseException:
            self.stop()
            loaded.close()
            raise

    def set_step_word(self, pid: int, address: int) -> None:
        """A process of the target has made its ring only now."""
        self._step_words[pid] = address
        if self._running is not None:
            self._running.want({pid: address})

    def set_tier(self, tier: Tier, why: str) -> None:
        """Look at more or less from now on; `why` becomes part of the status."""
        self._tier, self._why_tier = tier, why
        if self._running is not None:
            self._running.set_tier(tier, why)

    @property
    def tier(self) -> Tier:
        return self._tier

    def poll(self, now_ns: int) -> Readings:
        if self._running is None:
            return Readings()
        return self._running.poll(now_ns)

    @property
    def loaded(self) -> Loaded | None:
        """The programs in the kernel, while it runs."""
        return None if self._running is None else self._running.loaded

    def status(self) -> SourceStatus:
        if self._running is not None:
            self._last = self._running.status(self.name)
        return self._last

    def stop(self) -> None:
        if self._running is not None:
            self._last = self._running.status(self.name)
            self._running.close()
            self._running = None


class _Running:
    """The loaded programs, attached, and the memory shared with them."""

    def __init__(self, target: Target, loaded: Loaded, foreign_exact_ns: int, tier: Tier) -> None:
        self._target, self.loaded, self._object = target, loaded, loaded.base
        self._foreign_exact_ns = foreign_exact_ns
        self._memories: list[mmap.mmap] = []
        self._threads = self._shared("threads", THREAD)
        self._cpus = self._shared("cpus", CPU)
        self._control = self._shared(".bss", CONTROL)
        self._generation = memoryview(self._memories[-1])[:8].cast("Q")
        base = loaded.base
        self._wanted, self._names_map = base.map("wanted"), base.map("names")
        self._words_map, self._words = base.map("words"), dict[int, int]()
        self._ring = FactRing(base.map("facts"))
        self._open = OpenIntervals()
        # Pids of strangers are the initial namespace's: elsewhere they name somebody else.
        self._knows_strangers = _own_pid_namespace() == 0
        self._cpus_checked_ns = 0
        self._poll_cost_ns = 0
        self._lagging = False
        self.why_tier = ""  # told in the status
        self._tier_since_ns = 0
        loaded.attach(tier)

    def _shared(self, name: str, layout: np.dtype[np.void]) -> tables.Table:
        table: Map = self._object.map(name)
        if table.value_bytes != layout.itemsize:
            raise SourceUnavailable(
                "the BPF object was built from another version, rebuild it (make bpf)"
            )
        memory = table.map_memory()
        self._memories.append(memory)
        return np.frombuffer(memory, layout, count=table.entries)

    def want(self, step_words: Mapping[int, int]) -> None:
        """Follow these processes (address 0: it has no step word) and what they have forked."""
        for pid, address in step_words.items():
            word = self._words.setdefault(pid, len(self._words) + 1) if address else 0
            if word >= WORDS:
                word = 0  # its threads are followed all the same, tagged by the others' steps
            elif word:
                self._words_map.update(struct.pack("=I", word), struct.pack("=QQ", address, 0))
            self._wanted.update(struct.pack("=I", pid), struct.pack("=I", word))
        # Once more as long as it finds children, whose own children may have come before them.
        found = -1
        while found != (found := int(self._control["slots_used"][0])):
            self._object.run_iterator(self.loaded.scan_fd)
        self._watch_cpus(time.monotonic_ns())

    def set_tier(self, tier: Tier, why: str) -> None:
        self._forget_begun()  # for those who look again
        self._tier_since_ns = time.monotonic_ns()
        self.why_tier = why
        self.loaded.set_tier(tier)
        self._forget_begun()  # of those who look no more

    def _forget_begun(self) -> None:
        """What one program has seen begin and another, at another time, might see end."""
        self._threads["fault_ns"] = self._threads["reclaim_ns"] = 0
        self._cpus["irq"] = self._cpus["steal_seen"] = 0

    def poll(self, now_ns: int) -> Readings:
        began_ns = time.thread_time_ns()
        # From here on new sums go elsewhere; the ring is read first, which gives programs that
        # had begun before the time to end.
        until_ns = time.monotonic_ns() - _MARGIN_NS
        generation = self._generation[0]
        self._generation[0] = generation + 1
        sent = self._ring.read(_FACTS_A_POLL_MAX)
        self._lagging = len(sent) == _FACTS_A_POLL_MAX
        sent, events = tables.split_notes(sent, self._threads[: self._slots_used()])
        if self._tier_since_ns:
            sent = tables.begun_since(sent, self._tier_since_ns)
        owners = np.where(sent["kind"] == Kind.FOREIGN, ~sent["cpu"].astype(np.int64), sent["tid"])
        self._open.age()
        sent = self._open.trim(sent, owners.tolist())
        threads = self._threads[: self._slots_used()]
        step, pid = int(self._control["step"][0]), self._target.pid
        facts = np.concatenate(
            (
                sent,
                tables.thread_sums(threads, generation),
                tables.foreign_sums(self._cpus, generation, pid),
                tables.open_threads(threads, self._open, until_ns, step),
                tables.open_foreign(
                    self._cpus,
                    self._open,
                    until_ns,
                    step=step,
                    target_pid=pid,
                    least_ns=self._foreign_exact_ns,
                ),
            )
        )
        if now_ns - self._cpus_checked_ns >= _CPUS_EVERY_NS:
            self._watch_cpus(now_ns)
        readings = Readings(
            facts=facts,
            facts_complete_ns=None if self._lagging else until_ns,
            names=self._names_in(facts, threads),
            events=events,
        )
        self._poll_cost_ns += time.thread_time_ns() - began_ns
        return readings

    def _slots_used(self) -> int:
        return min(int(self._control["slots_used"][0]), MAX_THREADS)

    def _watch_cpus(self, now_ns: int) -> None:
        """Mark the CPUs that the target's threads may use: only there a foreign task matters."""
        self._cpus_checked_ns = now_ns
        allowed: set[int] = set()
        for tid in self._threads["tid"][: self._slots_used()].tolist():
            try:
                allowed |= os.sched_getaffinity(tid)
            except OSError:
                continue  # it has ended
        watched = np.zeros(len(self._cpus), np.uint64)
        watched[[cpu for cpu in allowed if cpu < len(watched)]] = 1
        self._cpus["watched"] = watched

    def _names_in(self, facts: Facts, threads: tables.Table) -> dict[int, str]:
        """comm of each thread and culprit that `facts` speaks of; of a stranger who is to
        blame, and called python, also what it runs."""
        comms = dict(zip(threads["tid"].tolist(), threads["comm"].tolist(), strict=True))
        spoken = np.unique(
            np.concatenate((facts["tid"], facts["culprit_pid"], facts["culprit_tid"]))
        )
        culprits = set(facts["culprit_pid"].tolist())
        names: dict[int, str] = {}
        for number in spoken.tolist():
            comm = comms.get(number)
            if comm is not None:
                # Threads name themselves after they have begun, which the table was made at.
                comm = _comm_now(number) or comm
            else:
                found = self._names_map.lookup(struct.pack("=I", number))
                comm = None if found is None else found[8:]
            if comm is not None and number:
                names[number] = tables.comm_text(comm)
                if self._knows_strangers and number in culprits and number not in comms:
                    names[number] = named_by_script(number, names[number])
        return names

    def status(self, name: str) -> SourceStatus:
        notes = [self.why_tier] if self.why_tier else []
        if untracked := int(self._control["untracked"][0]):
            notes.append(
                f"{untracked} threads beyond {MAX_THREADS}, or processes beyond {MAX_PROCESSES}, "
                "are not followed"
            )
        if missed := int(self._cpus["missed"].sum()):
            notes.append(f"the kernel did not report {missed} switches")
        if lost := self.loaded.lost_probes():
            notes.append(
                "not measured: " + ", ".join(f"{each} ({why})" for each, why in lost.items())
            )
        switches, wakings, others, glances = (
            int(self._cpus[each].sum()) for each in ("switches", "wakings", "others", "glances")
        )
        # Wakings of strangers are not counted; there is one for each switch at most.
        glances += max(0, switches - wakings)
        return SourceStatus(
            name,
            "lagging" if self._lagging else "ok",
            "; ".join(notes),
            dropped=int(self._cpus["dropped"].sum()),
            cost_ns=int(self._cpus["cost_ns"].sum())
            + (switches + wakings + others) * _ENTRY_NS
            + glances * _GLANCE_NS
            + self._poll_cost_ns,
        )

    def close(self) -> None:
        """Detach, unmap, free."""
        self.loaded.close()
        self._ring.close()
        self._generation.release()
        self._threads = self._cpus = self._control = np.empty(0, FACT_DTYPE)
        for memory in self._memories:
            memory.close()


def check(object_path: Path = privileges.BPF_OBJECT) -> None:
    """Raises SourceUnavailable with one reason and its fix, if the programs cannot run here."""
    for result in kernel_checks(Places(bpf_object=object_path)):
        if result.state == "fail":
            raise SourceUnavailable(f"{result.found}: {result.fix}")


def _own_pid_namespace() -> int:
    """0 where it is the initial one, whose pids are BPF's own."""
    inode = privileges.pid_namespace()
    return 0 if inode == privileges.INITIAL_PID_NAMESPACE else inode


def _comm_now(tid: int) -> bytes | None:
    try:
        return Path(f"/proc/{tid}/comm").read_bytes().rstrip(b"\n")
    except OSError:
        return None  # it has ended
