"""The table of probes says all that the BPF sources hold, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsagent.agent.probes import OBJECTS, PROBES, Probe
from dsagent.agent.sources.bpf import build
from dsagent.agent.sources.bpf.loader import Loaded

FOLDER = Path(build.__file__).parent
SECTION = re.compile(r'^SEC\("(tp_btf/|iter/|perf_event)(\w*)"\)\nint (\w+)\(', re.MULTILINE)


def test_the_objects_are_those_of_the_sources() -> None:
    assert {f"{name}.bpf.c" for name in OBJECTS} == {path.name for path in build.sources()}


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


def test_a_probe_is_lost_only_when_no_way_is_left() -> None:
    loaded = object.__new__(Loaded)
    loaded.missing = {"a": "no a", "c": "no c"}
    assert loaded.why_not(Probe("x", "", (("b",),))) == ""
    assert loaded.why_not(Probe("x", "", (("a", "b"), ("b",)))) == ""
    assert loaded.why_not(Probe("x", "", (("b", "c"), ("a",)))) == "no c"
