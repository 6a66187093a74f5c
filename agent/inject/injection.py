"""Runs a Python source inside another process, once, and leaves nothing there.

The target's main thread is stopped four times, for less than a millisecond
each: to map memory, to queue the text with Py_AddPendingCall, to unmap, and to
see that it has left our code. Each time it finds its own way back (code.py), so
at any moment this process may be killed. What then stays is at most the mapping
with the text (which runs, if it was queued) and 423 bytes behind the last
instruction of a library, where nothing ever runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.inject import code, text, way_back
from dsagent.agent.inject.interpreter import (
    CannotInject,
    Interpreter,
    check_allowed,
    find,
    not_permitted,
)
from dsagent.agent.inject.memory import Memory, MemoryGone, mappings
from dsagent.agent.inject.ptrace import Gone, Halted, Stopped, Tracee
from dsagent.agent.inject.text import Report

RUN_TIMEOUT_S = 30.0  # until the interpreter gets to it
_STEP_TIMEOUT_S = 5.0  # for what the thread does as soon as it has a CPU
_BUSY_TIMEOUT_S = 30.0  # until it has one, on a machine that has none left
_SYSCALL_WAIT_S = 0.25
_STOPS = 40
_NUDGE_S = 0.5
_POLL_S = 0.001

_SYS_MMAP, _SYS_MUNMAP = 9, 11
_READ_WRITE = 3
_PRIVATE_ANONYMOUS_NOREPLACE = 0x2 | 0x20 | 0x100000
_PAGE_BYTES = 4096
_MOST_STACK_BYTES = 64 << 10
_LAST_ADDRESS = 0x7FFF_0000_0000
_RSEQ_CS_AT = 8
_QUEUE_FULL = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """`report`: None where the source could not say anything. `stopped_ns`: for how long the main
    thread was kept stopped, in all; `waited_ns`: from queueing to running. `at_once`: it was run
    where the thread waited in the kernel, instead of being queued."""

    report: Report | None
    stopped_ns: int
    waited_ns: int
    at_once: bool

    @property
    def pause_ns(self) -> int:
        """How long the main thread did nothing of its own."""
        ran_ns = self.report.ended_ns - self.report.began_ns if self.report else 0
        return self.stopped_ns + ran_ns


def run_inside(
    pid: int,
    source: str,
    *,
    timeout_s: float = RUN_TIMEOUT_S,
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> Outcome:
    """Runs `source` in process `pid`, in its main thread, as soon as the interpreter gets to it.

    `on_stage` is told each step before it is taken. Raises CannotInject, with everything taken
    back (an injection that was queued and does not run in time is made to do nothing).
    """
    check_allowed(pid)
    try:
        with Memory(pid) as memory:
            injection = _Injection(pid, memory, find(pid, memory), on_stage)
            return injection.run(source, timeout_s)
    except PermissionError as error:
        raise not_permitted(pid) from error
    except (ProcessGone, Gone, MemoryGone) as error:
        raise CannotInject(f"process {pid} has ended, or runs another program now") from error
    except Halted as error:
        raise CannotInject(str(error)) from error
    except TimeoutError as error:
        raise CannotInject(str(error)) from error


class _Injection:
    def __init__(
        self, pid: int, memory: Memory, python: Interpreter, on_stage: Callable[[str], None]
    ) -> None:
        self._pid = pid
        self._memory = memory
        self._python = python
        self._on_stage = on_stage
        self._stopped_ns = 0
        self._in_use = False  # the interpreter may still look at the block, or run our code

    def run(self, source: str, timeout_s: float) -> Outcome:
        room = code.BLOCK_BYTES + text.MAX_TEXT_BYTES
        block = self._map(room)
        try:
            said = text.text_of(source, block + code.REPORT_AT, code.REPORT_BYTES)
            self._on_stage("write")
            self._memory.write(block + code.BLOCK_BYTES, said)
            queued_ns = time.monotonic_ns()
            self._call(block)
            self._wait_until_run(block, timeout_s)
            at_once = self._memory.word(block + code.QUEUED_AT) == code.NOT_QUEUED
            report = text.report_of(self._memory.read(block + code.REPORT_AT, code.REPORT_BYTES))
        finally:
            if not self._in_use:
                self._unmap(block, room)
        began_ns = report.began_ns if report else time.monotonic_ns()
        return Outcome(report, self._stopped_ns, max(0, began_ns - queued_ns), at_once)

    def _map(self, size_bytes: int) -> int:
        """Memory of the target for the block and the text."""
        address = _free_address(self._pid, size_bytes)
        arguments = (address, size_bytes, _READ_WRITE, _PRIVATE_ANONYMOUS_NOREPLACE, -1, 0)
        self._system_call("map", _SYS_MMAP, arguments)
        if not self._has_done(lambda: self._is_mapped(address)):
            self._clear_cave()
            raise CannotInject(
                f"process {self._pid} was given no memory for it: its address space is limited "
                "(RLIMIT_AS) or full, or it had no CPU"
            )
        return address

    def _unmap(self, block: int, size_bytes: int) -> None:
        self._system_call("unmap", _SYS_MUNMAP, (block, size_bytes))
        self._has_done(lambda: not self._is_mapped(block))
        self._clear_cave()

    def _has_done(self, condition: Callable[[], bool]) -> bool:
        """Whether the thread has done its system call, and it shows. It comes to that as soon as
        it has a CPU; where it has left our code, and it does not show, the kernel has refused."""
        if self._until(condition, _STEP_TIMEOUT_S):
            return True
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0 and self._is_in_our_code(left_s):
            time.sleep(_POLL_S)
        return condition()

    def _is_in_our_code(self, timeout_s: float) -> bool:
        """Where it stops next, which takes a CPU too."""
        tracee = Tracee(self._pid)
        try:
            return self._in_cave(tracee.interrupt(timeout_s))
        finally:
            tracee.detach()
            self._stopped_ns += tracee.stopped_ns

    def _is_mapped(self, address: int) -> bool:
        try:
            self._memory.read(address, 8)
        except MemoryGone:
            return False
        return True

    def _system_call(self, stage: str, number: int, arguments: tuple[int, ...]) -> None:
        cave = self._python.cave
        with self._stopped() as (tracee, stop):
            self._on_stage(f"{stage}: stopped")
            self._memory.write(cave, code.syscall_code(way_back.as_if_nothing(stop)))
            self._on_stage(f"{stage}: written")
            tracee.set_registers(way_back.at_syscall(stop, cave, number, arguments))
            self._on_stage(f"{stage}: set")
        self._on_stage(f"{stage}: let go")

    def _call(self, block: int) -> None:
        at = self._python.cave + code.CALL_AT
        python = self._python
        with self._stopped() as (tracee, stop):
            self._on_stage("call: stopped")
            registers = way_back.interrupted(stop)
            waits = way_back.place_of(stop).waits
            state = code.block(
                registers,
                add=python.add_pending_call,
                run=python.run_simple_string,
                text=block + code.BLOCK_BYTES,
                take_lock=(python.gil_ensure, python.gil_release) if waits else (),
            )
            self._memory.write(block + code.REGISTERS_AT, state)
            self._memory.write(at, code.call_code(block, registers["rip"]))
            self._on_stage("call: written")
            self._in_use = True
            tracee.set_registers(way_back.at_call(stop, at))
            self._on_stage("call: set")
        self._on_stage("call: let go")

    def _wait_until_run(self, block: int, timeout_s: float) -> None:
        """Until it has run and the thread is on its way back."""
        memory = self._memory

        def has_run() -> bool:
            return (
                memory.word(block + code.STATE_AT) == code.STATE_HAS_RUN
                and memory.word(block + code.RETURNED_AT) == 1
            )

        deadline = time.monotonic() + timeout_s
        while not self._until(has_run, _NUDGE_S):
            if memory.word(block + code.QUEUED_AT) == _QUEUE_FULL:
                self._in_use = False
                raise CannotInject(f"the queue of pending calls of process {self._pid} is full")
            if time.monotonic() >= deadline:
                self._give_up(block)
            self._nudge(block)
        self._in_use = False

    def _nudge(self, block: int) -> None:
        """It is queued, and the thread has begun to wait for one of Python's locks meanwhile."""
        if not self._waits(block) or self._memory.word(block + code.RETURNED_AT) != 1:
            return
        with self._stopped() as (tracee, stop):
            if way_back.place_of(stop).waits_for_lock:
                tracee.set_registers(way_back.interrupted(stop))

    def _give_up(self, block: int) -> None:
        """What is queued cannot be taken out of the queue, but made to do nothing. It may begin
        just then, and may have read the text or not: only of one that still waits after that is
        it known."""
        who = f"process {self._pid}"
        if not self._waits(block):
            raise CannotInject(f"{who} is still at it; nothing is expected of it any more")
        self._on_stage("give up: waits")
        self._memory.write(block + code.BLOCK_BYTES, b"\0")
        time.sleep(_POLL_S)  # by then, its word has left the processor that wrote it
        if not self._waits(block):
            raise CannotInject(
                f"{who} began to run it just as it was given up: whether it ran is unknown"
            )
        raise CannotInject(
            f"{who} has not come to run it: its main thread is busy outside Python, or waits; "
            "nothing is expected of it any more"
        )

    def _waits(self, block: int) -> bool:
        return self._memory.word(block + code.STATE_AT) == code.STATE_WAITS

    def _clear_cave(self) -> None:
        for _ in range(_STOPS):
            with self._stopped() as (_, stop):
                self._on_stage("clear: stopped")
                if not self._in_cave(stop):
                    self._memory.write(self._python.cave, bytes(code.CAVE_BYTES))
                    return
            time.sleep(_POLL_S)

    def _in_cave(self, stop: Stopped) -> bool:
        """Or in a signal handler that goes back there: one that is due as soon as the thread goes
        on runs before our code does, or between two of its instructions."""
        cave = self._python.cave
        if 0 <= stop.registers["rip"] - cave < code.CAVE_BYTES:
            return True
        stack = self._stack(stop.registers["rsp"] & ~7)
        return way_back.handler_returns_to(stack, cave, cave + code.CAVE_BYTES)

    def _stack(self, address: int) -> bytes:
        """What lies on it, as far as a handler and its signal's frame reach."""
        pages = []
        end = address + _MOST_STACK_BYTES
        try:
            while address < end:
                size_bytes = min(end - address, _PAGE_BYTES - address % _PAGE_BYTES)
                pages.append(self._memory.read(address, size_bytes))
                address += size_bytes
        except MemoryGone:
            pass  # its bottom is reached
        return b"".join(pages)

    @contextmanager
    def _stopped(self) -> Iterator[tuple[Tracee, Stopped]]:
        """The main thread, at a place where it may be made to call into the interpreter."""
        tracee = Tracee(self._pid)
        try:
            yield tracee, self._at_safe_place(tracee)
        finally:
            tracee.detach()
            self._stopped_ns += tracee.stopped_ns

    def _at_safe_place(self, tracee: Tracee) -> Stopped:
        for _ in range(_STOPS):
            stop = tracee.interrupt()
            if not way_back.is_64_bit(stop.registers):
                raise CannotInject(f"process {self._pid} is no 64-bit process")
            if not way_back.place_of(stop).in_kernel:
                stop = tracee.run_to_system_call(_SYSCALL_WAIT_S) or tracee.interrupt()
            if self._is_safe(tracee, stop):
                return stop
            tracee.run_on()
            time.sleep(_POLL_S)
        raise CannotInject(f"process {self._pid} was never found at a place where it is safe")

    def _is_safe(self, tracee: Tracee, stop: Stopped) -> bool:
        if self._in_cave(stop):
            return False
        if way_back.place_of(stop).in_kernel:
            return True
        rip = stop.registers["rip"]
        if any(segment.start <= rip < segment.end for segment in self._python.never_in):
            return False
        rseq = tracee.rseq_area()
        return not rseq or self._memory.word(rseq + _RSEQ_CS_AT) == 0

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


def _free_address(pid: int, size_bytes: int) -> int:
    """In the middle of the widest hole: neither the heap nor the stack grows there soon."""
    widest, at, end = 0, 0, 0
    for mapping in mappings(pid):
        if mapping.start > _LAST_ADDRESS:
            break
        if end and mapping.start - end > widest:
            widest, at = mapping.start - end, end
        end = mapping.end
    if widest < 4 * size_bytes:
        raise CannotInject(f"process {pid} has no room for memory")
    return (at + widest // 2) & ~(_PAGE_BYTES - 1)
