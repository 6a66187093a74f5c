"""Real Python processes to inject into, and what /proc shows of them."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsagent.agent.inject.memory import mappings

TARGET = str(Path(__file__).with_name("inject_target.py"))
PATIENCE_S = 60.0  # only a failure ever waits so long


class PythonTarget:
    """inject_target.py in one of its states, with some interpreter; killed at the block's end."""

    def __init__(self, state: str, python: str = sys.executable, **popen: Any) -> None:
        self.process = subprocess.Popen(
            [python, TARGET, state],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **popen,
        )
        self.pid = self.process.pid
        self._lines: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self.next_line() == "ready"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def next_line(self) -> Any:
        return self._lines.get(timeout=PATIENCE_S)

    def ask(self, expression: str) -> Any:
        """What it says to that; a statement begins with !."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.next_line()

    def goes_on(self) -> None:
        """Its main thread makes progress."""
        before = self.ask("ticks")
        until(lambda: self.ask("ticks") > before + 1)

    def __enter__(self) -> PythonTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def mapped(pid: int) -> Counter[tuple[str, str]]:
    """Named mappings: permissions and path."""
    return Counter((each.permissions, each.path) for each in mappings(pid) if each.file)


def anonymous_sizes(pid: int) -> Counter[int]:
    return Counter(each.end - each.start for each in mappings(pid) if not each.path)


def descriptors(pid: int) -> list[tuple[str, str]]:
    folder = f"/proc/{pid}/fd"
    return sorted((name, os.readlink(f"{folder}/{name}")) for name in os.listdir(folder))


def threads(pid: int) -> list[str]:
    return sorted(os.listdir(f"/proc/{pid}/task"))


def other_interpreters() -> list[str]:
    """Other versions of CPython on this machine, one each."""
    found: dict[tuple[str, int], str] = {}
    for folder in (Path.home() / ".pyenv" / "versions", Path("/usr")):
        pattern = "*/bin/python3.?*" if folder != Path("/usr") else "bin/python3.?*"
        for path in sorted(folder.glob(pattern)):
            minor = path.name.removeprefix("python3.")
            if minor.isdigit() and int(minor) >= 8:  # the target's script needs that
                found.setdefault((str(folder), int(minor)), str(path))
    return [path for _, path in sorted(found.items())]
