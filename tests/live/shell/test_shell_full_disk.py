"""A disk that fills up while a recording is written: a real one of 1 MB, in a mount namespace."""

from __future__ import annotations

from pathlib import Path

from shell_lab import COMMAND, Child, Engine
from small_disk import needs_a_mount, on_small_disk


@needs_a_mount
def test_a_full_disk_ends_the_recording_not_the_agent(tmp_path: Path) -> None:
    directory = str(tmp_path / "rec")
    with Engine(step_ms=0.2) as engine:
        attach = [COMMAND, "attach", str(engine.pid), "--record", directory, "--json"]
        with Child([*on_small_disk(tmp_path), *attach]) as agent:
            agent.wait_line(lambda line: line.startswith("attached to "))
            # Rows are written when there are some thousands of them; then the disk is full.
            told = "sink recording takes no more: recording stopped: No space left on device"
            number = 0
            while not any(told in line for line in agent.err):
                number += 1
                engine.do(f"request r{number}")
                assert number < 3_000
            for more in range(5):
                engine.do(f"request more{more}")
            agent.process.terminate()
            assert agent.wait() == 0
            summary = agent.document()
    assert [line for line in agent.err if "recording" in line] == [told]
    (sink,) = summary["sinks"]
    assert sink["reason"] == told.partition(": ")[2]
    assert sink["sent"] == sink["acknowledged"] + sink["failed"]
    assert sink["dropped"] > 5 * (6 * 2 + 1)
    assert summary["requests"] == number + 5
    assert summary["uncounted_losses"] == 0
    assert summary["overhead"]["agent_pss_bytes"] < 200_000_000
