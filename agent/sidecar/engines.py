"""Engines that are watched, wait to be, or are left alone: who comes, who goes, what changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.facts import Target
from dsagent.agent.host import procfs
from dsagent.agent.host.procfs import ProcessGone, escape
from dsagent.agent.host.server_target import resolve_server
from dsagent.agent.host.target import probe_rings, resolve
from dsagent.agent.screens.wording import counted
from dsagent.agent.session.guard import reason_of
from dsagent.agent.sidecar.backoff import SECOND_NS, Backoff
from dsagent.agent.sidecar.books import Books
from dsagent.agent.sidecar.injections import Injections
from dsagent.agent.sidecar.log import Log
from dsagent.agent.sidecar.options import SidecarOptions
from dsagent.agent.sidecar.processes import Key, command_text, program_mark
from dsagent.agent.sidecar.receiver import ReceivedSource
from dsagent.agent.sidecar.scanner import Found, Scanner
from dsagent.agent.sidecar.slots import Slot, Slots
from dsagent.agent.sidecar.span_board import OwnerOf
from dsagent.agent.sidecar.watch import Watch

UPGRADE_NS = 5 * SECOND_NS  # so often, a server seen from outside is asked whether it has rings now
MAX_WAITING = 64


@dataclass(slots=True)
class Waiting:
    """An engine that could not be attached to, and is tried again."""

    pid: int
    start_ticks: int
    command: str
    reason: str = ""
    backoff: Backoff = field(default_factory=Backoff)


class Engines:
    """One thread; what it holds may be read from others."""

    def __init__(
        self,
        books: Books,
        log: Log,
        wake: Callable[[], None],
        received: Callable[[Key], ReceivedSource | None] = lambda _key: None,
    ) -> None:
        """`wake`: from the watches' threads, when one has changed its state. `received`: what the
        engine of a watch exports itself, where that is received."""
        self._received = received
        self._books = books
        self._log = log
        self._wake = wake
        self._options: SidecarOptions | None = None
        self._scanner = Scanner()
        self._injections = Injections(lambda line: log.say("engine.injecting", line), wake)
        self._slots = Slots(lambda slot, line: log.say("slo.alert", line, engine=slot))
        self._watches: dict[Key, Watch] = {}
        self._waiting: dict[int, Waiting] = {}
        self._alone: set[Key] = set()  # left alone until they end: somebody has said so
        self._kernel_why: str | None = None  # why nobody looks into the kernel now
        self._is_renewing = False  # other settings: all is let go of, then attached to anew
        self._upgrade_due_ns = 0
        self.restarts = 0
        self.moves = 0  # engines attached to, and let go of

    @property
    def watches(self) -> list[Watch]:
        return list(self._watches.values())

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self._slots.all()

    @property
    def is_quiet(self) -> bool:
        """None is being attached to or let go of."""
        return all(watch.state == "watching" for watch in self._watches.values())

    @property
    def expects(self) -> bool:
        """Some process is on its way to be an engine."""
        return self._scanner.expects

    def owners(self) -> OwnerOf:
        """Says of a process which engine that is watched now it belongs to."""
        parent_of = procfs.parents()
        keys = {key.pid: key for key in self._watches}

        def owner_of(pid: int) -> Key | None:
            near = (pid, *procfs.ancestors(pid, parent_of))
            return next((keys[each] for each in near if each in keys), None)

        return owner_of

    def states(self) -> tuple[str, ...]:
        """Of each engine; from any thread."""
        watched = [watch.state for watch in tuple(self._watches.values())]
        return (*watched, *("waiting" for _ in tuple(self._waiting)))

    def set(self, options: SidecarOptions) -> None:
        before, self._options = self._options, options
        if before is None or before.match != options.match:
            self._scanner.match = options.match
            self._scanner.forget()
        self._waiting.clear()
        self._alone.clear()
        if before is not None and before.attach != options.attach:
            self._is_renewing = True
            for watch in self._watches.values():
                watch.stop()
        elif before is not None and options.allow_inject and not before.allow_inject:
            for watch in self._watches.values():  # attached to anew, by the way that is open now
                if watch.target.engine == "http" and _is_vllm(watch.key.pid):
                    watch.stop()

    def look(self, now_ns: int) -> None:
        """Once a second: what has come, what has become another."""
        self.reap(now_ns)
        self._slots.expire()
        if self._is_renewing or self._options is None:
            return
        self._forget_the_gone()
        self._follow_changes(now_ns)
        roots = {watch.key.pid for watch in self._watches.values()}
        roots |= {key.pid for key in self._alone}
        for found in self._scanner.look(now_ns, roots):
            self._try(found, self._options, now_ns)

    def reap(self, now_ns: int) -> None:
        """Takes leave of watches that are over."""
        for key, watch in tuple(self._watches.items()):
            if not watch.over:
                continue
            watch.join(1.0)
            self.moves += 1
            del self._watches[key]
            self._books.close(key, now_ns)
            self._slots.leave(watch.slot)
            self._say_over(watch, now_ns)
        if self._is_renewing and not self._watches:
            self._is_renewing = False
            self._slots.give_up_all()

    def _say_over(self, watch: Watch, now_ns: int) -> None:
        who = f"{watch.target.comm} (pid {watch.key.pid})"
        fields: dict[str, Any] = {"pid": watch.key.pid, "engine": watch.slot.name}
        if watch.state == "failed":
            self._wait(watch.key.pid, watch.key.start_ticks, who, watch.reason, now_ns)
            return
        summary = watch.summary or {}
        fields |= {name: summary.get(name, 0) for name in ("requests", "steps", "uncounted_losses")}
        # Sinks may take seconds to end before this line comes: what it can have seen, this tells.
        fields["duration_ns"] = summary.get("duration_ns", 0)
        fields["cut_off"] = watch.cut_off
        counts = f"{counted(fields['requests'], 'request')}, {counted(fields['steps'], 'step')}"
        if watch.cut_off:
            named = watch.cut_off_trace_ids
            fields["cut_off_trace_ids"] = named
            more = " …" if len(named) < watch.cut_off else ""
            cut_off = counted(watch.cut_off, "more request")
            counts += f"; {cut_off} cut off by its end, of trace {', '.join(named)}{more}"
        if watch.state == "detached":
            self._alone.add(watch.key)
            text = f"{who} is left alone until it ends, as `dsagent detach` says; {counts}"
            self._log.say("engine.detached", text, **fields)
        else:
            self._log.say("engine.ended", f"no longer watching {who}; {counts}", **fields)

    def _forget_the_gone(self) -> None:
        for key in tuple(self._alone):
            if _start_ticks(key.pid) != key.start_ticks:
                self._alone.discard(key)
        for pid, waiting in tuple(self._waiting.items()):
            if _start_ticks(pid) != waiting.start_ticks:
                del self._waiting[pid]

    def _follow_changes(self, now_ns: int) -> None:
        """An exec makes another engine of a process, rings make one to be looked into of a server
        that was seen from outside."""
        upgrades = now_ns >= self._upgrade_due_ns
        if upgrades:
            self._upgrade_due_ns = now_ns + UPGRADE_NS
        for watch in self._watches.values():
            if watch.state != "watching":
                continue
            mark = program_mark(watch.key.pid)
            if mark and watch.mark and mark != watch.mark:
                why = "it runs another program now"
            elif upgrades and watch.target.engine == "http" and _has_rings(watch.target):
                why = "it has step rings now"
            else:
                continue
            watch.stop()
            text = f"attaching anew to {watch.target.comm} (pid {watch.key.pid}): {why}"
            self._log.say("engine.changed", text, about=str(watch.key.pid), pid=watch.key.pid)

    def _try(self, found: Found, options: SidecarOptions, now_ns: int) -> None:
        start_ticks = _start_ticks(found.pid)
        waiting = self._waiting.get(found.pid)
        if start_ticks is None or (waiting is not None and not waiting.backoff.due(now_ns)):
            return
        try:
            target = self._target(found, start_ticks, options)
            if target is not None:
                self._attach(target, options)
        except Exception as error:  # noqa: BLE001 - the others are to be found, whatever it is
            who = f"process {found.pid}"
            self._wait(found.pid, start_ticks, who, _why(error), now_ns)

    def _target(self, found: Found, start_ticks: int, options: SidecarOptions) -> Target | None:
        """None while hooks are put in: it is found again."""
        if found.way_in == "rings":
            return resolve(found.pid)
        if options.allow_inject and _is_vllm(found.pid):
            why_not = self._injections.outcome(found.pid, start_ticks)
            if why_not is None:
                return None
            if not why_not:
                try:
                    return resolve(found.pid)
                except DsagentError as error:
                    why_not = str(error)
            self._log.say("engine.not_injected", why_not, about=str(found.pid))
        return resolve_server(found.pid)

    def _attach(self, target: Target, options: SidecarOptions) -> None:
        """Raises DsagentError."""
        key = Key.of(target)
        if key in self._watches or key in self._alone:
            return
        if self._injections.is_at_it(key.pid, key.start_ticks):
            return  # some of its processes have rings: all will, or none
        command = command_text(target.pid)
        if any(
            watch.slot.command == command and _start_ticks(watch.key.pid) != watch.key.start_ticks
            for watch in self._watches.values()
        ):
            return  # the one before it has ended, and its last results are still on their way
        slot = self._slots.take(command, options.attach, options.max_engines)
        if slot is None:
            raise DsagentError(
                f"{target.comm} (pid {target.pid}) is one engine too many: "
                f"max_engines is {options.max_engines}"
            )
        self.restarts += slot.occupations > 1
        watch = Watch(
            target,
            slot,
            options.attach,
            self._books.open(key),
            received=self._received(key),
            most_engines=options.max_engines,
            kernel_why=self._kernel_why,
            tell=lambda event, line: self._log.say(event, line, about=str(key.pid), pid=key.pid),
            on_change=lambda: self._changed(watch),
        )
        self.moves += 1
        self._watches[key] = watch
        self._waiting.pop(target.pid, None)
        watch.start()

    def _changed(self, watch: Watch) -> None:
        """In the watch's thread."""
        if watch.state == "watching":
            self._log.say(
                "engine.attached",
                f"watching {watch.target.comm} (pid {watch.key.pid}), engine {watch.target.engine}",
                about=str(watch.key.pid),
                pid=watch.key.pid,
                engine=watch.slot.name,
            )
            self._log.over("engine.attached", str(watch.key.pid))
        self._wake()

    def _wait(self, pid: int, start_ticks: int, who: str, reason: str, now_ns: int) -> None:
        if len(self._waiting) >= MAX_WAITING and pid not in self._waiting:
            return
        waiting = self._waiting.get(pid)
        if waiting is None or waiting.start_ticks != start_ticks:
            waiting = self._waiting[pid] = Waiting(pid, start_ticks, who)
        waiting.reason = escape(reason, 500)
        waiting.backoff.failed(now_ns)
        self._log.say("engine.waiting", waiting.reason, about=str(pid), pid=pid)

    def leave_alone(self, watch: Watch) -> None:
        """Until it ends: somebody wants to look at it, or take out what was put in."""
        self._alone.add(watch.key)
        watch.detach()

    def look_into_kernel(self, does: bool, why: str) -> None:
        self._kernel_why = None if does else why
        for watch in self._watches.values():
            watch.look_into_kernel(self._kernel_why)

    def reasons(self) -> list[str]:
        """Why not everything is watched."""
        reasons = [waiting.reason for waiting in tuple(self._waiting.values())]
        barred = self._scanner.status.not_permitted
        if barred and not self._watches:  # else it may well be the pod's pause process
            reasons.append(
                f"{barred} processes may not be looked into: that takes CAP_SYS_PTRACE, or their "
                "own user"
            )
        return reasons

    def scan_document(self) -> dict[str, Any]:
        status = self._scanner.status
        return {
            "processes": status.processes,
            "looked_into": status.looked_into,
            "not_permitted": status.not_permitted,
        }

    def waiting_document(self) -> list[dict[str, Any]]:
        now_ns = time.monotonic_ns()
        return [
            {
                "pid": each.pid,
                "command": each.command,
                "reason": each.reason,
                "failures": each.backoff.failures,
                "again_in_ns": max(0, each.backoff.due_ns - now_ns),
            }
            for each in tuple(self._waiting.values())
        ]

    def stop_all(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        for watch in self._watches.values():
            watch.stop()
        for watch in self._watches.values():
            watch.join(max(0.0, deadline - time.monotonic()))
        self._injections.join(deadline)
        self.reap(time.monotonic_ns())  # and says what each has seen
        self._slots.give_up_all()


def _why(error: Exception) -> str:
    """With its place where nobody has foreseen it."""
    foreseen = isinstance(error, (DsagentError, ProcessGone, OSError))
    return str(error) if foreseen else reason_of(error)


def _start_ticks(pid: int) -> int | None:
    """Of a process that lives."""
    try:
        stat = procfs.read_stat(pid)
    except (ProcessGone, PermissionError):
        return None
    return None if stat.state in "ZXx" else stat.start_ticks


def _has_rings(target: Target) -> bool:
    for pid in (target.pid, *procfs.descendants(target.pid, procfs.parents())):
        try:
            if probe_rings(pid).engine_ids:
                return True
        except (ProcessGone, PermissionError):
            continue
    return False


def _is_vllm(pid: int) -> bool:
    return "vllm" in command_text(pid)
