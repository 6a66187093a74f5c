"""A real engine that has become slower than it was, for a reason that nobody measures."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lab import Engine, agent, engine  # isort: skip  # of the laboratory
from load import send, text  # isort: skip

CLIENTS = 2
REQUESTS_EACH = 25


@pytest.fixture
def quota() -> Iterator[Path]:
    """A cgroup for the engine; without a limit yet."""
    controller = Path("/sys/fs/cgroup/cpu")
    if not (controller / "cpu.cfs_quota_us").exists():
        pytest.skip("no cgroup v1 cpu controller")
    group = controller / f"dsagent-normal-{os.getpid()}"
    group.mkdir()
    yield group
    group.rmdir()


def load(target: Engine, seed: int) -> None:
    """Decodes alone and in pairs, and prompts of several sizes: enough of each to compare."""

    def stream(seed: int) -> None:
        dice = random.Random(seed)
        for place in range(REQUESTS_EACH):
            send(target, text(dice, (4, 30)[place % 2]), 12, dice)

    streams = [threading.Thread(target=stream, args=(seed + each,)) for each in range(CLIENTS)]
    for each in streams:
        each.start()
    for each in streams:
        each.join()


def events(directory: Path) -> list[tuple[str, str]]:
    return [
        (row["name"], row["reason"])
        for path in sorted(directory.glob("statuses-*.parquet"))
        for row in pq.read_table(path).to_pylist()
        if row["kind"] == "event" and row["name"].startswith("model.")
    ]


def test_an_engine_slower_than_its_last_normal_is_reported(quota: Path, tmp_path: Path) -> None:
    directory = tmp_path / "rec"
    with engine("tiny-llama", "--max-num-seqs", "4") as target:
        (quota / "cgroup.procs").write_text(str(target.pid))
        # The kernel source would measure the throttling, and the steps' time is less that.
        with agent(target.pid, directory, "--without", "kernel"):
            load(target, 0)
        kept = (directory / "normal.json").read_text()
        assert events(directory) == []
        (quota / "cpu.cfs_period_us").write_text("5000")
        (quota / "cpu.cfs_quota_us").write_text("1000")
        with agent(target.pid, directory, "--without", "kernel") as slow:
            load(target, 100)
    ((name, message),) = events(directory)
    assert name == "model.slower"
    assert "times as long as the last known normal" in message
    assert (directory / "normal.json").read_text() == kept
    told = [
        evidence.value
        for account in slow.accounts.values()
        for part in account.parts
        for evidence in part.evidence
        if evidence.fact == "clean steps by the last normal"
    ]
    assert told
    assert max(told) > 1.2
