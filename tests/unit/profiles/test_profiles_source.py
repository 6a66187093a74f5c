"""The source, with programs in py-spy's place that behave well and badly."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from made import TARGET

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.profiles.stacks import Recorded
from dsagent.agent.sources import py_spy
from dsagent.agent.sources.py_spy import PySpySource

PATIENCE_S = 30.0
PIDS = (os.getpid(),)
SAID = "py-spy> Wrote chrome trace to 'x'. Samples: 7 Errors: 0"

NewSource = Callable[..., PySpySource]


def event(what: str, name: str, at_us: int) -> dict[str, object]:
    args = {"filename": "/x.py", "line": 1}
    return {"ph": what, "name": name, "ts": at_us, "tid": 1, "pid": 1, "args": args}


TRACE = json.dumps([event("B", "main", 100), event("B", "work", 200), event("E", "work", 900)])


@pytest.fixture
def new_source(tmp_path: Path) -> Iterator[NewSource]:
    made: list[PySpySource] = []

    def new(script: str, pids: Sequence[int] = PIDS, max_ratio: float = 0.5) -> PySpySource:
        """`script` is a shell's; the output file is "$out", the pid "$pid"."""
        program = tmp_path / f"py-spy-{len(made)}"
        program.write_text(
            "#!/bin/sh\n"
            'while [ $# -gt 0 ]; do case "$1" in --output) out=$2;; --pid) pid=$2;; esac; shift; '
            f"done\n{script}\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        source = PySpySource(TARGET, lambda: pids, max_ratio, py_spy=str(program))
        made.append(source)
        source.start()
        return source

    yield new
    for source in made:
        source.stop()


def polled(source: PySpySource, until: Callable[[], bool] = lambda: False) -> list[Recorded]:
    """Polls until something comes, or until what is wanted is so."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = source.poll(time.monotonic_ns()).profiles
        if found or until():
            return found
        assert time.monotonic() < deadline, f"nothing came: {source.status()}"
        time.sleep(0.01)


def trouble(source: PySpySource) -> str:
    polled(source, lambda: source.status().state != "ok")
    status = source.status()
    assert status.state == "unavailable"
    return status.reason


def test_what_a_run_saw(new_source: NewSource) -> None:
    began_ns = time.monotonic_ns()
    source = new_source(f"echo '{TRACE}' > $out; echo; echo \"{SAID}\"")
    (run,) = polled(source)
    assert run.pid == PIDS[0]
    assert began_ns < run.began_ns < run.ended_ns < time.monotonic_ns()
    stacks = [[frame.function for frame in seen.frames] for seen in run.seen]
    assert stacks == [["main"], ["main", "work"], ["main"]]
    assert run.repeats == 7 - 3
    assert source.status().state == "ok"
    assert source.status().cost_ns > 0


def test_a_large_trace_is_read_in_pieces(
    new_source: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No poll takes much longer than MOST_READING_NS: with no time at all each reads one event."""
    monkeypatch.setattr(py_spy, "MOST_READING_NS", 0)
    source = new_source(f"echo '{TRACE}' > $out")
    polled(source, lambda: source._run is not None)
    run = source._run
    assert run is not None
    polled(source, lambda: run._reader is not None)
    left = 3 - 1
    while not (found := source.poll(time.monotonic_ns()).profiles):
        assert source._run is run
        left -= 1
        assert left >= 0, "more polls than events"
    assert left == 0
    assert len(found[0].seen) == 3


def test_it_never_pauses_and_is_bounded(new_source: NewSource, tmp_path: Path) -> None:
    told = tmp_path / "told"
    source = new_source("exit 1")
    program = Path(source._program or "")
    program.write_text(f'#!/bin/sh\necho "$@" > {told}\nexit 1\n')
    trouble(source)
    words = told.read_text().split()
    assert words[0] == "record"
    assert "--nonblocking" in words
    assert "--native" not in words  # it would pause the target
    assert int(words[words.index("--duration") + 1]) <= 10
    assert int(words[words.index("--rate") + 1]) <= 20


def test_processes_take_turns(new_source: NewSource) -> None:
    source = new_source(f"echo '{TRACE}' > $out; echo $pid", pids=(5, 9, 7))
    seen = []
    for _ in range(4):
        seen += [run.pid for run in polled(source)]
        source._next_ns = 0  # without the pause between
    assert seen == [5, 7, 9, 5]


def test_a_process_in_which_nothing_runs_gives_others_its_turns(new_source: NewSource) -> None:
    script = f"[ $pid = 5 ] && echo '[]' > $out || echo '{TRACE}' > $out"
    source = new_source(script, pids=(5, 9))
    seen = []
    for _ in range(3):
        seen += [run.pid for run in polled(source)]
        source._next_ns = 0  # without the pause between
    assert seen == [9, 9, 9]  # and none of 5, which would be empty
    assert source.status().state == "ok"
    source._resting[5] = 0  # it has rested
    polled(source)
    assert source._last_pid == 9
    assert source._resting[5] > 0  # it has been looked at again in between


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'Permission Denied: Try running again' >&2; exit 1", "CAP_SYS_PTRACE"),
        ("echo 'Error: Failed to find python version' >&2; exit 1", "Failed to find python"),
        ("exit 1", "without a word"),
        ("printf 'Error: \\033[31mred' >&2; exit 1", "\\x1b[31mred"),
        ("echo '{}' > $out", "no trace"),
        ("exit 0", "no trace"),
        ("head -c 100000 /dev/urandom > $out", "no trace"),
        ("head -c 100000 /dev/zero | tr '\\0' '[' > $out", "no trace"),
    ],
)
def test_why_it_cannot(new_source: NewSource, script: str, expected: str) -> None:
    reason = trouble(new_source(script))
    assert expected in reason
    assert f"process {PIDS[0]}" in reason
    assert reason.isprintable()


def test_one_process_that_cannot_be_sampled_keeps_nobody_from_the_others(
    new_source: NewSource,
) -> None:
    source = new_source(f"[ $pid = 5 ] && exit 1; echo '{TRACE}' > $out", pids=(5, 9))
    (run,) = polled(source)
    assert run.pid == 9
    status = source.status()
    assert status.state == "ok"
    assert "process 5" in status.reason


def test_a_program_that_hangs_is_ended(
    new_source: NewSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "DEADLINE_S", 0.3 - py_spy.RUN_S)
    assert "not done" in trouble(new_source("exec sleep 1000"))


def test_one_that_somebody_kills_was_not_too_slow(new_source: NewSource) -> None:
    assert "was killed" in trouble(new_source("kill -9 $$"))


def test_trying_in_vain_is_paid_too(new_source: NewSource) -> None:
    """Processes that are no Python would else be tried one right after the other."""
    source = new_source("exit 1", pids=(5, 9), max_ratio=0.001)
    polled(source, lambda: source._run is not None)
    began_ns = time.monotonic_ns()
    polled(source, lambda: source._run is None)
    assert source._next_ns > began_ns + 100_000_000


def test_it_leaves_no_child(new_source: NewSource) -> None:
    source = new_source("exec sleep 1000")
    source.poll(time.monotonic_ns())
    assert source._run is not None
    child = source._run._process.pid
    source.stop()
    source.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_without_the_program_it_is_unavailable(tmp_path: Path) -> None:
    source = PySpySource(TARGET, lambda: PIDS, 0.01, py_spy=str(tmp_path / "none"))
    with pytest.raises(SourceUnavailable, match="pip install"):
        source.start()


def test_what_others_cost_leaves_less_and_then_nothing(new_source: NewSource) -> None:
    source = new_source(f"echo '{TRACE}' > $out", max_ratio=0.01)
    polled(source)
    source.pace(0.02, time.monotonic_ns() + 5_000_000_000)
    source._next_ns = 0
    source.poll(time.monotonic_ns())
    assert source._run is None
    assert "--max-overhead" in source.status().reason
    source.pace(0.001, time.monotonic_ns() + 10_000_000_000)
    source._next_ns = 0
    assert polled(source)
