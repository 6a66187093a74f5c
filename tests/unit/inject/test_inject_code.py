"""The machine code is what its source says, and the block lies where the code looks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dsagent.agent.inject import code

SOURCE = Path(__file__).with_name("call.s")
NAMES = ("r11", "rcx", "r9", "r8", "r10", "rdx", "rsi", "rdi", "rax")

needs_assembler = pytest.mark.skipif(
    shutil.which("as") is None or shutil.which("objcopy") is None, reason="needs binutils"
)


def assembled(source: str, folder: Path) -> bytes:
    target, raw = folder / "code.o", folder / "code.bin"
    subprocess.run(["as", "-o", target, "-"], input=source, text=True, check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", target, raw], check=True)
    return raw.read_bytes()


@needs_assembler
def test_call_is_its_source(tmp_path: Path) -> None:
    expected = assembled(SOURCE.read_text(), tmp_path)
    assert code.call_code(0x1122334455667788, 0x99AABBCCDDEEFF00) == expected
    assert len(expected) == code.CALL_BYTES


@needs_assembler
def test_syscall_is_its_source(tmp_path: Path) -> None:
    registers = {name: 0x0102030405060700 + at for at, name in enumerate(NAMES)}
    moves = "\n".join(f"movabs ${value}, %{name}" for name, value in registers.items())
    source = f"syscall\n{moves}\njmp *0f(%rip)\n0: .quad 0x7f0011223344\n"
    made = code.syscall_code({**registers, "rip": 0x7F0011223344})
    assert made == assembled(source, tmp_path)
    assert len(made) == code.SYSCALL_BYTES


def test_the_source_and_the_block_agree() -> None:
    offsets = {}
    for line in SOURCE.read_text().splitlines():
        if line.startswith(".set "):
            name, _, value = line.removeprefix(".set ").partition(", ")
            offsets[name] = eval(value, {}, offsets)
    for name in ("XSAVE", "FLAGS", "MXCSR", "ENSURE", "RELEASE", "ADD", "RUN", "TEXT"):
        assert getattr(code, f"{name}_AT") == offsets[name]
    for name in ("RETURNED", "QUEUED", "STATE", "RESULT"):
        assert getattr(code, f"{name}_AT") == offsets[name]
    assert offsets["REGS"] == code.REGISTERS_AT
    registers = dict.fromkeys((*NAMES, "rbp", "r12", "r13", "r14", "r15", "rsp", "rbx"), 7)
    made = code.block({**registers, "eflags": 0x246}, add=1, run=2, text=3, take_lock=(4, 5))
    words = {
        code.REGISTERS_AT + at * 8: int.from_bytes(made[at * 8 : at * 8 + 8], "little")
        for at in range(len(made) // 8)
    }
    assert words[code.FLAGS_AT] == 0x246
    assert (words[code.ADD_AT], words[code.RUN_AT]) == (1, 2)
    assert (words[code.TEXT_AT], words[code.ENSURE_AT], words[code.RELEASE_AT]) == (3, 4, 5)
    assert words[code.QUEUED_AT] == code.NOT_QUEUED
    assert words[code.STATE_AT] == code.STATE_WAITS
    assert code.REGISTERS_AT + len(made) <= code.REPORT_AT
