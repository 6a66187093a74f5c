"""The table of what is loaded to look from outside is that of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsagent.agent.probes import OUTSIDE_OBJECTS, OUTSIDE_PROBES, PROBES
from dsagent.agent.sources.bpf import build

FOLDER = Path(build.__file__).parent
SECTION = re.compile(r'^SEC\("(?:tp_btf/|iter/|kprobe)(\w*)"\)\nint (\w+)\(', re.MULTILINE)


@pytest.mark.parametrize("name", OUTSIDE_OBJECTS)
def test_the_programs_are_those_of_the_source(name: str) -> None:
    found = {
        program: hook for hook, program in SECTION.findall((FOLDER / f"{name}.bpf.c").read_text())
    }
    assert set(found) == {program.name for program in OUTSIDE_OBJECTS[name]}
    for program in OUTSIDE_OBJECTS[name]:
        assert program.hook.removeprefix("iter:").startswith(found[program.name])


def test_every_program_tells_something() -> None:
    named = {program.name for group in OUTSIDE_OBJECTS.values() for program in group}
    assert {name for probe in OUTSIDE_PROBES for way in probe.ways for name in way} == named
    assert not {probe.name for probe in OUTSIDE_PROBES} & {probe.name for probe in PROBES}
