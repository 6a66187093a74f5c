"""The long-running mode: finds engines, watches each in a thread of its own, and outlives them all.

It never decides what becomes of the pod: whatever is missing or broken, it says so, waits, and
tries again. It ends only when told to.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening.control import SIDECAR, ControlServer
from dsagent.agent.listening.question import parse_question
from dsagent.agent.metrics.series import Family
from dsagent.agent.session.guard import attempt
from dsagent.agent.session.overhead import give_way
from dsagent.agent.session.report import agent_status
from dsagent.agent.session.waker import Waker
from dsagent.agent.sidecar.answers import Answers
from dsagent.agent.sidecar.backoff import SECOND_NS, Backoff
from dsagent.agent.sidecar.books import Books
from dsagent.agent.sidecar.engines import Engines
from dsagent.agent.sidecar.listener import Health, Listener, merged
from dsagent.agent.sidecar.log import Log
from dsagent.agent.sidecar.memory import Pressure, Tidier, Usage, give_back, usage
from dsagent.agent.sidecar.options import SidecarOptions, needing_restart
from dsagent.agent.sidecar.own_metrics import Figures, families
from dsagent.agent.sidecar.reader import SettingsReader
from dsagent.agent.sidecar.receiver import Receiver
from dsagent.agent.sidecar.weight import weight

LOOK_NS = SECOND_NS
LOOK_SOON_NS = SECOND_NS // 5  # while an engine is starting: it may serve at once
STOP_S = 10.0  # Kubernetes gives 30


class Sidecar:
    """`run` blocks; `stop` and `reload` may come from a signal handler."""

    def __init__(self, reader: SettingsReader, first: SidecarOptions, log: Log) -> None:
        """`first`: what flags and variables say, until the file has been read."""
        self._reader = reader
        self._log = log
        self._options = first
        self._settled = False  # the file has been read once, or there is none
        self._settings_reason = ""
        self._settings_due = Backoff(most_ns=30 * SECOND_NS)
        self._pending_restart: tuple[str, ...] = ()
        self._loaded_unix_ns: int | None = None
        self.reloads = self.refused = self.failures = 0
        self._books = Books()
        self._receiver = Receiver()
        self._engines = Engines(self._books, log, self._wake, self._receiver.source_for)
        self._answers = Answers(lambda: self._engines.watches, self._books)
        self._listener = Listener(self._collect, lambda: self._health)
        self._health = Health(False, ("it has just begun",), 0)
        self._pressure = Pressure()
        self._tidier = Tidier()
        self._usage: Usage | None = None
        self._control: ControlServer | None = None
        self._control_due = Backoff()
        self._control_reason = ""
        self._waker = Waker()
        self._stopping = False
        self._must_reload = False

    def stop(self) -> None:
        self._stopping = True
        self._waker.wake()

    def reload(self) -> None:
        self._must_reload = True
        self._waker.wake()

    def _wake(self) -> None:
        self._waker.wake()

    @property
    def port(self) -> int | None:
        return self._listener.port

    def run(self) -> None:
        with closing(self._waker), selectors.DefaultSelector() as selector:
            selector.register(
                self._waker.fd, selectors.EVENT_READ, lambda _mask: self._waker.take()
            )
            give_way()
            next_ns = time.monotonic_ns() + LOOK_NS
            self._guarded(lambda: self._look(selector, time.monotonic_ns()))
            self._log.say("sidecar.started", f"looking for engines; settings: {self._source()}")
            try:
                while not self._stopping:
                    now_ns = time.monotonic_ns()
                    if now_ns >= next_ns:
                        self._guarded(lambda: self._look(selector, time.monotonic_ns()))
                        next_ns = now_ns + (LOOK_SOON_NS if self._engines.expects else LOOK_NS)
                    for key, mask in selector.select(max(0, next_ns - time.monotonic_ns()) / 1e9):
                        key.data(mask)
                    if self._must_reload:
                        self._must_reload = False
                        self._guarded(lambda: self._read_settings(time.monotonic_ns()))
                    self._guarded(lambda: self._engines.reap(time.monotonic_ns()))
            finally:
                self._end()

    def _guarded(self, work: Callable[[], None]) -> None:
        """A fault of ours ends nothing: it is told, and the next second everything is tried
        again."""
        _, why = attempt(work)
        if why:
            self.failures += 1
            self._log.say("sidecar.failed", why)

    def _end(self) -> None:
        self._log.say("sidecar.stopping", "letting go of all engines")
        if self._control is not None:
            self._control.close()
        self._engines.stop_all(STOP_S)
        self._receiver.stop()
        self._listener.stop()
        self._log.say("sidecar.ended", "done")

    def _look(self, selector: selectors.BaseSelector, now_ns: int) -> None:
        if not self._settled and self._settings_due.due(now_ns):
            self._read_settings(now_ns)
        self._listener.set(self._options.listen, self._options.guarded_by)
        self._listener.attend(now_ns)
        self._tell("listener", self._listener.reason)
        self._guarded(lambda: self._attend_receiver(now_ns))  # engines are found without it
        self._open_control(selector, now_ns)
        if self._control is not None:
            self._control.expire(now_ns)
        self._relieve(now_ns)
        if self._settled:
            self._engines.look(now_ns)
        self._tidier.look(self._engines.moves, is_quiet=self._engines.is_quiet)
        self._books.expire(now_ns)
        self._health = self._judge_health()

    def _attend_receiver(self, now_ns: int) -> None:
        self._receiver.set(self._options)
        self._receiver.attend(now_ns, self._engines.owners)
        self._tell("receiver", self._receiver.reason)

    def _tell(self, about: str, reason: str) -> None:
        """Said when it changes, not each second."""
        if reason:
            self._log.say("sidecar.waiting", reason, about=about)
        else:
            self._log.over("sidecar.waiting", about)

    def _source(self) -> str:
        return "flags and variables" if self._reader.path is None else str(self._reader.path)

    def _read_settings(self, now_ns: int) -> None:
        """A wrong file changes nothing, and says so; without an old one, no engine is touched."""
        try:
            new = self._reader.read()
        except DsagentError as error:
            self.refused += 1
            self._settings_due.failed(now_ns)
            stays = "the old settings stay" if self._settled else "waiting for a right one"
            self._settings_reason = f"{error}; {stays}"
            self._log.say("settings.refused", self._settings_reason)
            return
        self._log.over("settings.refused")
        self._settings_reason = ""
        self._settings_due.succeeded()
        self._loaded_unix_ns = time.time_ns()
        if self._settled:
            self.reloads += 1
            self._pending_restart = needing_restart(self._options, new)
            later = ", ".join(self._pending_restart)
            self._log.say(
                "settings.reloaded",
                "settings read again" + (f"; needs a restart: {later}" if later else ""),
                number=self.reloads,
            )
            self._log.over("settings.reloaded")
            new = replace(
                new,
                listen=self._options.listen,
                otlp_receive=self._options.otlp_receive,
                otlp_receive_grpc=self._options.otlp_receive_grpc,
                max_engines=self._options.max_engines,
                guarded_by=self._options.guarded_by,
                as_json=self._options.as_json,
            )
        self._settled = True
        self._options = new
        self._log.as_json = new.as_json
        for what, line in weight(new, os.environ).items():
            self._log.say("sidecar.sends", line, about=what)
        self._engines.set(new)

    def _open_control(self, selector: selectors.BaseSelector, now_ns: int) -> None:
        if self._control is not None or not self._control_due.due(now_ns):
            return
        try:
            self._control = ControlServer(SIDECAR, selector, self._answer)
        except (DsagentError, OSError) as error:
            self._control_due.failed(now_ns)
            self._control_reason = str(error)
        else:
            self._control_due.succeeded()
            self._control_reason = ""
        self._tell("control", self._control_reason)

    def _relieve(self, now_ns: int) -> None:
        self._usage = usage(self._options.max_memory_bytes)
        ratio = 0.0 if self._usage is None else self._usage.ratio
        if not self._pressure.judge(ratio, now_ns):
            return
        relief = self._pressure.relief
        self._log.say(
            "memory.pressure",
            f"{ratio:.0%} of the memory limit are used: {relief.what}",
            level=self._pressure.level,
        )
        self._books.limit(relief.ledger_bytes)
        self._engines.look_into_kernel(relief.kernel, "close to the memory limit")
        give_back()

    def _reasons(self) -> list[str]:
        reasons = [self._settings_reason, self._listener.reason, self._receiver.reason]
        reasons.append(self._control_reason)
        if self._pressure.level:
            reasons.append(f"close to the memory limit: {self._pressure.relief.what}")
        return [reason for reason in (*reasons, *self._engines.reasons()) if reason]

    def _judge_health(self) -> Health:
        watching = sum(watch.state == "watching" for watch in self._engines.watches)
        reasons = self._reasons()
        if not watching and not self._engines.watches:
            reasons.append("no engine has been found")
        return Health(bool(watching) and not reasons, tuple(reasons), watching)

    def _collect(self) -> list[Family]:
        """In a thread of the listener's."""
        used = self._usage
        figures = Figures(
            states=self._engines.states(),
            restarts=self._engines.restarts,
            taken=self.reloads,
            refused=self.refused,
            is_stale=bool(self._settings_reason),
            used_bytes=None if used is None else used.used_bytes,
            limit_bytes=None if used is None else used.limit_bytes,
            relief_level=self._pressure.level,
        )
        return merged(
            [*families(figures), *self._receiver.families()],
            ((slot.name, slot.occupied, slot.collected.collect()) for slot in self._engines.slots),
        )

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        question = parse_question(request)
        match question.op:
            case "explain":
                return self._answers.explain(question)
            case "why":
                return self._answers.why(question)
            case "status":
                return self._status(question.pid)
            case "detach":
                assert question.pid is not None
                watch = self._answers.watch_of(question.pid)
                self._engines.leave_alone(watch)
                return {"pid": watch.key.pid}

    def _status(self, pid: int | None) -> dict[str, Any]:
        watches = self._engines.watches if pid is None else [self._answers.watch_of(pid)]
        used = self._usage
        health = self._health = self._judge_health()
        return {
            **agent_status("sidecar"),
            "failures": self.failures,
            "ready": health.ready,
            "reasons": list(health.reasons),
            "settings": {
                "file": None if self._reader.path is None else str(self._reader.path),
                "state": "refused" if self._settings_reason else "ok",
                "reason": self._settings_reason,
                "loaded_unix_ns": self._loaded_unix_ns,
                "reloads": self.reloads,
                "refused": self.refused,
                "needs_restart": list(self._pending_restart),
            },
            "listener": self._listener.describe(),
            "receiver": self._receiver.describe(),
            "memory": {
                "used_bytes": None if used is None else used.used_bytes,
                "limit_bytes": None if used is None else used.limit_bytes,
                "limit_from": None if used is None else used.limit_from,
                "level": self._pressure.level,
                "relief": self._pressure.relief.what,
            },
            "recent": {
                "accounts": self._books.accounts,
                "bytes": self._books.nbytes,
                "max_bytes": self._books.max_bytes,
                "ended_engines": len(self._books.ended),
            },
            "scan": self._engines.scan_document(),
            "engines": [watch.describe() for watch in watches],
            "waiting": self._engines.waiting_document(),
        }
