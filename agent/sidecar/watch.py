"""One engine, watched in a thread of its own: whatever becomes of it takes nobody along."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dsagent.agent.anomalies.make import make_watch
from dsagent.agent.clear_links import clear_links
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.facts import Target
from dsagent.agent.host.procfs import command_line, escape
from dsagent.agent.masking import mask_command
from dsagent.agent.session.guard import reason_of
from dsagent.agent.session.ledger import Ledger
from dsagent.agent.session.loop import Session
from dsagent.agent.session.normal_keeper import NormalKeeper
from dsagent.agent.session.outlets import OutletOptions, links, make_attached_sinks
from dsagent.agent.sidecar.kept import Retried
from dsagent.agent.sidecar.options import AttachOptions
from dsagent.agent.sidecar.processes import Key, program_mark
from dsagent.agent.sidecar.receiver import ReceivedSource
from dsagent.agent.sidecar.slots import Slot, folder_of
from dsagent.agent.sinks.base import Sink

if TYPE_CHECKING:
    from dsagent.agent.anomalies.watch import AnomalyWatch

State = Literal["attaching", "watching", "ending", "ended", "failed", "detached"]
T = TypeVar("T")

CALL_TIMEOUT_S = 3.0
MOST_NAMED = 16  # requests that an engine took along, in one line
Tell = Callable[[str, str], None]  # an event's name, and what people should know


class Watch:
    """From `start` until `over`. `state` and `reason` may be read from any thread."""

    def __init__(
        self,
        target: Target,
        slot: Slot,
        options: AttachOptions,
        ledger: Ledger,
        *,
        received: ReceivedSource | None = None,
        most_engines: int,
        kernel_why: str | None,
        tell: Tell,
        on_change: Callable[[], None],
    ) -> None:
        """`received`: spans that the engine exports itself. `most_engines`: that share what is on
        disk. `kernel_why`: why the kernel is not looked
        into, for now. `on_change` is called from the watch's thread when `state` has changed."""
        self.key = Key.of(target)
        self.target = target
        self.slot = slot
        self.mark = program_mark(target.pid)
        self.command = escape(mask_command(command_line(target.pid)))
        self.ledger = ledger
        self.state: State = "attaching"
        self.reason = ""
        self.since_unix_ns = time.time_ns()
        self.summary: Mapping[str, Any] | None = None
        self._options = options
        self._received = received
        self._most_engines = most_engines
        self._kernel_why = kernel_why
        self._tell = tell
        self._on_change = on_change
        self._stopping = self._detached = False
        self._session: Session | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{target.pid}", daemon=True)

    @property
    def cut_off(self) -> int:
        """Requests that an engine took along when it ended. Once the watch is over."""
        session = self._session
        return session.unfinished if session is not None and session.target_ended else 0

    @property
    def cut_off_trace_ids(self) -> list[str]:
        """The first few of them, for whoever looks for one. Once the watch is over."""
        session = self._session
        if session is None or not self.cut_off:
            return []
        return [f"{trace_id:032x}" for trace_id in session.unfinished_trace_ids[:MOST_NAMED]]

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads to be had
            self._set("failed", str(error))

    @property
    def over(self) -> bool:
        """Its thread has done all it does."""
        return self.state in ("ended", "failed", "detached")

    def stop(self) -> None:
        self._stopping = True
        if self._session is not None:
            self._session.stop()

    def detach(self) -> None:
        """As `dsagent detach` asks for: the engine is to be left alone."""
        self._detached = True
        self.stop()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def call(self, work: Callable[[Session], T]) -> T:
        """Done in the session's thread. Raises DsagentError where it does not come to it."""
        session = self._session
        if session is None or self.state != "watching":
            message = f"the engine of process {self.key.pid} is not watched yet, or no more"
            raise DsagentError(message, exit_code=USAGE)
        try:
            return session.call(lambda: work(session), CALL_TIMEOUT_S)
        except TimeoutError as error:
            message = f"the watch over process {self.key.pid} does not answer; try again"
            raise DsagentError(message) from error

    def _run(self) -> None:
        try:
            self._session = self._make()
            if self._stopping:
                self._set("ended", "")
                return
            self.summary = self._session.run()
        except DsagentError as error:
            self._set("failed", str(error))
        except Exception as error:  # noqa: BLE001 - the others are to go on, whatever it is
            self._set("failed", reason_of(error))
        else:
            detached = self._detached or self._session.detached
            self._set("detached" if detached and not self._session.target_ended else "ended", "")

    def _make(self) -> Session:
        options = self._options
        sinks: list[Sink] = [*self.slot.kept]
        outlets = options.outlets
        if outlets.record is not None:
            sinks.append(self._recording(outlets))
        if outlets.otlp_queue is not None:
            outlets = replace(
                outlets,
                otlp_queue=folder_of(outlets.otlp_queue, self.slot),
                otlp_queue_max_bytes=outlets.otlp_queue_max_bytes // self._most_engines,
            )
        sinks += make_attached_sinks(replace(outlets, record=None), self.slot.judged)
        remark = self.slot.judged.remark(self.target)
        if remark is not None:
            self._tell("slo.remark", remark)
        for line in clear_links(links(outlets, self.slot.judged)):
            self._tell("link.clear", line)
        normal = None
        if options.outlets.record is not None:
            normal = NormalKeeper(folder_of(options.outlets.record, self.slot), self.target)
        return Session(
            self.target,
            sinks,
            receiver=self._received,
            claims=None if self._received is None else self._received.claims,
            max_overhead_ratio=options.max_overhead_ratio,
            tier=options.tier,
            without=options.without,
            normal=normal,
            ledger=self.ledger,
            is_asked_elsewhere=True,
            has_profiles=outlets.pyroscope is not None,
            anomalies=self._anomalies() if options.has_anomalies else None,
            on_attached=self._attached,
            on_trouble=lambda line: self._tell("engine.trouble", line),
        )

    def _anomalies(self) -> AnomalyWatch | None:
        """The image does not have its library: the engine is watched all the same."""
        try:
            return make_watch()
        except DsagentError as error:
            self._tell("anomalies.absent", str(error))
            return None

    def _recording(self, outlets: OutletOptions) -> Sink:
        """The bound on disk is for all engines together, however many there may be."""
        from dsagent.agent.sinks.recording import RecordingSink

        assert outlets.record is not None
        folder = folder_of(outlets.record, self.slot)
        most_bytes = outlets.record_max_bytes // self._most_engines
        return Retried("recording", lambda: RecordingSink(folder, most_bytes))

    def _attached(self) -> None:
        assert self._session is not None
        for source in self._session.sources():
            if source.state != "ok":
                self._tell("source.absent", f"without {source.name}: {source.reason}")
        if self._kernel_why is not None:
            self._session.look_into_kernel(self._kernel_why)
        self._set("watching", "")

    def look_into_kernel(self, why_not: str | None) -> None:
        """Whether it does from now on; `why_not` where it shall not."""
        self._kernel_why = why_not
        if self.state == "watching":
            try:
                self.call(lambda session: session.look_into_kernel(why_not))
            except DsagentError as error:
                self._tell("engine.trouble", str(error))

    def _set(self, state: State, reason: str) -> None:
        self.reason = reason
        self.state = state
        self.since_unix_ns = time.time_ns()
        self._on_change()

    def describe(self) -> dict[str, Any]:
        """Its part of the document of `status`."""
        plain: dict[str, Any] = {
            "pid": self.target.pid,
            "start_ticks": self.target.start_ticks,
            "pid_namespace": self.target.pid_namespace,
            "command": self.target.comm,
            "kind": self.target.engine,
            "way_in": "outside" if self.target.engine == "http" else "rings",
            "state": self.state,
            "reason": self.reason,
        }
        if self.state == "watching":
            try:
                plain = self.call(lambda session: session.status())
            except DsagentError as error:
                plain["reason"] = str(error)
        return {
            "engine": self.slot.name,
            **plain,
            "command_line": self.command,
            "since_unix_ns": self.since_unix_ns,
            "restarts": self.slot.restarts,
        }
