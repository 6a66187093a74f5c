"""Layouts, and what people are told when loading fails."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import FACT_DTYPE, Kind
from dsagent.agent.sources.bpf import build, layout
from dsagent.agent.sources.bpf.libbpf import Library, explain

HEADER = (Path(build.__file__).parent / "sched.h").read_text()


def test_a_record_is_a_power_of_two() -> None:
    assert FACT_DTYPE.itemsize == 56
    assert layout.RECORD.itemsize == 64


def test_the_kinds_are_the_headers() -> None:
    spelled = dict(re.findall(r"DS_(\w+) = (\d+)", HEADER))
    for kind in Kind:
        assert int(spelled[kind.name]) == kind


@pytest.mark.parametrize("name", ["THREAD_KINDS", "RUNS", "WORDS", "FOREIGNERS"])
def test_the_sizes_are_the_headers(name: str) -> None:
    found = re.search(rf"#define {name} (\d+)", HEADER)
    assert found is not None
    assert int(found[1]) == getattr(layout, name)


def test_the_verifiers_reason_is_found_in_its_log() -> None:
    log = (
        "libbpf: prog 'on_switch': BPF program load failed: Permission denied\n"
        "libbpf: prog 'on_switch': -- BEGIN PROG LOAD LOG --\n"
        "0: (85) call bpf_foo#1\n"
        "R1 pointer |= pointer prohibited\n"
        "processed 38 insns (limit 1000000) max_states_per_insn 0\n"
        "-- END PROG LOAD LOG --\n"
        "libbpf: prog 'on_switch': failed to load: -13\n"
        "libbpf: failed to load object 'x'\n"
    )
    assert explain(errno.EACCES, log) == "Permission denied; R1 pointer |= pointer prohibited"


def test_missing_permission_says_which() -> None:
    assert "CAP_BPF" in explain(errno.EPERM, "libbpf: whatever\n")


def test_nothing_said_is_said() -> None:
    assert explain(0, "") == "no reason given"


def test_a_missing_library_names_the_package() -> None:
    with pytest.raises(SourceUnavailable, match="apt-get install"):
        Library("libbpf-of-another-world.so.1")


def test_build_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_stale", lambda source: True)
    monkeypatch.setattr(build, "_PATH", "/nowhere")
    with pytest.raises(build.BuildError, match="clang-16 is missing: apt-get install"):
        build.build()
