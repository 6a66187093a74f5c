"""Keeps what is normal beside a recording, and compares what it sees with what was kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from dsagent.agent.attribution.model import CleanStepModel
from dsagent.agent.attribution.normal import (
    Normal,
    Setting,
    compare,
    from_json,
    is_as_good,
    to_json,
)
from dsagent.agent.facts import Event, Target
from dsagent.agent.host import procfs
from dsagent.agent.host.environment import environment
from dsagent.agent.host.procfs import PROC, ProcessGone, escape
from dsagent.agent.masking import mask_command
from dsagent.agent.sinks.regular import open_regular

FILE = "normal.json"
MAX_BYTES = 1 << 20
SAVE_NS = 60_000_000_000
COMPARE_NS = 10_000_000_000
MOST_CHARS = 512
# Where it listens, and what it tells others, does not make a step longer.
_WHERE = ("--host", "--port", "--spans")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")


class NormalKeeper:
    """One attachment's. What it has to tell comes as events, each once."""

    def __init__(self, folder: Path, target: Target, *, proc: Path = PROC) -> None:
        self._path = folder / FILE
        self._target = target
        self._proc = proc
        self._normals: dict[Setting, Normal] | None = None  # None: not read yet
        self._known: Normal | None = None  # of this setting, when it attached
        self._setting: Setting | None = None
        self._told: set[str] = set()
        self._next_look_ns = 0
        self._next_save_ns = 0

    def look(self, model: CleanStepModel, served: str | None, now_ns: int) -> list[Event]:
        """`served`: the name of the model that the target serves, once a request has told it."""
        if now_ns < self._next_look_ns or not model.fitted or served is None:
            return []
        self._next_look_ns = now_ns + COMPARE_NS
        events = [] if self._normals is not None else self._read(now_ns)
        assert self._normals is not None
        if self._setting is None:
            self._setting = setting_of(self._target, served, self._proc)
            self._known = self._normals.get(self._setting)
        fresh = Normal.of(model, time.time_ns())
        assert fresh is not None
        compared = None if self._known is None else compare(self._known, model)
        model.normal_ratio = None if compared is None else compared.ratio
        if compared is not None and compared.is_slower:
            days = max(0.0, (time.time_ns() - compared.normal.unix_ns) / 86_400e9)
            events += self._once(
                "model.slower",
                now_ns,
                f"clean steps of {escape(served, 80)} take {compared.ratio:.2f} times as long as "
                f"the last known normal ({days:.1f} days ago), over {compared.slower_sizes} of "
                f"{compared.sizes} batch sizes; if that is the new normal, remove {self._path}",
            )
        if self._known is None or is_as_good(fresh, self._known, compared):
            self._normals[self._setting] = fresh
            if now_ns >= self._next_save_ns:
                self._next_save_ns = now_ns + SAVE_NS
                events += self._save(now_ns)
        return events

    def end(self, model: CleanStepModel, served: str | None, now_ns: int) -> list[Event]:
        """The last look; what is normal is written whatever the time."""
        self._next_look_ns = self._next_save_ns = 0
        return self.look(model, served, now_ns)

    def _once(self, name: str, now_ns: int, message: str) -> list[Event]:
        if name in self._told:
            return []
        self._told.add(name)
        return [Event(name, now_ns, message)]

    def _read(self, now_ns: int) -> list[Event]:
        self._normals = {}
        try:
            with open_regular(self._path) as file:
                self._normals = from_json(json.loads(file.read(MAX_BYTES)))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            message = f"{self._path} is ignored, it tells no normal: {escape(str(why), 120)}"
            return self._once("model.normal_unreadable", now_ns, message)
        return []

    def _save(self, now_ns: int) -> list[Event]:
        """Whole or not at all; a disk that refuses costs the normal, nothing else."""
        assert self._normals is not None
        part = self._path.with_name(f"{FILE}.part")
        try:
            part.unlink(missing_ok=True)  # of a run that was killed
            with open(part, "x", encoding="utf-8") as file:
                json.dump(to_json(self._normals), file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(part, self._path)
        except OSError as error:
            message = f"what is normal cannot be kept in {self._path}: {error.strerror}"
            return self._once("model.normal_not_kept", now_ns, message)
        return []


def setting_of(target: Target, served: str, proc: Path = PROC) -> Setting:
    """What decides how long the target's clean steps take. What cannot be read is empty."""
    try:
        arguments = procfs.command_line(target.pid, proc)
        variables = environment(target.pid, proc)
        affinity = sorted(os.sched_getaffinity(target.pid))
    except (ProcessGone, PermissionError, ProcessLookupError):
        arguments, variables, affinity = (), {}, []
    return Setting(
        model=served[:MOST_CHARS],
        engine=target.engine,
        # It is written to disk, and servers take their keys as arguments.
        arguments=mask_command(_that_matter(arguments))[:MOST_CHARS],
        threads=" ".join(f"{name}={variables[name]}" for name in _THREADS if name in variables)[
            :MOST_CHARS
        ],
        processor=_processor(proc)[:MOST_CHARS],
        cores=os.cpu_count() or 1,
        affinity=ranges(affinity)[:MOST_CHARS],
    )


def _that_matter(arguments: tuple[str, ...]) -> list[str]:
    kept, skip = [], False
    for argument in arguments[1:]:  # without the interpreter's own path
        name, equals, _ = argument.partition("=")
        if skip or name in _WHERE:
            skip = not skip and not equals
            continue
        kept.append(argument)
    return kept


def _processor(proc: Path) -> str:
    for line in procfs.read_bytes(proc / "cpuinfo").decode("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "CPU part"):
            return value.strip()
    return ""


def ranges(cpus: list[int]) -> str:
    """[0, 1, 2, 5] → 0-2,5"""
    texts: list[str] = []
    low = 0
    for place, cpu in enumerate(cpus):
        if place == 0 or cpu != cpus[place - 1] + 1:
            low = cpu
        if place + 1 == len(cpus) or cpus[place + 1] != cpu + 1:
            texts.append(str(low) if low == cpu else f"{low}-{cpu}")
    return ",".join(texts)
