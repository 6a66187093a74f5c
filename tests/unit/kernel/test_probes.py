"""The table of probes says all that the BPF sources hold, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsagent.agent.probes import (
    OBJECTS,
    PROBES,
    PROGRAM_TIERS,
    TIERS,
    Probe,
    probes_of,
    programs_of,
)
from dsagent.agent.sources.bpf import build
from dsagent.agent.sources.bpf.loader import Loaded

FOLDER = Path(build.__file__).parent
SECTION = re.compile(r'^SEC\("(tp_btf/|iter/|perf_event)(\w*)"\)\nint (\w+)\(', re.MULTILINE)


def test_the_objects_are_those_of_the_sources() -> None:
    sharing = {path.name for path in build.sources() if '"maps.h"' in path.read_text()}
    assert {f"{name}.bpf.c" for name in OBJECTS} == sharing


@pytest.mark.parametrize("name", OBJECTS)
def test_the_programs_are_those_of_the_source(name: str) -> None:
    found = SECTION.findall((FOLDER / f"{name}.bpf.c").read_text())
    kinds = {"tp_btf/": "", "iter/": "iter:", "perf_event": "perf:"}
    spelled = {program: kinds[kind] + hook for kind, hook, program in found}
    assert set(spelled) == {program.name for program in OBJECTS[name]}
    for program in OBJECTS[name]:
        assert program.hook.startswith(spelled[program.name])


def test_every_program_tells_something_and_every_probe_has_programs() -> None:
    named = {program.name for group in OBJECTS.values() for program in group}
    used = {name for probe in PROBES for way in probe.ways for name in way}
    assert used == named
    names = [probe.name for probe in PROBES]
    assert len(names) == len(set(names)) >= 20
    assert all(probe.measures and probe.ways for probe in PROBES)


def test_each_tier_has_all_of_the_one_before_and_more() -> None:
    sizes = [len(probes_of(tier)) for tier in TIERS]
    assert sizes == sorted(set(sizes)) and sizes[-1] == len(PROBES)
    programs = [programs_of(tier) for tier in TIERS]
    assert programs[0] < programs[1] < programs[2]
    # The first object is never detached.
    assert programs[0] == {program.name for program in OBJECTS["sched"]}
    for name, tier in PROGRAM_TIERS.items():
        assert [name in programs_of(each) for each in TIERS] == [
            TIERS.index(each) >= TIERS.index(tier) for each in TIERS
        ]


def test_unasked_nothing_is_paid_for_with_each_page_fault() -> None:
    assert PROGRAM_TIERS["on_fault_user"] == PROGRAM_TIERS["on_fault_minor"] == "full"
    assert PROGRAM_TIERS["on_fault_major"] == PROGRAM_TIERS["on_file_fault"] == "default"


def test_a_probe_is_lost_only_when_no_way_is_left() -> None:
    loaded = object.__new__(Loaded)
    loaded.missing = {"a": "no a", "c": "no c"}
    assert loaded.why_not(Probe("x", "", (("b",),))) == ""
    assert loaded.why_not(Probe("x", "", (("a", "b"), ("b",)))) == ""
    assert loaded.why_not(Probe("x", "", (("b", "c"), ("a",)))) == "no c"
