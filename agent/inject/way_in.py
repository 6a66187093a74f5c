"""Hooks into a vLLM server that was started without them, and out again.

Which of its processes are concerned, how long each will pause, what was done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.host.target import vllm_root
from dsagent.agent.inject import hooks
from dsagent.agent.inject.injection import Outcome, run_inside
from dsagent.agent.inject.interpreter import CannotInject, check_allowed, find, not_permitted
from dsagent.agent.inject.memory import Memory, mappings
from dsagent.agent.listening import control

Say = Callable[[str], None]

_STOPS_NS = 5_000_000  # what the stops themselves take, on a busy machine
_SLOWER = 2  # a process that computes gets to it more slowly than we do just now
_AGENT_ENDS_S = 30.0
_COMM_CHARS = 15
_ROLES = {  # by what vLLM calls its processes
    "VLLM::EngineCore": ("SCHEDULER",),
    "VLLM::Worker": (),
}


class NoVllm(CannotInject):
    """There is no process that hooks could be in."""


@dataclass(frozen=True, slots=True)
class Process:
    """One of the server's that hooks can be put into."""

    pid: int
    comm: str

    @property
    def roles(self) -> tuple[str, ...]:
        """Rings to make before the first request."""
        for name, roles in _ROLES.items():
            if self.comm.startswith(name[:_COMM_CHARS]):
                return roles
        return ("FRONTEND",)


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one process. `failed`: why not; empty where all is well."""

    process: Process
    said: str = ""
    failed: str = ""
    outcome: Outcome | None = None

    @property
    def nothing(self) -> bool:
        """There was nothing to take out."""
        return self.said == hooks.NOT_INJECTED

    def document(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "pid": self.process.pid,
            "name": self.process.comm,
            "done": self.said or None,
            "failed": self.failed or None,
            "pause_ns": None if outcome is None else outcome.pause_ns,
            "waited_ns": None if outcome is None else outcome.waited_ns,
        }

    @property
    def line(self) -> str:
        who = f"{self.process.comm} (pid {self.process.pid})"
        if self.outcome is None:
            return f"{who}: {self.failed}"
        pause_ms, waited_ms = self.outcome.pause_ns / 1e6, self.outcome.waited_ns / 1e6
        return f"{who}: {self.failed or self.said}; paused {pause_ms:.0f} ms, after {waited_ms:.0f}"


def processes(pid: int) -> tuple[Process, ...]:
    """Those of the server that `pid` belongs to in which vLLM runs, the front end last: a request
    that it records must not meet an engine without hooks. Raises CannotInject where there is
    none, or one that must not be touched: all are checked before any is."""
    pid = procfs.process_of(pid)
    check_allowed(pid)
    root = vllm_root(pid)
    found = []
    for each in (root, *procfs.descendants(root, procfs.parents())):
        try:
            if not _has_torch(each):
                continue
            check_allowed(each)
            with Memory(each) as memory:
                find(each, memory)
            found.append(Process(each, procfs.read_stat(each).comm))
        except PermissionError as error:
            raise not_permitted(each) from error
        except ProcessGone:
            continue
    if not found:
        raise NoVllm(f"neither process {pid} nor one below it runs vLLM")
    return tuple(sorted(found, key=lambda process: "FRONTEND" in process.roles))


def _has_torch(pid: int) -> bool:
    return any("/libtorch" in mapping.path for mapping in mappings(pid))


def _expected_pause_ns() -> int:
    """How long this very process needs for what the target's interpreter has to do."""
    source = hooks.bundled()
    began_ns = time.thread_time_ns()
    exec(compile(source, "<trial>", "exec"), {"__name__": "builtins"})
    return _SLOWER * (time.thread_time_ns() - began_ns) + _STOPS_NS


def inject(pid: int, say: Say, agrees: Callable[[str], bool | None] | None) -> None:
    """Hooks into the server that `pid` belongs to; into all its processes or none. Says before
    how long each is expected to pause, and after how long it did. `agrees` is asked in between,
    and says None where there is nobody to ask; without it nobody is asked. Raises CannotInject,
    or DsagentError (exit 2) where nobody has agreed."""
    found = processes(pid)
    expected_ms = _expected_pause_ns() / 1e6
    for process in found:
        say(f"{process.comm} (pid {process.pid}) will pause for about {expected_ms:.0f} ms")
    if agrees is not None and not (agreed := agrees("Put the hooks in?")):
        why = "nobody has agreed; --yes does" if agreed is None else "you said no"
        raise DsagentError(f"cannot inject: {why}", exit_code=USAGE)
    put_in: list[Process] = []
    there = False
    for process in found:
        each = _run(process, hooks.source_to_put(process.roles))
        say(each.line)
        if each.failed:
            for earlier in reversed(put_in):
                say(_run(earlier, hooks.source_to_take()).line)
            raise CannotInject(f"{each.line}; no other process of the server has hooks")
        there |= each.said != hooks.NOTHING_HERE
        if each.said not in (hooks.NOTHING_HERE, hooks.THERE_ALREADY):
            put_in.append(process)
    if not there:
        raise CannotInject(f"process {pid} and those below it have nothing of vLLM to hook")


def end_agent(found: Sequence[Process]) -> bool:
    """Ends the agent that watches one of these, if one does. Raises DsagentError where it does
    not end, or is somebody else's."""
    for process in found:
        if control.owner(process.pid) is not None:
            _end(process.pid, process.pid)
            return True
    return False


def end_agent_of(pid: int) -> bool:
    """Ends the agent that watches the server of `pid`, whatever serves there, if one does. Raises
    as `end_agent` does."""
    try:
        name = control.choose(pid)
    except control.Unreachable:
        raise
    except DsagentError:  # nobody watches it
        return False
    try:
        _end(name, pid)
    except DsagentError as error:
        if name == control.SIDECAR and error.exit_code == USAGE:  # it does not watch that one
            return False
        raise
    return True


def _end(name: control.Name, pid: int) -> None:
    """A sidecar ends its watch over that server only, and leaves it alone."""
    why = "it goes on"
    target = name
    try:
        target = control.ask(name, {"op": "detach", "pid": pid}).get("pid", name)
    except control.Unreachable:
        raise
    except DsagentError as error:  # it may have hung up, as it ends
        if name == control.SIDECAR:
            raise
        why = str(error)
    deadline = time.monotonic() + _AGENT_ENDS_S
    while control.owner(target) is not None:
        if time.monotonic() > deadline:
            raise DsagentError(f"the agent attached to {target} does not end: {why}")
        time.sleep(0.02)


def take(found: Sequence[Process]) -> Iterator[Done]:
    """Hooks out of all of them, front end first."""
    source = hooks.source_to_take()
    for process in reversed(found):
        yield _run(process, source)


def _run(process: Process, source: str) -> Done:
    try:
        outcome = run_inside(process.pid, source)
    except CannotInject as error:
        return Done(process, failed=str(error))
    report = outcome.report
    if report is None:
        return Done(process, failed="it ran, but could not say how it went", outcome=outcome)
    if not report.well:
        return Done(process, failed=report.message, outcome=outcome)
    return Done(process, said=report.message, outcome=outcome)
