"""How a stopped thread goes on, for each way in which it may have been stopped."""

from __future__ import annotations

import pytest

from dsagent.agent.inject.ptrace import Stop, Stopped
from dsagent.agent.inject.way_back import (
    Place,
    as_if_nothing,
    at_call,
    at_syscall,
    handler_returns_to,
    interrupted,
    place_of,
)

RIP = 0x7F0000001000
READ, POLL, CLOCK_NANOSLEEP, FUTEX, EPOLL_WAIT, WRITE = 0, 7, 230, 202, 232, 1
WAIT_BITSET_PRIVATE, WAKE_PRIVATE = 0x189, 0x81
EINTR, ERESTARTSYS, ERESTARTNOHAND, ERESTART_RESTARTBLOCK = 4, 512, 514, 516


def word(value: int) -> int:
    return value & (1 << 64) - 1


def stopped(number: int, result: int, how: Stop = Stop.INTERRUPTED, rsi: int = 0) -> Stopped:
    registers = {
        "orig_rax": word(number), "rax": word(result), "rip": RIP, "rsp": 0x7FFC00001238,
        "rsi": rsi, "rdi": 3, "rdx": 0, "r10": 0, "r8": 0, "r9": 0,
    }  # fmt: skip
    return Stopped(how, registers, 0)


def goes_on(registers: dict[str, int]) -> tuple[int, int]:
    assert registers["orig_rax"] == -1  # else the kernel would start the call again by itself
    return registers["rip"] - RIP, registers["rax"]


@pytest.mark.parametrize(
    ("stop", "unseen", "cut"),
    [
        # In its own code, and with a result that has just come: untouched.
        (stopped(-1, 42), (0, 42), (0, 42)),
        (stopped(READ, 17), (0, 17), (0, 17)),
        (stopped(FUTEX, 0, rsi=WAIT_BITSET_PRIVATE), (0, 0), (0, 0)),
        # Taken out of a call: started again; a wait ends with EINTR where that is asked for.
        (stopped(READ, -ERESTARTSYS), (-2, READ), (-2, READ)),
        (stopped(WRITE, -ERESTARTSYS), (-2, WRITE), (-2, WRITE)),
        (stopped(CLOCK_NANOSLEEP, -ERESTARTNOHAND), (-2, CLOCK_NANOSLEEP), (0, word(-EINTR))),
        (
            stopped(FUTEX, -ERESTARTSYS, rsi=WAIT_BITSET_PRIVATE),
            (-2, FUTEX),
            (0, word(-EINTR)),
        ),
        # What the kernel alone can go on with.
        (stopped(POLL, -ERESTART_RESTARTBLOCK), (0, word(-EINTR)), (0, word(-EINTR))),
        # The kernel ends it itself.
        (stopped(EPOLL_WAIT, -EINTR), (0, word(-EINTR)), (0, word(-EINTR))),
        # About to begin: done afterwards, but for waits that have no memory.
        (stopped(WRITE, -38, Stop.SYSCALL_ENTRY), (-2, WRITE), (-2, WRITE)),
        (stopped(CLOCK_NANOSLEEP, -38, Stop.SYSCALL_ENTRY),) + ((-2, CLOCK_NANOSLEEP),) * 2,
        (
            stopped(FUTEX, -38, Stop.SYSCALL_ENTRY, rsi=WAIT_BITSET_PRIVATE),
            (-2, FUTEX),
            (0, word(-EINTR)),
        ),
        # Waking others must not be lost.
        (stopped(FUTEX, -38, Stop.SYSCALL_ENTRY, rsi=WAKE_PRIVATE), (-2, FUTEX), (-2, FUTEX)),
    ],
)
def test_goes_on(stop: Stopped, unseen: tuple[int, int], cut: tuple[int, int]) -> None:
    assert goes_on({**as_if_nothing(stop), "rax": word(as_if_nothing(stop)["rax"])}) == unseen
    assert goes_on({**interrupted(stop), "rax": word(interrupted(stop)["rax"])}) == cut


@pytest.mark.parametrize(
    ("stop", "place"),
    [
        (stopped(-1, 42), Place(in_kernel=False)),
        (stopped(READ, 17), Place(in_kernel=True)),
        (stopped(READ, -ERESTARTSYS), Place(in_kernel=True, waits=True)),
        (stopped(EPOLL_WAIT, -EINTR), Place(in_kernel=True, waits=True)),
        (stopped(WRITE, -ERESTARTSYS), Place(in_kernel=True)),
        (
            stopped(FUTEX, -ERESTARTSYS, rsi=WAIT_BITSET_PRIVATE),
            Place(in_kernel=True, waits_for_lock=True),
        ),
        (stopped(FUTEX, -ERESTARTSYS, rsi=WAKE_PRIVATE), Place(in_kernel=True)),
    ],
)
def test_place(stop: Stopped, place: Place) -> None:
    assert place_of(stop) == place


def test_calls_run_below_the_red_zone_on_an_aligned_stack() -> None:
    registers = at_call(stopped(-1, 42), 0x1000)
    assert registers["rip"] == 0x1000
    assert registers["rsp"] % 16 == 0
    assert 128 <= 0x7FFC00001238 - registers["rsp"] < 256


def test_arguments_of_a_system_call() -> None:
    registers = at_syscall(stopped(-1, 42), 0x1000, 9, (1, 2, 3, 4, -1, 6))
    names = ("rax", "rdi", "rsi", "rdx", "r10", "r8", "r9", "rip")
    assert [registers[name] for name in names] == [9, 1, 2, 3, 4, -1, 6, 0x1000]


CAVE, CAVE_END = 0x7F1234567E10, 0x7F1234567FB7
SEGMENTS = 0x002B_0000_0000_0033  # ss, fs, gs, cs


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in numbers)


@pytest.mark.parametrize("place", [CAVE, CAVE + 0x45, CAVE_END - 1])
def test_a_handler_that_goes_back_to_our_code_is_recognised(place: int) -> None:
    frame = words(7, 0x7FFC00001238, place, 0x246, SEGMENTS, 0)
    assert handler_returns_to(frame, CAVE, CAVE_END)
    assert handler_returns_to(words(*range(500)) + frame, CAVE, CAVE_END)


@pytest.mark.parametrize(
    "stack",
    [
        b"",
        words(1, 2, 3),
        words(CAVE),  # left behind by a call, or cut off
        words(CAVE, 0x246),
        words(CAVE, 0x246, 0),
        words(CAVE - 1, 0x246, SEGMENTS),
        words(CAVE_END, 0x246, SEGMENTS),
        b"\0" * 4 + words(CAVE, 0x246, SEGMENTS),  # no word of the stack
    ],
)
def test_what_only_looks_like_it_is_not(stack: bytes) -> None:
    assert not handler_returns_to(stack, CAVE, CAVE_END)
