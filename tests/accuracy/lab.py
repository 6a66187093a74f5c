"""The laboratory's bench: a real engine under load, the real agent on it, and the truth.

Everything here keeps its own clock (CLOCK_MONOTONIC) and knows nothing of
what the agent says; the tests compare the two afterwards.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsagent.agent.account import Account
from dsagent.agent.sinks.reader import read_accounts

READY_S = 120.0
DSAGENT = Path(sys.executable).with_name("dsagent")


@dataclass(slots=True)
class Engine:
    """A reference engine that is serving."""

    process: subprocess.Popen[str]
    host: str
    port: int
    model: str

    @property
    def pid(self) -> int:
        return self.process.pid


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
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@contextmanager
def engine(model: str, *flags: str) -> Iterator[Engine]:
    command = [sys.executable, "-m", "dsagent.instrumentation.reference"]
    command += ["--model", model, "--host", "127.0.0.1", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _, match = wait_for_line(process, r"listening on http://([\d.]+):(\d+)")
        yield Engine(process, match[1], int(match[2]), model)
    finally:
        process.send_signal(signal.SIGCONT)
        _end(process)


@dataclass(slots=True)
class Observed:
    """What the agent said at its end."""

    summary: dict[str, Any] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)  # by trace id


@contextmanager
def agent(pid: int, directory: Path) -> Iterator[Observed]:
    """Attaches for the length of the block; what it found is there after it."""
    command = [str(DSAGENT), "attach", str(pid), "--record", str(directory), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    observed = Observed()
    try:
        lines, _ = wait_for_line(process, r"attached to")
        yield observed
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(30) == 0, "".join(lines)
        observed.summary = json.loads(output)
        observed.accounts = {a.trace_id: a for a in read_accounts(directory, None)}
    finally:
        _end(process)


@dataclass(slots=True)
class Sent:
    """One request as its client saw it."""

    trace_id: str
    prompt: str
    max_tokens: int
    sent_ns: int = 0
    first_ns: int | None = None
    end_ns: int | None = None
    chunks: int = 0
    error: str | None = None


def send(target: Engine, prompt: str, max_tokens: int, dice: random.Random) -> Sent:
    """A streamed chat with a trace context of its own; blocks until its end."""
    sent = Sent(f"{dice.getrandbits(128) | 1:032x}", prompt, max_tokens)
    connection = http.client.HTTPConnection(target.host, target.port, timeout=120)
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    headers = {
        "Content-Type": "application/json",
        "traceparent": f"00-{sent.trace_id}-{dice.getrandbits(64) | 1:016x}-01",
    }
    sent.sent_ns = time.monotonic_ns()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            sent.error = f"{response.status} {response.read(500)!r}"
            return sent
        for line in response:
            if line.startswith(b"data: {"):
                sent.chunks += 1
                if sent.first_ns is None and b'"content"' in line:
                    sent.first_ns = time.monotonic_ns()
    except OSError as error:
        sent.error = repr(error)
    finally:
        sent.end_ns = time.monotonic_ns()
        connection.close()
    return sent


WORDS = (
    *("river", "stone", "lantern", "quiet", "harbour", "copper", "window", "orchard", "signal"),
    *("winter", "ladder", "garden", "thunder", "velvet", "compass", "bridge", "candle", "meadow"),
    *("anchor", "mirror", "forest", "letter", "engine", "island"),
)


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


class Load:
    """Closed-loop clients, each with its own seeded requests, until stopped."""

    def __init__(self, target: Engine, *, clients: int, max_tokens: tuple[int, int], seed: int):
        self.sent: list[Sent] = []
        self._target = target
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed * 1000 + i),), daemon=True)
            for i in range(clients)
        ]

    def _run(self, dice: random.Random) -> None:
        while not self._stop.is_set():
            prompt = f"Tell me about the {text(dice, dice.randint(4, 16))}."
            self.sent.append(send(self._target, prompt, dice.randint(*self._max_tokens), dice))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def wait_for(self, requests: int, timeout_s: float = 180.0) -> None:
        """Until that many more requests have ended."""
        wanted = len(self.sent) + requests
        deadline = time.monotonic() + timeout_s
        while len(self.sent) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {len(self.sent)} of {wanted} requests ended in time")
            self._stop.wait(0.02)


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done, by the injector's own clock."""

    name: str
    start_ns: int
    end_ns: int
    culprit: str | None = None  # a command, or a trace id
    culprit_pids: tuple[int, ...] = ()

    def hit_ns(self, account: Account) -> int:
        """How much of the request's life it covers."""
        record = account.record
        return max(0, min(self.end_ns, record.sent_ns) - max(self.start_ns, record.received_ns))


def stop_process(target: Engine, seconds: float) -> Fault:
    start_ns = time.monotonic_ns()
    os.kill(target.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(target.pid, signal.SIGCONT)
    return Fault("stop", start_ns, time.monotonic_ns())


HOG = """
import ctypes, os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
ctypes.CDLL(None).prctl(15, sys.argv[2].encode(), 0, 0, 0)
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    pass
"""


def hog_cpus(cpus: set[int], seconds: float, name: str) -> Fault:
    """One busy process on each of `cpus`."""
    hogs = [
        subprocess.Popen(
            [sys.executable, "-c", HOG, str(cpu), name, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for cpu in sorted(cpus)
    ]
    for hog in hogs:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "ready\n"
    start_ns = time.monotonic_ns()
    for hog in hogs:
        hog.wait()
        assert hog.stdout is not None
        hog.stdout.close()
    pids = tuple(hog.pid for hog in hogs)
    return Fault("hog", start_ns, time.monotonic_ns(), name, pids)


def long_prefill(target: Engine, words: int, dice: random.Random) -> Fault:
    """A long prompt sent into whatever is running; its prefill lasts until its first token."""
    sent = send(target, text(dice, words), 2, dice)
    assert sent.error is None, sent.error
    assert sent.first_ns is not None
    return Fault("long prefill", sent.sent_ns, sent.first_ns, sent.trace_id)
