"""The reference engine as it is, with faults in its process that wait for a command.

One line of JSON on stdin starts a fault; when it is over, one line on stdout says when
it was at work. Until then nothing but a thread blocked in a read differs from
`python -m dsagent.instrumentation.reference`; the wrapped functions add a look at a
variable.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from dsagent.engine import llama, loop, tokenizer
from dsagent.instrumentation import reference

Interval = tuple[int, int]

_NOISE = os.urandom(1_000_000)
_dirty: list[IO[bytes]] = []  # files for the loop to write to the disk

_PR_SET_NAME = 15
_libc = ctypes.CDLL(None)
_libc_with_gil = ctypes.PyDLL(None)  # its calls keep the GIL
_sampler_lock = threading.Lock()
_lock_waits: list[Interval] = []  # of the loop, for that lock


class Waits:
    """How long each call of one function is to take in addition, for how many calls, and by
    what: `wait` gets the amount."""

    def __init__(self, wait: Callable[[float], Interval]) -> None:
        self._wait = wait
        self._calls = 0
        self._amount = 0.0
        self._done = threading.Event()
        self.intervals: list[Interval] = []

    def arm(self, *, amount: float, calls: int, limit_s: float) -> list[Interval]:
        """Blocks until it has happened so often, or `limit_s` are over."""
        self._done.clear()
        self.intervals = []
        self._amount, self._calls = amount, calls
        self._done.wait(limit_s)
        self._calls = 0
        return self.intervals

    def strike(self) -> None:
        if self._calls <= 0:
            return
        self._calls -= 1
        self.intervals.append(self._wait(self._amount))
        if not self._calls:
            self._done.set()


def _sleep(seconds: float) -> Interval:
    start_ns = time.monotonic_ns()
    time.sleep(seconds)
    return start_ns, time.monotonic_ns()


def _sync(_megabytes: float) -> Interval:
    """Has a file that is only in the cache written to the disk, and waits for it."""
    with _dirty.pop() as file:
        start_ns = time.monotonic_ns()
        os.fsync(file.fileno())
        return start_ns, time.monotonic_ns()


def _take_memory(megabytes: float) -> Interval:
    """Fresh memory, filled and given back, as for what a pass holds only for a while. In large
    pages, so that their faults take little beside what is done to get them. What it waited for a
    CPU meanwhile, by the kernel's account, is left out at the start."""
    size = round(megabytes) << 20
    waited_ns = _run_delay_ns()
    start_ns = time.monotonic_ns()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_char.from_buffer(memory)
        ctypes.memset(ctypes.addressof(view), 1, size)
        del view
    end_ns = time.monotonic_ns()
    return min(end_ns, start_ns + _run_delay_ns() - waited_ns), end_ns


def _run_delay_ns() -> int:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


sampler, tokenising, disk = Waits(_sleep), Waits(_sleep), Waits(_sync)
memory = Waits(_take_memory)


def _wrap(function: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return wrapped


def _before_sampling() -> None:
    if not _sampler_lock.acquire(blocking=False):
        start_ns = time.monotonic_ns()
        _sampler_lock.acquire()
        _lock_waits.append((start_ns, time.monotonic_ns()))
    _sampler_lock.release()
    sampler.strike()
    disk.strike()


def _in_thread(name: str, work: Callable[[], None]) -> None:
    """By a thread that bears the name in the kernel too."""

    def named() -> None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        work()

    thread = threading.Thread(target=named, name=name)
    thread.start()
    thread.join()


def hold_gil(*, seconds: float, times: int, pause_s: float) -> list[Interval]:
    intervals: list[Interval] = []

    def work() -> None:
        for _ in range(times):
            start_ns = time.monotonic_ns()
            _libc_with_gil.usleep(round(seconds * 1e6))
            intervals.append((start_ns, time.monotonic_ns()))
            time.sleep(pause_s)

    _in_thread("lab-gil", work)
    return intervals


def hold_lock(*, seconds: float, times: int, pause_s: float) -> list[Interval]:
    """The sampler needs this lock once a step. Told is when it waited for it."""
    _lock_waits.clear()

    def work() -> None:
        for _ in range(times):
            with _sampler_lock:
                time.sleep(seconds)
            time.sleep(pause_s)

    _in_thread("lab-lock", work)
    return list(_lock_waits)


def stall_disk(*, amount: float, calls: int, limit_s: float) -> list[Interval]:
    """The loop syncs a file of so many megabytes in each of some steps. They are filled before, by
    this thread: filling them in the loop would be work of its own."""
    for _ in range(calls):
        file = tempfile.TemporaryFile()  # noqa: SIM115  closed by who syncs it
        for _ in range(round(amount)):
            file.write(_NOISE)
        file.flush()
        _dirty.append(file)
    intervals = disk.arm(amount=amount, calls=calls, limit_s=limit_s)
    while _dirty:
        _dirty.pop().close()
    return intervals


FAULTS: dict[str, Callable[..., list[Interval]]] = {
    "disk": stall_disk,
    "gil": hold_gil,
    "lock": hold_lock,
    "memory": memory.arm,
    "sampler": sampler.arm,
    "tokenizer": tokenising.arm,
}


def obey() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(FAULTS[command.pop("fault")](**command)), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    names = vars(loop)  # the loop calls it by its own module's name for it
    names["sample"] = _wrap(names["sample"], _before_sampling)
    encode_chat = tokenizer.TextTokenizer.encode_chat
    tokenizer.TextTokenizer.encode_chat = _wrap(  # type: ignore[method-assign]
        encode_chat, tokenising.strike
    )
    forward = llama.Llama.forward
    llama.Llama.forward = _wrap(forward, memory.strike)  # type: ignore[method-assign]
    threading.Thread(target=obey, name="lab-obey", daemon=True).start()
    return reference.main(argv)


if __name__ == "__main__":
    sys.exit(main())
