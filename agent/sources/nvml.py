"""NVIDIA GPUs through NVML, read in a thread of its own.

An NVML call blocks for as long as the driver likes (a reset, a hung GPU), so
the agent's loop never makes one: the thread reads, `poll` takes what is there,
and a call that does not return shows as `lagging`. Where NVML is lost while
running (a driver or container-runtime reload, a GPU off the bus), the source
is `failed` with the reason and tries again, less and less often.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Event, Readings, Sample, SourceState, SourceStatus, Target
from dsagent.agent.host.privileges import INITIAL_PID_NAMESPACE, pid_namespace
from dsagent.agent.host.procfs import ProcessGone, read_stat

if TYPE_CHECKING:
    from dsagent.agent.sources.nvml_devices import NvmlSession

LIBRARY = "libnvidia-ml.so.1"
INTERVAL_S = 0.25  # NVML's own figures change no faster than every 100 ms or so
OPENING_S = 3.0  # how long start() waits for the driver
LATE_NS = 2_000_000_000  # a round that takes longer is told as lagging
RETRY_S, MAX_RETRY_S = 1.0, 60.0
MAX_ROUNDS_HELD = 64  # 16 s of readings that nobody has polled
MAX_EVENTS_HELD = 64
_MAX_ANCESTORS = 64


def target_claims(target: Target) -> Callable[[int], bool] | None:
    """Whether a pid that NVML names belongs to the target; None where that cannot be known.

    NVML names processes by the host's pids, also inside a container, where the same number is
    somebody else: nothing is claimed outside the initial pid namespace.
    """
    if pid_namespace() != INITIAL_PID_NAMESPACE:
        return None
    known = {target.pid, *target.children}

    def claims(pid: int) -> bool:
        try:
            if read_stat(target.pid).start_ticks != target.start_ticks:
                return False  # the target is gone and its pid is another's
            for _ in range(_MAX_ANCESTORS):
                if pid in known:
                    return True
                if pid <= 1:
                    return False
                pid = read_stat(pid).ppid
        except (ProcessGone, PermissionError):
            return False
        return False

    return claims


def retry_s(attempts: int) -> float:
    """How long to wait after so many failed attempts."""
    return float(min(RETRY_S * 2 ** min(attempts, 16), MAX_RETRY_S))


class NvmlSource:
    """A facts.Source named "nvml": samples of every device, four times a second."""

    name = "nvml"

    def __init__(self, target: Target, *, interval_s: float = INTERVAL_S) -> None:
        self._target = target
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._opened = threading.Event()  # the first attempt is over, well or badly
        self._thread: threading.Thread | None = None
        # Below: written by the thread, read by poll() and status(), under the lock.
        self._lock = threading.Lock()
        self._rounds: deque[list[Sample]] = deque()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS_HELD)
        self._state: SourceState = "ok"
        self._reason = ""
        self._ever_opened = False
        self._was_well = False  # all devices answered, since NVML was last opened
        self._call_began_ns: int | None = None
        self._dropped = 0
        self._cost_ns = 0

    def start(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise SourceUnavailable(f"no NVIDIA driver here ({error})") from error
        try:
            import pynvml  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            raise SourceUnavailable(
                "nvidia-ml-py is missing: pip install 'dsagent[agent]'"
            ) from error
        self._thread = threading.Thread(target=self._run, name="dsagent-nvml", daemon=True)
        self._thread.start()
        # A driver that does not answer here may yet do so: then the source starts out lagging.
        self._opened.wait(OPENING_S)
        with self._lock:
            refused = self._opened.is_set() and not self._ever_opened
            reason = self._reason
        if refused:
            self.stop()
            raise SourceUnavailable(f"NVML does not start: {reason}")

    def poll(self, now_ns: int) -> Readings:
        del now_ns  # samples carry their own times
        readings = Readings()
        with self._lock:
            while self._rounds:
                readings.samples += self._rounds.popleft()
            readings.events += self._events
            self._events.clear()
        return readings

    def status(self) -> SourceStatus:
        now_ns = time.monotonic_ns()
        with self._lock:
            state, reason, lag_ns = self._state, self._reason, 0
            if self._call_began_ns is not None and now_ns - self._call_began_ns > LATE_NS:
                lag_ns = now_ns - self._call_began_ns
                state, reason = "lagging", f"NVML has not answered for {lag_ns / 1e9:.0f} s"
            return SourceStatus(self.name, state, reason, self._dropped, lag_ns, self._cost_ns)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)  # in a call that hangs it ends with the process

    # --- in the thread ---

    def _run(self) -> None:
        try:
            self._keep_reading()
        except BaseException as error:
            self._tell("failed", f"its thread has ended: {error!r}")
            raise
        finally:
            self._opened.set()

    def _keep_reading(self) -> None:
        from dsagent.agent.sources.nvml_devices import NvmlLost, NvmlSession

        claims = target_claims(self._target)
        attempts = 0  # since everything was well
        while not self._stopping.is_set():
            self._was_well = False
            try:
                with _Busy(self):
                    session = NvmlSession.open(claims, self._target.gpu_uuids)
                self._read(session, retry_s(attempts))
                attempts = 0 if self._was_well else attempts + 1
            except NvmlLost as lost:
                self._tell("failed", str(lost))
                if not self._ever_opened:
                    return
                attempts = 0 if self._was_well else attempts + 1
                self._stopping.wait(retry_s(attempts))

    def _read(self, session: NvmlSession, look_again_s: float) -> None:
        """Reads until it is time to look again for a device that is lost while others are well.

        Raises NvmlLost when none is.
        """
        self._ever_opened = True
        self._tell_of(session)
        self._opened.set()
        failed_reads = 0
        lost_since_s: float | None = None
        try:
            while not self._stopping.is_set():
                begun_s = time.monotonic()
                with _Busy(self):
                    samples = session.read()
                failed_now = sum(device.failed_reads for device in session.devices)
                self._hold(samples, failed_now - failed_reads)
                failed_reads = failed_now
                self._tell_of(session)
                if not session.problems():
                    self._was_well = True
                elif lost_since_s is None:
                    lost_since_s = begun_s
                elif begun_s - lost_since_s >= look_again_s:
                    return
                self._stopping.wait(max(0.0, begun_s + self._interval_s - time.monotonic()))
        finally:
            with _Busy(self):
                session.close()

    def _hold(self, samples: list[Sample], failed_reads: int) -> None:
        with self._lock:
            self._dropped += failed_reads
            if len(self._rounds) == MAX_ROUNDS_HELD:
                self._dropped += len(self._rounds.popleft())
            self._rounds.append(samples)

    def _tell_of(self, session: NvmlSession) -> None:
        absences = session.absences()
        told = session.problems() or ([f"absent: {', '.join(absences)}"] if absences else [])
        self._tell("ok", "; ".join(told))

    def _tell(self, state: SourceState, reason: str) -> None:
        """Sets the state; a change between well and failed is an event too."""
        with self._lock:
            if state != self._state:
                what = f"NVML: {reason}" if state == "failed" else "NVML answers again"
                self._events.append(Event(f"source.{state}", time.monotonic_ns(), what))
            self._state, self._reason = state, reason


class _Busy:
    """Marks that the thread is inside NVML, and counts its CPU time."""

    def __init__(self, source: NvmlSource) -> None:
        self._source = source

    def __enter__(self) -> None:
        self._cpu_ns = time.thread_time_ns()
        with self._source._lock:
            self._source._call_began_ns = time.monotonic_ns()

    def __exit__(self, *exception: object) -> None:
        with self._source._lock:
            self._source._call_began_ns = None
            self._source._cost_ns += time.thread_time_ns() - self._cpu_ns
