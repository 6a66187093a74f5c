"""Where a stopped thread is, and the registers it goes on with (pure).

A thread that the kernel took out of a system call has -ERESTART… in rax, and
the kernel would have started the call again. As it runs our code first, this
is done by hand: rip back on the `syscall` instruction, rax its number.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from dsagent.agent.inject.ptrace import Stop, Stopped

_ERESTARTSYS, _ERESTARTNOINTR, _ERESTARTNOHAND, _ERESTART_RESTARTBLOCK = 512, 513, 514, 516
_RESTARTS = (_ERESTARTSYS, _ERESTARTNOINTR, _ERESTARTNOHAND, _ERESTART_RESTARTBLOCK)
_EINTR = 4
_SYSCALL_BYTES = 2
_RED_ZONE_BYTES = 128
_CODE_64 = 0x33  # the code segment of 64-bit programs
_GOES_BACK_TO = struct.Struct("<QQH")  # rip, flags and cs, as they lie in a signal's frame

_FUTEX = 202
_FUTEX_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_FUTEX_COMMAND = 0x7F
# poll, select, epoll_wait, pselect6, ppoll, epoll_pwait, epoll_pwait2 end with EINTR whenever a
# signal was handled, so whoever calls them is prepared for that.
_POLLS = frozenset((7, 23, 232, 270, 271, 281, 441))
# nanosleep, clock_nanosleep likewise, but they write what is left to sleep.
_SLEEPS = frozenset((35, 230))
# read, readv, accept, recvfrom, recvmsg, wait4, waitid, accept4: may take for ever too, but many
# callers count on their being started again.
_READS = frozenset((0, 19, 43, 45, 47, 61, 247, 288))


@dataclass(frozen=True, slots=True)
class Place:
    """`in_kernel`: in a system call, or about to do one. `waits`: for events, data or time, which
    nobody does while holding a lock that a call-back could need. `waits_for_lock`: in a futex,
    where CPython runs pending calls once it is interrupted."""

    in_kernel: bool
    waits: bool = False
    waits_for_lock: bool = False


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def is_64_bit(registers: Mapping[str, int]) -> bool:
    return registers["cs"] == _CODE_64


def _restart_code(stop: Stopped) -> int:
    """ERESTART… of a system call that was cut off; 0 of any other stop."""
    result = -signed(stop.registers["rax"])
    return result if stop.how is Stop.INTERRUPTED and result in _RESTARTS else 0


def place_of(stop: Stopped) -> Place:
    registers = stop.registers
    number = signed(registers["orig_rax"])
    if number < 0:
        return Place(in_kernel=False)
    cut_off = _restart_code(stop) or signed(registers["rax"]) == -_EINTR
    if stop.how is Stop.INTERRUPTED and not cut_off:
        return Place(in_kernel=True)  # it only just returned, with a result
    return Place(
        in_kernel=True,
        waits=number in _POLLS | _SLEEPS | _READS,
        waits_for_lock=number == _FUTEX and registers["rsi"] & _FUTEX_COMMAND in _FUTEX_WAITS,
    )


def as_if_nothing(stop: Stopped) -> dict[str, int]:
    """The thread goes on as if it had never been stopped. Only a wait with a time limit ends with
    EINTR: how far it got is known to the kernel alone, which forgets it where a thread does
    anything else in between."""
    registers = {**stop.registers, "orig_rax": -1}
    code = _restart_code(stop)
    if code == _ERESTART_RESTARTBLOCK:
        registers["rax"] = -_EINTR
    elif code or (stop.how is Stop.SYSCALL_ENTRY):
        registers["rip"] -= _SYSCALL_BYTES
        registers["rax"] = stop.registers["orig_rax"]
    return registers


def interrupted(stop: Stopped) -> dict[str, int]:
    """A wait of the thread ends with EINTR, as if a signal had been handled: what waits for one
    of CPython's locks then runs what is queued. Anything else goes on as if nothing had been."""
    place, number = place_of(stop), signed(stop.registers["orig_rax"])
    # One about to sleep would read back a remaining time that was never written.
    sleeps = number in _SLEEPS and stop.how is Stop.INTERRUPTED
    if (place.waits and (sleeps or number in _POLLS)) or place.waits_for_lock:
        return {**stop.registers, "orig_rax": -1, "rax": -_EINTR}
    return as_if_nothing(stop)


def at_call(stop: Stopped, code: int) -> dict[str, int]:
    """On its own stack, below what a leaf function may keep under the stack pointer."""
    stack = (stop.registers["rsp"] - _RED_ZONE_BYTES) & ~63
    return {**stop.registers, "orig_rax": -1, "rip": code, "rsp": stack}


def at_syscall(stop: Stopped, code: int, number: int, arguments: tuple[int, ...]) -> dict[str, int]:
    registers = {**stop.registers, "orig_rax": -1, "rip": code, "rax": number}
    registers.update(zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False))
    return registers


def handler_returns_to(stack: bytes, start: int, end: int) -> bool:
    """Whether the thread is in a signal handler that goes back to [start, end), less than a page.
    `stack`: of the thread, from rsp on, in whole words."""
    high = start.to_bytes(8, "little")[2:]  # alike in all addresses of a page
    at = stack.find(high)
    while at >= 0:
        place = at - 2
        if place >= 0 and place % 8 == 0 and place + _GOES_BACK_TO.size <= len(stack):
            rip, _, segment = _GOES_BACK_TO.unpack_from(stack, place)
            if start <= rip < end and segment == _CODE_64:
                return True
        at = stack.find(high, at + 1)
    return False
