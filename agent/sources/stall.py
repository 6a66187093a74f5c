"""Notices that the engine's loop stands still, and asks once where."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dsagent.agent.attribution.attribute import STALL_NS, STALL_STEPS
from dsagent.agent.facts import Event, Readings, SourceStatus, Target
from dsagent.agent.host import procfs
from dsagent.agent.host.children import dying_with_us

DUMP_DEADLINE_NS = 10_000_000_000
MAX_DUMP_BYTES = 64 << 10
MAX_STACK_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of the loop at a moment; absent is None."""

    running: tuple[tuple[int, int, int, int], ...]  # (pid, step_id, start_ns, heartbeat_ns)
    step_p99_ns: int | None
    last_step_end_ns: int | None
    oldest_open_ns: int | None  # when the oldest unfinished request arrived


@dataclass(frozen=True, slots=True)
class Stall:
    """One standstill: since when, of which step (None: between steps), in which process."""

    since_ns: int
    step_id: int | None
    pid: int


def find_stall(progress: Progress, now_ns: int, pid: int) -> Stall | None:
    """A running step older than max(2 s, 10 × its p99), or open requests and no step for 2 s."""
    limit_ns = max(STALL_NS, STALL_STEPS * (progress.step_p99_ns or 0))
    for step_pid, step_id, start_ns, _ in progress.running:
        if now_ns - start_ns > limit_ns:
            return Stall(start_ns, step_id, step_pid)
    if not progress.running and progress.oldest_open_ns is not None:
        # The loop may have been idle for long: it owes a step only since the request came.
        since_ns = max(progress.oldest_open_ns, progress.last_step_end_ns or 0)
        if now_ns - since_ns > STALL_NS:
            return Stall(since_ns, None, pid)
    return None


class StallSource:
    """One event when a stall begins, with the Python stack where py-spy can tell it, and one
    when it is over."""

    name = "stall"

    def __init__(self, target: Target, progress: Callable[[], Progress]) -> None:
        self._target = target
        self._progress = progress
        self._stall: Stall | None = None
        self._dump: _Dump | None = None
        self._py_spy = _find_py_spy()
        self._cost_ns = 0

    def start(self) -> None:
        """Needs nothing."""

    def poll(self, now_ns: int) -> Readings:
        started_ns = time.thread_time_ns()
        readings = Readings()
        found = find_stall(self._progress(), now_ns, self._target.pid)
        before = self._stall
        if found is not None and before is None:
            readings.events.append(_began(found, now_ns))
            self._ask_for_stacks(found.pid, now_ns)
        elif found is None and before is not None:
            readings.events.append(_over(before, now_ns))
        self._stall = found
        if self._dump is not None and (stack := self._dump.poll(now_ns)) is not None:
            self._dump = None
            if stack:
                readings.events.append(
                    Event("engine.stalled.stack", now_ns, stack, {"pid": self._target.pid})
                )
        self._cost_ns += time.thread_time_ns() - started_ns
        return readings

    def _ask_for_stacks(self, pid: int, now_ns: int) -> None:
        if self._py_spy is None or self._dump is not None:
            return
        if not os.access(self._py_spy, os.X_OK):
            self._py_spy = None  # it cannot be run: the status says that there are no stacks
            return
        try:
            self._dump = _Dump(self._py_spy, pid, now_ns)
        except OSError:
            self._py_spy = None  # it cannot be run: the status says that there are no stacks

    def status(self) -> SourceStatus:
        reason = "" if self._py_spy else "stalls are seen, stacks are not: no py-spy runs here"
        return SourceStatus(self.name, "ok", reason, cost_ns=self._cost_ns)

    def stop(self) -> None:
        if self._dump is not None:
            self._dump.close()
            self._dump = None


def _began(stall: Stall, now_ns: int) -> Event:
    seconds = (now_ns - stall.since_ns) / 1e9
    what = (
        f"step {stall.step_id} has run"
        if stall.step_id is not None
        else "requests are open and no step has run"
    )
    return Event(
        "engine.stalled",
        now_ns,
        f"the engine's loop stands still: {what} for {seconds:.1f} s",
        {"pid": stall.pid, "step_id": stall.step_id or 0, "since_ns": stall.since_ns},
    )


def _over(stall: Stall, now_ns: int) -> Event:
    ns = now_ns - stall.since_ns
    return Event(
        "engine.resumed",
        now_ns,
        f"the engine's loop goes on after {ns / 1e9:.1f} s",
        {"pid": stall.pid, "stalled_ns": ns},
    )


def _find_py_spy() -> str | None:
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


class _Dump:
    """py-spy reading the stacks of a process once, without stopping it, beside our loop."""

    def __init__(self, py_spy: str, pid: int, now_ns: int) -> None:
        self._deadline_ns = now_ns + DUMP_DEADLINE_NS
        # A memory file: nothing stays behind, whatever ends us.
        self._output: IO[bytes] = os.fdopen(os.memfd_create("dsagent.stacks"), "w+b")
        try:
            self._process = subprocess.Popen(
                dying_with_us([py_spy, "dump", "--nonblocking", "--pid", str(pid)]),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self._output.close()
            raise

    def poll(self, now_ns: int) -> str | None:
        """The stacks once they are there, "" if they never will be; None while it runs."""
        if self._process.poll() is None and now_ns < self._deadline_ns:
            return None
        self._output.seek(0)
        text = self._output.read(MAX_DUMP_BYTES).decode("utf-8", "replace")
        succeeded = self._process.returncode == 0
        self.close()
        lines = [procfs.escape(line) for line in text.splitlines()]
        return "\n".join(lines)[:MAX_STACK_CHARS] if succeeded else ""

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._output.close()
