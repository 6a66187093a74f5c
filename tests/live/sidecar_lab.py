"""A real sidecar that sees only the engines of one test, however many run beside it."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shell_lab import COMMAND, PATIENCE_S, Child, Engine

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening import control

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str) -> T:
    """What `look` finds, as soon as it finds something."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {what}")


class Lab:
    """`token` stands in the command lines of this test's engines, and in no other."""

    def __init__(self, token: str) -> None:
        self.token = token

    def engine(self, step_ms: float = 3.0) -> Engine:
        return Engine(step_ms=step_ms, more=(self.token,))

    def sidecar(self, *flags: str, env: Mapping[str, str] | None = None) -> Sidecar:
        return Sidecar("--match", self.token, *flags, env=env)


class Sidecar(Child):
    """`dsagent sidecar …`, on a free port unless told otherwise; ready once it listens."""

    def __init__(
        self, *flags: str, env: Mapping[str, str] | None = None, under: tuple[str, ...] = ()
    ) -> None:
        listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
        super().__init__([*under, COMMAND, "sidecar", *listen, *flags], env)
        try:
            until(lambda: any("sidecar.started" in line for line in self.err) or self.gone, "it")
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Sidecar:
        return self

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    def said(self, pattern: str, times: int = 1) -> str:
        """The line, once it has been said so many times."""
        wanted = re.compile(pattern)

        def found() -> str | None:
            lines = [line for line in self.err if wanted.search(line)]
            assert not self.gone, self.err
            return lines[times - 1] if len(lines) >= times else None

        return until(found, f"{pattern!r} in its log, which is {self.err}")

    def watching(self, pid: int) -> None:
        self.said(rf"engine\.attached .*\(pid {pid}\)")

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = control.ask(control.SIDECAR, {"op": "status"})
        return document

    def engines(self) -> dict[int, dict[str, Any]]:
        return {each["pid"]: each for each in self.status()["engines"]}

    def page(self, path: str) -> tuple[int, str]:
        return get(self.status()["listener"]["port"], path)


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text of a page."""
    try:
        url = f"http://127.0.0.1:{port}{path}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def explained(request: str, pid: int | None = None) -> dict[str, Any] | None:
    """The account of that request, asked for as `dsagent explain` does; None where nobody knows
    it."""
    question = {"op": "explain", "id": request, "pid": pid}
    try:
        document: dict[str, Any] = control.ask(control.choose(pid), question)
    except DsagentError:
        return None
    return document
