"""Python stacks of the target's processes, by py-spy beside our loop: it never pauses the target.

One run after the other, each bounded in time, at moments that py-spy draws by chance; the pause and
the rate follow from what sampling costs and may cost. Where there are several processes they take
turns.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Readings, SourceState, SourceStatus, Target
from dsagent.agent.host.procfs import escape
from dsagent.agent.profiles.pace import RUN_S, Plan, Price, allowance, pause_after, plan
from dsagent.agent.profiles.stacks import NotATrace, Recorded, TraceReader, samples_told

DEADLINE_S = 30.0  # beyond a run's own time: starting, and writing what was seen
MAX_TRACE_BYTES = 16 << 20
MAX_SAID_BYTES = 16 << 10
# At one poll: the session must not wait for a trace of many threads, which takes seconds to read.
MOST_READING_NS = 10_000_000
REST_S = 30.0  # until a process is looked at again in which nothing ran
RETRY_S = 60.0  # until a process is tried again that could not be sampled
MAX_PROCESSES = 64
MAX_REPEATS = 1_000_000  # that py-spy is believed

# As children.dying_with_us, and tells when it becomes py-spy: that is the trace's time 0.
_LAUNCH = """
import ctypes, os, signal, sys, time
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended")
os.write(1, b"%d\\n" % time.monotonic_ns())
os.execv(sys.argv[2], sys.argv[2:])
"""


class PySpySource:
    """A facts.Source named "profiles"."""

    name = "profiles"

    def __init__(
        self,
        target: Target,
        pids: Callable[[], Sequence[int]],
        max_overhead_ratio: float,
        *,
        py_spy: str | None = None,
    ) -> None:
        """`pids`: the target's processes as they are now. `py_spy`: the program, found unless
        given."""
        self._target = target
        self._pids = pids
        self._max_ratio = max_overhead_ratio
        self._program = py_spy or _find()
        self._cpus = max(1, _cpus(target.pid))
        self._price = Price()
        self._allowed_ratio = allowance(max_overhead_ratio, 0.0, 0.0)
        self._plan: Plan | None = None
        self._run: _Run | None = None
        self._last_pid = 0
        self._next_ns = 0
        self._refused: dict[int, tuple[int, str]] = {}  # pid → until when, why
        self._resting: dict[int, int] = {}  # pid → until when
        self._succeeded = False
        self._dropped = 0
        self._cost_ns = 0
        self._cost_told_ns = (time.monotonic_ns(), 0)  # at the last window

    def start(self) -> None:
        if self._program is None or not os.access(self._program, os.X_OK):
            raise SourceUnavailable("py-spy is missing: pip install 'dsagent[agent]'")

    def pace(self, seen_ratio: float, now_ns: int, beside_ratio: float = 0.0) -> float:
        """Once a window: what all of watching costs now, with `beside_ratio` for other samplers.
        The runs to come take what that leaves. Returns what this one has cost in the window."""
        then_ns, cost_ns = self._cost_told_ns
        self._cost_told_ns = (now_ns, self._cost_ns)
        own_ratio = (self._cost_ns - cost_ns) / max(1, now_ns - then_ns) / self._cpus
        self._allowed_ratio = allowance(self._max_ratio, seen_ratio, own_ratio, beside_ratio)
        return own_ratio

    def poll(self, now_ns: int) -> Readings:
        began_ns = time.thread_time_ns()
        readings = Readings()
        if self._run is not None:
            if self._run.is_over(now_ns) and self._run.is_read(MOST_READING_NS):
                self._take(self._run, readings, now_ns)
                self._run = None
        elif now_ns >= self._next_ns:
            self._begin(now_ns)
        self._cost_ns += time.thread_time_ns() - began_ns
        return readings

    def _begin(self, now_ns: int) -> None:
        self._plan = plan(self._price, self._allowed_ratio, self._cpus)
        pid = self._next_pid(now_ns)
        if self._plan is None or pid is None:
            self._next_ns = now_ns + 1_000_000_000
            return
        assert self._program is not None
        self._last_pid = pid
        try:
            self._run = _Run(self._program, pid, self._plan.rate_hz, now_ns)
        except OSError as error:
            self._refuse(pid, f"py-spy does not start: {error.strerror}", now_ns)

    def _next_pid(self, now_ns: int) -> int | None:
        """They take turns, in the order of their pids."""
        pids = sorted(self._pids())[:MAX_PROCESSES]
        self._refused = {pid: why for pid, why in self._refused.items() if pid in pids}
        self._resting = {pid: until for pid, until in self._resting.items() if pid in pids}
        able = [
            pid
            for pid in pids
            if max(self._refused.get(pid, (0, ""))[0], self._resting.get(pid, 0)) <= now_ns
        ]
        return next((pid for pid in able if pid > self._last_pid), able[0] if able else None)

    def _take(self, run: _Run, readings: Readings, now_ns: int) -> None:
        recorded, why = run.result()
        self._cost_ns += run.cpu_ns
        if recorded is None:
            self._refuse(run.pid, why, now_ns)
            pause_s = pause_after(run.cpu_ns, self._allowed_ratio, self._cpus)
            self._next_ns = now_ns + round(pause_s * 1e9)
            return
        assert self._plan is not None
        self._succeeded = True
        self._refused.pop(run.pid, None)
        self._price = self._price.learn(run.rate_hz, run.cpu_ns)
        self._dropped += recorded.damaged
        if recorded.seen or recorded.repeats:
            readings.profiles.append(recorded)
        else:
            self._resting[run.pid] = now_ns + round(REST_S * 1e9)
        # A pause by chance, that no habit of the engine's falls in with.
        pause_s = self._plan.pause_s * random.uniform(0.5, 1.5) + random.uniform(0.0, 1.0)
        self._next_ns = now_ns + round(pause_s * 1e9)

    def _refuse(self, pid: int, why: str, now_ns: int) -> None:
        self._refused[pid] = (now_ns + round(RETRY_S * 1e9), why)

    def status(self) -> SourceStatus:
        state: SourceState = "ok"
        reason = next((f"process {pid}: {why}" for pid, (_, why) in self._refused.items()), "")
        if reason and len(self._refused) >= len(self._pids()):
            state = "unavailable"
        elif self._run is None and self._succeeded and self._plan is None:
            reason = "paused: --max-overhead leaves nothing for it"
        return SourceStatus(self.name, state, reason, self._dropped, cost_ns=self._cost_ns)

    def stop(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run:
    """py-spy looking at a process for RUN_S seconds."""

    def __init__(self, program: str, pid: int, rate_hz: int, now_ns: int) -> None:
        self.pid = pid
        self.rate_hz = rate_hz
        self.cpu_ns = 0
        self._deadline_ns = now_ns + round((RUN_S + DEADLINE_S) * 1e9)
        self._ended_ns: int | None = None
        self._exit_code: int | None = None
        self._is_too_slow = False
        self._reader: TraceReader | None = None  # while what it wrote is being read
        self._told = b""
        self._why = ""
        self._began_ns = 0
        # Memory files: nothing stays behind, whatever ends us.
        self._trace: IO[bytes] = os.fdopen(os.memfd_create("dsagent.stacks"), "w+b")
        self._said: IO[bytes] = os.fdopen(os.memfd_create("dsagent.py-spy"), "w+b")
        fd = self._trace.fileno()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-S", "-c", _LAUNCH, str(os.getpid())),
                    *(program, "record", "--nonblocking", "--format", "chrometrace", "--threads"),
                    *("--rate", str(rate_hz), "--duration", str(RUN_S)),
                    *("--output", f"/proc/self/fd/{fd}", "--pid", str(pid)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=(fd,),
                process_group=0,  # Ctrl-C is for us
            )
        except OSError:
            self._close_files()
            raise

    def is_over(self, now_ns: int) -> bool:
        """Whether it has ended; it is made to where it takes too long."""
        if self._ended_ns is None:
            self._is_too_slow = now_ns >= self._deadline_ns
            if self._is_too_slow:
                self._process.kill()
            self._reap(0 if self._is_too_slow else os.WNOHANG)
        return self._ended_ns is not None

    def _reap(self, options: int) -> None:
        pid, status, used = os.wait4(self._process.pid, options)
        if pid:
            self._ended_ns = time.monotonic_ns()
            self._process.returncode = self._exit_code = os.waitstatus_to_exitcode(status)
            self.cpu_ns = round((used.ru_utime + used.ru_stime) * 1e9)

    def is_read(self, most_ns: int) -> bool:
        """Once it is over: whether all that it wrote has been read; goes on with it for that
        long."""
        try:
            if self._reader is None:
                self._begin_to_read()
            until_ns = time.monotonic_ns() + most_ns
            while self._reader is not None and not self._reader.is_over:
                self._reader.read_event()
                if time.monotonic_ns() > until_ns:
                    return False
        except NotATrace as error:
            self._reader, self._why = None, f"what py-spy wrote is no trace: {error}"
        return True

    def _begin_to_read(self) -> None:
        """Unless there is a reason why not. Raises NotATrace."""
        assert self._ended_ns is not None
        self._told = _read(self._said, MAX_SAID_BYTES)
        text = _read(self._trace, MAX_TRACE_BYTES)
        self._close_files()
        stamp, _, self._told = self._told.partition(b"\n")
        if self._exit_code == -signal.SIGKILL:
            late = f"was not done after {RUN_S + DEADLINE_S:.0f} s"
            self._why = f"py-spy {late if self._is_too_slow else 'was killed'}"
        elif self._exit_code != 0 or not stamp.isdigit():
            self._why = _why(stamp + b"\n" + self._told)
        else:
            self._began_ns = int(stamp)
            self._reader = TraceReader(text, self._began_ns, self._ended_ns)

    def result(self) -> tuple[Recorded | None, str]:
        """Once it is read: what it saw, or why nothing."""
        assert self._ended_ns is not None
        if self._reader is None:
            return None, self._why
        seen, damaged = self._reader.result()
        told = samples_told(self._told)
        return (
            Recorded(
                pid=self.pid,
                began_ns=self._began_ns,
                ended_ns=min(self._ended_ns, self._began_ns + round(RUN_S * 1e9)),
                interval_ns=round(1e9 / self.rate_hz),
                seen=tuple(seen),
                repeats=max(0, min(told or 0, MAX_REPEATS) - len(seen) - damaged),
                damaged=damaged,
            ),
            "",
        )

    def close(self) -> None:
        if self._ended_ns is None:
            self._process.kill()
            self._reap(0)
        self._close_files()

    def _close_files(self) -> None:
        self._trace.close()
        self._said.close()


def _read(file: IO[bytes], most: int) -> bytes:
    file.seek(0)
    return file.read(most)


def _why(said: bytes) -> str:
    """What py-spy complains of, in its own words."""
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines()]
    told = [line for line in lines if line and not line.isdigit()]
    if any("ermission" in line for line in told):
        return "not permitted: reading its memory needs the same user or CAP_SYS_PTRACE"
    return escape(told[0].removeprefix("Error: ") if told else "py-spy ended without a word", 200)


def _find() -> str | None:
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def _cpus(pid: int) -> int:
    try:
        return len(os.sched_getaffinity(pid))
    except (ProcessLookupError, PermissionError):
        return os.cpu_count() or 1
