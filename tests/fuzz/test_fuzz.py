"""Every reader of others' bytes, with what hypothesis makes of honest input, and with each input
that was once a finding. `make fuzz-nightly` looks further, guided by what code is reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_targets import TARGETS, FuzzTarget, patched
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FOUND = Path(__file__).parent / "found"
# Of all targets together: half a minute here.
EXAMPLES = 60


@st.composite
def changed(draw: st.DrawFn, target: FuzzTarget) -> bytes:
    """An honest input with pieces replaced, cut out, put in, or doubled."""
    content = bytearray(draw(st.sampled_from(target.seeds())))
    pieces = st.binary(max_size=40)
    if target.words:
        pieces |= st.sampled_from(target.words)
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 16)))
        match draw(st.sampled_from(["replace", "cut", "put in", "double"])):
            case "replace":
                piece = draw(pieces)
                content[start : start + len(piece)] = piece
            case "cut":
                del content[start:end]
            case "put in":
                content[start:start] = draw(pieces)
            case "double":
                content[start:start] = content[start:end] * draw(st.integers(1, 40))
    return bytes(content)


@pytest.mark.parametrize("name", sorted(TARGETS))
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_bytes_raise_anything_unsaid(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    target.run(data.draw(changed(target)))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_honest_input_and_what_was_once_found(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds():
        target.run(seed)
    for path in sorted((FOUND / name).glob("*")):
        target.run(path.read_bytes())


def test_patches_are_what_they_say() -> None:
    assert patched(b"abcdef", b"") == b"abcdef"
    assert patched(b"abcdef", b"\x02\0\0\0\x02XY") == b"abXYef"
    assert patched(b"abcdef", b"\x02\0\0\0\0") == b"ab"
    assert patched(b"abcdef", b"\x05\0\0\0\x03XYZ") == b"abcdeX"
