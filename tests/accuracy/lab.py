"""The laboratory's bench: a real engine and the real agent on it.

Everything in this folder keeps its own clock (CLOCK_MONOTONIC) and knows nothing of
what the agent says; truth.py compares the two afterwards.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsagent.agent.attribution.account import Account
from dsagent.agent.sinks.reader import read_accounts

READY_S = 120.0
DSAGENT = Path(sys.executable).with_name("dsagent")
FAULTY_ENGINE = Path(__file__).with_name("faulty_engine.py")


@dataclass(slots=True)
class Engine:
    """A reference engine that is serving, with faults inside it that wait for a command."""

    process: subprocess.Popen[str]
    host: str
    port: int
    model: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def fault(self, name: str, **settings: float) -> list[tuple[int, int]]:
        """Has the engine's own fault done, and returns when it was at work (start, end), by the
        clock of the thread that did it; returns when it is over."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"fault": name, **settings}) + "\n")
        self.process.stdin.flush()
        return [(start, end) for start, end in json.loads(self.process.stdout.readline())]


def _follow(stream: Any, lines: list[str], wanted: re.Pattern[str], seen: threading.Event) -> None:
    with suppress(ValueError):  # closed by whoever ended the process
        for line in stream:
            lines.append(line)
            if wanted.search(line):
                seen.set()
    seen.set()  # it ended; whoever waits looks at the lines


def wait_for_line(process: subprocess.Popen[str], wanted: str) -> tuple[list[str], re.Match[str]]:
    """Waits for a line on stderr that matches; raises with all lines if it never comes."""
    pattern = re.compile(wanted)
    lines: list[str] = []
    seen = threading.Event()
    threading.Thread(
        target=_follow, args=(process.stderr, lines, pattern, seen), daemon=True
    ).start()
    seen.wait(READY_S)
    match = next((m for line in list(lines) if (m := pattern.search(line))), None)
    if match is None:
        process.kill()
        raise RuntimeError(f"{process.args!r} never said {wanted!r}:\n{''.join(lines)}")
    return lines, match


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()


@contextmanager
def engine(model: str, *flags: str) -> Iterator[Engine]:
    command = [sys.executable, str(FAULTY_ENGINE)]
    command += ["--model", model, "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, match = wait_for_line(process, r"listening on http://([\d.]+):(\d+)")
        yield Engine(process, match[1], int(match[2]), model)
    finally:
        process.send_signal(signal.SIGCONT)
        _end(process)


@dataclass(slots=True)
class Observed:
    """What the agent said at its end."""

    directory: Path
    summary: dict[str, Any] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)  # by trace id


@contextmanager
def agent(
    pid: int, directory: Path, *flags: str, started_by: Sequence[str] = ()
) -> Iterator[Observed]:
    """Attaches for the length of the block; what it found is there after it. What is scored is
    what it says with all its eyes open: what that costs is `make bench`'s business."""
    command = [*started_by, str(DSAGENT), "attach", str(pid), "--record", str(directory), "--json"]
    command += ["--max-overhead", "50%", "--tier", "full", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    observed = Observed(directory)
    try:
        lines, _ = wait_for_line(process, r"attached to")
        yield observed
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(60) == 0, "".join(lines)
        observed.summary = json.loads(output)
        observed.accounts = {a.trace_id: a for a in read_accounts(directory, None)}
    finally:
        _end(process)
