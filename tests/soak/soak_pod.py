"""The pod: bundled engines that are restarted, and the sidecar beside them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import shell_lab
import sidecar_lab
from lab import Engine as LabEngine
from shell_lab import Child
from sidecar_lab import Sidecar, until
from soak_sums import Kill, Watched

from dsagent.agent.errors import DsagentError

MODEL = "tiny-llama"
# A machine may stand still for minutes within an hour: only what never comes is a failure.
for lab in (shell_lab, sidecar_lab):
    vars(lab)["PATIENCE_S"] = 900.0


def own_ports() -> tuple[int, int]:
    """Of this run: the network is its own, but command lines are seen by whoever runs beside it,
    and its sidecar must not take their engines for these."""
    first = 10_001 + os.getpid() % 5_000 * 4
    return first, first + 1


class Server:
    """The bundled engine at one port, always with the same command line: a restart finds its place
    at the sidecar again."""

    def __init__(
        self, port: int, env: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        """`folder`: where it runs; here, without one."""
        self.port = port
        self._under = () if folder is None else ("env", "-C", str(folder))
        self.pids: list[int] = []  # of all that were started here
        self.killed_ns: list[int] = []  # just before each SIGKILL, CLOCK_MONOTONIC
        self.gone_ns: dict[int, int] = {}  # by pid, once it has ended
        self._env = env
        self._child = self._started()

    def _started(self) -> Child:
        command = [*self._under, sys.executable, "-m", "dsagent.instrumentation.reference"]
        command += ["--model", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--threads", "1"]
        child = Child(command, self._env)
        try:
            child.wait_line(lambda line: "listening on" in line)
        except BaseException:
            child.__exit__(None, None, None)
            raise
        self.pids.append(child.pid)
        return child

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def lines(self) -> list[str]:
        """What it has said, on either stream."""
        return [*self._child.out, *self._child.err]

    @property
    def target(self) -> LabEngine:
        return LabEngine(self._child.process, "127.0.0.1", self.port, MODEL)

    def restart(self, number: signal.Signals) -> None:
        """Ends it by that signal, SIGTERM or SIGKILL, and starts it again."""
        if number is signal.SIGKILL:
            self.killed_ns.append(time.monotonic_ns())
        self._child.signal(number)
        code = self._child.wait()
        self.gone_ns[self._child.pid] = time.monotonic_ns()
        if number is signal.SIGTERM:
            assert code == 0, f"the engine ended with {code}: {self.lines}"
        self._child.__exit__(None, None, None)
        self._child = self._started()

    def close(self) -> None:
        self._child.signal(signal.SIGCONT)
        self._child.__exit__(None, None, None)


class Pod:
    """Servers, and the sidecar with everything on. `log`: what it has said, parsed."""

    def __init__(self, servers: list[Server], settings: Path) -> None:
        self.servers = servers
        self.sidecar = Sidecar("--config", str(settings), "--json")
        self.unanswered = 0
        self.let_go_ns: list[int] = []  # when the settings were changed so that all are let go of
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in tuple(self.sidecar.err) if line.startswith("{")]

    def at_rest(self) -> dict[str, Any]:
        """The status, once all servers are watched, and nothing else is."""

        def all_watched() -> dict[str, Any] | None:
            try:
                status = self.sidecar.status()
            except DsagentError:  # busy: it gives way to the engines, and to whoever else is here
                self.unanswered += 1
                return None
            if any("sinks" not in each for each in status["engines"]):  # its watch is too busy
                self.unanswered += 1
                return None
            states = {each["pid"]: each["state"] for each in status["engines"]}
            return status if states == {s.pid: "watching" for s in self.servers} else None

        return until(all_watched, f"all engines to be watched; the last lines: {self.log[-5:]}")

    @property
    def kills(self) -> list[Kill]:
        return [Kill(server.port, at) for server in self.servers for at in server.killed_ns]

    def mono_ns(self, line: Mapping[str, Any]) -> int:
        """When a line of the log was said, CLOCK_MONOTONIC."""
        said = datetime.fromisoformat(line["time"]).timestamp()
        return round(said * 1e9) - self._offset_ns

    def watches(self) -> list[Watched]:
        """Of all that have ended, by the log: the sidecar must have ended."""
        port_of = {pid: server.port for server in self.servers for pid in server.pids}
        gone_ns = {pid: at for server in self.servers for pid, at in server.gone_ns.items()}
        begun: dict[int, int] = {}
        let_go_ns = list(self.let_go_ns)
        found: list[Watched] = []
        for line in self.log:
            match line["event"]:
                case "engine.attached":
                    begun[line["pid"]] = self.mono_ns(line)
                case "sidecar.stopping":
                    let_go_ns.append(self.mono_ns(line))
                case "engine.ended":
                    pid = line["pid"]
                    attached_ns = begun.pop(pid)
                    over_ns = (at for at in let_go_ns if at > attached_ns)
                    looked_ns = attached_ns + line["duration_ns"]
                    ended_ns = min((looked_ns, gone_ns.get(pid, looked_ns), *over_ns))
                    found.append(
                        Watched(
                            *(port_of[pid], attached_ns, ended_ns),
                            *(line["requests"], line["cut_off"], line["uncounted_losses"]),
                            tuple(line.get("cut_off_trace_ids", ())),
                        )
                    )
        assert not begun, f"watches that never ended: {begun}"
        return found

    def close(self) -> None:
        self.sidecar.__exit__(None, None, None)


class Laps:
    """Runs something every so often, in a thread of its own, until closed; what it raises is kept
    and raised by `close`."""

    def __init__(self, every_s: float, work: Any) -> None:
        self._every_s = every_s
        self._work = work
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._every_s):
                self._work()
        except BaseException as error:  # noqa: BLE001 - raised again where somebody waits for it
            self._failed = error

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._failed is not None:
            raise self._failed


INNER = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14s", b"lo", 1, b""))  # SIOCSIFFLAGS: up
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
MARK = "DSAGENT_SOAK_ALONE"


def alone() -> None:
    """Runs the program again in a network namespace of its own, where no other sidecar is met (its
    socket has one name in each), and with a /dev/shm that nobody else writes to."""
    if os.environ.get(MARK):
        return
    if os.geteuid() != 0:
        sys.exit("this takes root: it loads BPF programs and needs a network of its own")
    inner = [sys.executable, "-c", INNER, *sys.argv]
    mounted = ["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh", *inner]
    os.execvpe("unshare", ["unshare", "--net", "--mount", *mounted], {**os.environ, MARK: "1"})
