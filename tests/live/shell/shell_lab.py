"""Real children for the shell's live tests: engines, and the real `dsagent` command."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

COMMAND = str(Path(sys.executable).with_name("dsagent"))
PATIENCE_S = 60.0  # for what must happen; only a failure ever waits so long


class Child:
    """A process whose lines are read as they come, killed at the end of the block."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self.pid = self.process.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self._events: queue.Queue[tuple[str, str | None]] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream, lines))
            for name, stream, lines in (
                ("out", self.process.stdout, self.out),
                ("err", self.process.stderr, self.err),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip("\n"))
            self._events.put((name, line))
        self._events.put((name, None))

    def wait_line(self, wanted: Callable[[str], bool]) -> str:
        """The next line, on either stream, that is wanted."""
        ended = 0
        while ended < 2:
            _, line = self._events.get(timeout=PATIENCE_S)
            if line is None:
                ended += 1
            elif wanted(line):
                return line.rstrip("\n")
        raise AssertionError(f"it ended without that line: {self.out} {self.err}")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return code

    def document(self) -> Any:
        return json.loads("\n".join(self.out))

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # a line that it never read
                    stream.close()


class Server(Child):
    """`dsagent serve` with the smallest model, at a free port of `host`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        serve = [COMMAND, "serve", "--model", "tiny-llama", "--host", host, "--port", "0"]
        super().__init__(serve)
        try:
            line = self.wait_line(lambda each: "listening on http://" in each)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.url = line.split("listening on ")[1]

    def __enter__(self) -> Server:
        return self

    def complete(self, trace_id: str, request_id: str = "") -> Any:
        """The reply to a short prompt: 8 tokens."""
        body = {"model": "tiny-llama", "prompt": "one two three", "max_tokens": 8}
        headers = {
            "Content-Type": "application/json",
            "traceparent": f"00-{trace_id}-b7ad6b7169203331-01",
            **({"X-Request-Id": request_id} if request_id else {}),
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return json.load(reply)


class Engine(Child):
    """shell_engine.py: real rings, no model."""

    def __init__(
        self, *, step_ms: float = 3.0, under: Sequence[str] = (), more: Sequence[str] = ()
    ) -> None:
        """`more`: words that it does not look at, to be known by."""
        script = str(Path(__file__).with_name("shell_engine.py"))
        super().__init__([*under, sys.executable, script, str(step_ms), *more])
        try:
            self.engine_pid = int(self.wait_line(lambda line: line.startswith("ready")).split()[1])
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Engine:
        return self

    def do(self, order: str) -> None:
        self.say(order)
        self.wait_line(lambda line: line.startswith("done "))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if hasattr(self, "engine_pid") and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # a test ended it
                os.kill(self.engine_pid, signal.SIGKILL)
        super().__exit__(kind, error, trace)


class Agent(Child):
    """`dsagent attach PID …`; `attached` waits until it is."""

    def __init__(self, pid: int, *flags: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__([COMMAND, "attach", str(pid), *flags], env)

    def __enter__(self) -> Agent:
        return self

    def attached(self) -> Agent:
        self.wait_line(lambda line: line.startswith("attached to "))
        return self


def dsagent(
    *argv: str, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        [COMMAND, *argv],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **(env or {})},
        check=False,
    )
    if check:
        assert ran.returncode == 0, ran.stderr
    return ran


def asked(*argv: str) -> Any:
    """The document that a command prints with --json."""
    return json.loads(dsagent(*argv, "--json").stdout)


def add_up(document: Mapping[str, Any]) -> None:
    parts_ns = sum(part["ns"] for part in document["parts"])
    assert parts_ns + document["unattributed_ns"] == document["e2e_ns"]
    assert document["unattributed_ns"] >= 0
    if document["ttft_ns"] is not None:
        parts_ns = sum(part["ns"] for part in document["ttft_parts"])
        assert parts_ns + document["ttft_unattributed_ns"] == document["ttft_ns"]
