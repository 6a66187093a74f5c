"""Functions found in libraries that were really linked, and in hostile ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsagent.agent.sources.outside.elf import BadElf, Library, gnu_hash

SOURCE = "int first(void) { return 1; }\nint second(void) { return 2; }\nint datum = 3;\n"


def built(folder: Path, *options: str) -> Path:
    source, made = folder / "made.c", folder / "made.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", made, source], check=True)
    return made


def offset_of(data: bytes, name: str) -> int | None:
    fd = os.memfd_create("library")
    try:
        os.write(fd, data)
        return Library(fd).function(name)
    finally:
        os.close(fd)


def code_at(path: Path, name: str) -> int:
    """What nm says, in a library whose code lies at its own address."""
    lines = subprocess.run(["nm", "-D", path], check=True, capture_output=True, text=True).stdout
    return next(
        int(line.split()[0], 16) for line in lines.splitlines() if line.endswith(f" {name}")
    )


def test_functions_are_found_and_data_is_not(tmp_path: Path) -> None:
    made = built(tmp_path, "-fcf-protection=none")
    data = made.read_bytes()
    for name in ("first", "second"):
        assert offset_of(data, name) == code_at(made, name)
    for name in ("datum", "third", ""):
        assert offset_of(data, name) is None


def test_the_cheap_place_lies_behind_endbr64(tmp_path: Path) -> None:
    made = built(tmp_path, "-fcf-protection=full")
    assert offset_of(made.read_bytes(), "first") == code_at(made, "first") + 4


def test_what_is_no_library_says_so() -> None:
    for data in (b"", b"\x7fELF", b"#!/bin/sh\n" * 100):
        with pytest.raises(BadElf):
            offset_of(data, "first")


def test_hash() -> None:
    assert gnu_hash(b"printf") == 0x156B2BB8


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return built(tmp_path_factory.mktemp("good")).read_bytes()


def test_broken_bytes_never_crash(good: bytes) -> None:
    @given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=8), st.data())
    @settings(max_examples=100, deadline=None)
    def broken(changes: list[tuple[int, int]], data: st.DataObject) -> None:
        made = bytearray(good)
        for at, value in changes:
            made[at % len(made)] = value
        length = data.draw(st.sampled_from([len(made), 64, len(made) // 2]))
        with contextlib.suppress(BadElf):
            offset_of(bytes(made[:length]), "second")

    broken()
