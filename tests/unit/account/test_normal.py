"""What was normal is kept, compared with, and never learnt away."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest

from dsagent.agent.attribution.model import CleanStepModel, Shape
from dsagent.agent.attribution.normal import Normal, compare, from_json, is_as_good
from dsagent.agent.facts import Target
from dsagent.agent.session.normal_keeper import FILE, NormalKeeper, ranges, setting_of

S = 1_000_000_000
TARGET = Target(os.getpid(), 1, 0, "python", (), "reference")


@functools.cache
def learnt(
    times: float = 1.0, *, sizes: tuple[int, ...] = (1, 2, 4, 60), steps: int = 100
) -> CleanStepModel:
    """A model of an engine that takes `times` as long as usual; up to 4 % of noise."""
    model = CleanStepModel()
    for i in range(steps):
        for tokens in sizes:
            ns = times * (5_000_000 + 200_000 * tokens) * (1 + (i * 7 % 5) / 100)
            model.observe(Shape(tokens, 0, 0, tokens), round(ns))
    return model


def normal(times: float = 1.0) -> Normal:
    found = Normal.of(learnt(times), unix_ns=5)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("times", "is_slower"), [(1.0, False), (1.03, False), (1.3, True), (0.5, False)]
)
def test_slower_is_what_exceeds_both_bands(times: float, is_slower: bool) -> None:
    compared = compare(normal(), learnt(times))
    assert compared is not None
    assert compared.is_slower is is_slower
    assert compared.sizes == 4
    assert compared.ratio == pytest.approx(times, rel=0.03)


def test_one_size_alone_is_no_jump() -> None:
    slow, usual = learnt(2.0, sizes=(60,)), learnt.__wrapped__(sizes=(1, 2, 4))
    for rows in slow.rows.values():
        for item, ns in rows:
            usual.observe(item, round(ns))
    compared = compare(normal(), usual)
    assert compared is not None
    assert (compared.slower_sizes, compared.is_slower) == (1, False)


def test_nothing_is_compared_before_the_model_is_fitted() -> None:
    assert Normal.of(learnt(steps=10), 5) is None
    assert compare(normal(), learnt(steps=10)) is None
    assert compare(normal(), learnt(sizes=(900,), steps=300)) is None  # no size in common


def test_a_slower_one_never_takes_its_place_however_little_slower() -> None:
    known = normal()
    for times, takes in ((1.01, False), (1.5, False), (0.9, True)):
        model = learnt(times)
        fresh = Normal.of(model, 9)
        assert fresh is not None
        assert is_as_good(fresh, known, compare(known, model)) is takes
    few = Normal.of(learnt(0.5, sizes=(1, 2), steps=200), 9)
    assert few is not None
    assert not is_as_good(few, known, compare(known, learnt(0.5)))  # it knows fewer sizes


def test_the_keeper_tells_a_jump_once_and_keeps_what_was(tmp_path: Path) -> None:
    assert NormalKeeper(tmp_path, TARGET).look(learnt(), "tiny", 1 * S) == []
    kept = (tmp_path / FILE).read_text()
    keeper = NormalKeeper(tmp_path, TARGET)
    slow = learnt(2.0)
    events = [e for at in range(1, 90, 10) for e in keeper.look(slow, "tiny", at * S)]
    events += keeper.end(slow, "tiny", 91 * S)
    assert [event.name for event in events] == ["model.slower"]
    assert "2.00 times as long" in events[0].message
    assert "4 of 4 batch sizes" in events[0].message
    assert slow.normal_ratio == pytest.approx(2.0, rel=0.02)
    assert (tmp_path / FILE).read_text() == kept
    # As quick as it was: nothing to tell. Another model, or other settings: nothing to compare.
    assert NormalKeeper(tmp_path, TARGET).look(learnt(), "tiny", 1 * S) == []
    assert NormalKeeper(tmp_path, TARGET).look(slow, "other", 1 * S) == []
    assert len(json.loads((tmp_path / FILE).read_text())["normals"]) == 2


def test_it_says_nothing_until_the_model_and_its_name_are_known(tmp_path: Path) -> None:
    keeper = NormalKeeper(tmp_path, TARGET)
    assert keeper.look(learnt(), None, 1 * S) == keeper.look(learnt(steps=10), "tiny", 2 * S) == []
    assert not (tmp_path / FILE).exists()


GOOD = {
    "setting": {
        "model": "m", "engine": "e", "arguments": "", "threads": "", "processor": "p", "cores": 2,
        "affinity": "0-1",
    },
    "normal": normal().to_json(),
}  # fmt: skip


def damaged(part: str, **changes: object) -> str:
    return json.dumps({"version": 1, "normals": [{**GOOD, part: {**GOOD[part], **changes}}]})


def test_what_was_written_comes_back() -> None:
    (found,) = from_json(json.loads(json.dumps({"version": 1, "normals": [GOOD]}))).values()
    assert found == normal()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "normals": []}',
        '{"version": 1, "normals": [1]}',
        '{"version": 1, "normals": {}}',
        "[" * 100_000,
        damaged("setting", cores=True),
        damaged("setting", model=7),
        damaged("setting", model="m" * 600),
        damaged("normal", band_ratio=float("nan")),
        damaged("normal", band_ratio=-1),
        damaged("normal", coefficients=[1.0]),
        damaged("normal", coefficients=[1e300] * 17),
        damaged("normal", coefficients=[True] * 17),
        damaged("normal", sizes=[10**9]),
        damaged("normal", sizes="12"),
        damaged("normal", unix_ns=-5),
        damaged("normal", clean_steps=None),
    ],
)
def test_a_damaged_file_is_one_clear_line_and_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    (event,) = NormalKeeper(tmp_path, TARGET).look(learnt(), "tiny", 1 * S)
    assert event.name == "model.normal_unreadable"
    assert "is ignored" in event.message
    assert "\n" not in event.message
    assert len(json.loads((tmp_path / FILE).read_text())["normals"]) == 1  # and begun anew


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    (event,) = NormalKeeper(tmp_path, TARGET).look(learnt(), "tiny", 1 * S)
    assert event.name == "model.normal_unreadable"


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    keeper = NormalKeeper(tmp_path / "gone", TARGET)
    events = [e for at in range(1, 200, 30) for e in keeper.look(learnt(), "tiny", at * S)]
    assert [event.name for event in events] == ["model.normal_not_kept"]


def test_where_it_listens_is_no_setting(tmp_path: Path) -> None:
    for arguments in (("--port", "8000"), ("--host=::1", "--port=99"), ()):
        process = tmp_path / "proc" / str(os.getpid())
        process.mkdir(parents=True, exist_ok=True)
        line = ["/usr/bin/python", "-m", "serve", *arguments, "--model", "tiny"]
        (process / "cmdline").write_bytes(b"\0".join(each.encode() for each in line) + b"\0")
        (process / "environ").write_bytes(b"OMP_NUM_THREADS=2\0SECRET=x\0")
        (tmp_path / "proc" / "cpuinfo").write_text("processor : 0\nmodel name : A Chip\n")
        found = setting_of(TARGET, "tiny", tmp_path / "proc")
        assert found.arguments == "-m serve --model tiny"
        assert (found.threads, found.processor) == ("OMP_NUM_THREADS=2", "A Chip")
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
