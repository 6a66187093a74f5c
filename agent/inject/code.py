"""The machine code that runs for a moment in the target (x86-64), and what it reads.

Two pieces lie in the unused end of an executable page (zeros behind the last
instruction of a library), so that no executable memory is made. Both find
their own way back: they restore each register and jump to where the thread
was. From the moment that a thread is set on one of them, nothing depends on
the agent any more; it may be killed.

  syscall   does one system call.
  call      saves the processor's extended state, then either queues `callback`
            with Py_AddPendingCall, or, where the thread waits in the kernel
            without the interpreter's lock, takes the lock as any call-back
            would (PyGILState_Ensure) and runs it there.
  callback  int callback(void *block): runs the text, and says so in the block.

tests/unit/inject/ holds the source; where there is an assembler it is held
equal to these bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

# The block: memory that only the injection uses. Offsets in bytes.
XSAVE_AT = 0  # the processor's extended state, with AMX up to 11 KiB
XSAVE_BYTES = 0x3000
REGISTERS_AT = 0x3000
FLAGS_AT = 0x3080
MXCSR_AT = 0x3088
ENSURE_AT = 0x3090  # PyGILState_Ensure; 0: queue
RELEASE_AT = 0x3098
ADD_AT = 0x30A0  # Py_AddPendingCall
RUN_AT = 0x30A8  # PyRun_SimpleString
TEXT_AT = 0x30B0  # address of the text
RETURNED_AT = 0x30B8  # 1: `call` is on its way back
QUEUED_AT = 0x30C0  # what Py_AddPendingCall returned; NOT_QUEUED
STATE_AT = 0x30C8  # 0: not run yet, 1: runs, 2: has run
RESULT_AT = 0x30D0  # what PyRun_SimpleString returned
REPORT_AT = 0x3100  # what the text says of itself, see text.py
REPORT_BYTES = 0xF00
BLOCK_BYTES = 0x4000  # the text follows

NOT_QUEUED = 1
STATE_WAITS, STATE_RUNS, STATE_HAS_RUN = 0, 1, 2
DEFAULT_MXCSR = 0x1F80

# In the order in which `call` restores them from REGISTERS_AT on.
_RESTORED = (
    "rax", "rcx", "rdx", "rsi", "rdi", "rbp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
    "rsp", "rbx",
)  # fmt: skip

# Of `syscall`: what the call and its arguments have changed, in the order of restoring.
_CHANGED = (
    ("r11", "49bb"), ("rcx", "48b9"), ("r9", "49b9"), ("r8", "49b8"), ("r10", "49ba"),
    ("rdx", "48ba"), ("rsi", "48be"), ("rdi", "48bf"), ("rax", "48b8"),
)  # fmt: skip
_SYSCALL = bytes.fromhex("0f05")
_JUMP = bytes.fromhex("ff2500000000")  # jmp *0(%rip): to the address that follows
SYSCALL_BYTES = len(_SYSCALL) + 10 * len(_CHANGED) + len(_JUMP) + 8

_CALL_HEAD = bytes.fromhex("48bb")  # movabs $block, %rbx
_CALL = bytes.fromhex(
    "b8ffffffff89c2480fae23dbe30fae9388300000fc4883bb90300000007425ff93903000004189c483f80175084889"
    "dfe8c40000004489e7ff93983000004183fc017419488d3dae0000004889deff93a03000004898488983c030000048"
    "c783b830000001000000b8ffffffff89c2480fae2b488da3803000009d488b8300300000488b8b08300000488b9310"
    "300000488bb318300000488bbb20300000488bab283000004c8b83303000004c8b8b383000004c8b93403000004c8b"
    "9b483000004c8ba3503000004c8bab583000004c8bb3603000004c8bbb68300000488ba370300000488b9b78300000"
    "ff2500000000"
)
_CALLBACK = bytes.fromhex(
    "534889fb48c783c830000001000000488bbbb0300000ff93a83000004898488983d030000048c783c8300000020000"
    "0031c05bc3"
)
CALL_BYTES = len(_CALL_HEAD) + 8 + len(_CALL) + 8 + len(_CALLBACK)

CALL_AT = -(-SYSCALL_BYTES // 16) * 16  # in the cave, behind `syscall`
CAVE_BYTES = CALL_AT + CALL_BYTES


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value & (1 << 64) - 1)


def syscall_code(registers: Mapping[str, int]) -> bytes:
    """Does the system call that the thread's registers say when it gets there, then goes on
    with `registers`, at their rip."""
    moves = b"".join(bytes.fromhex(code) + _u64(registers[name]) for name, code in _CHANGED)
    return _SYSCALL + moves + _JUMP + _u64(registers["rip"])


def call_code(block: int, back_to: int) -> bytes:
    """`call` and `callback`; goes on at `back_to` with the registers in the block."""
    return _CALL_HEAD + _u64(block) + _CALL + _u64(back_to) + _CALLBACK


def block(
    registers: Mapping[str, int],
    *,
    add: int,
    run: int,
    text: int,
    take_lock: Sequence[int] = (),
) -> bytes:
    """What `call` reads, from REGISTERS_AT on: `registers` to go on with, addresses of the
    interpreter's functions and of the text; `take_lock`: PyGILState_Ensure and _Release."""
    ensure, release = take_lock or (0, 0)
    saved = b"".join(_u64(registers[name]) for name in _RESTORED)
    return saved + b"".join(
        _u64(value)
        for value in (
            registers["eflags"], DEFAULT_MXCSR, ensure, release, add, run, text, 0, NOT_QUEUED,
            STATE_WAITS, 0,
        )
    )  # fmt: skip
