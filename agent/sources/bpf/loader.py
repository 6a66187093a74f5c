"""Loads and attaches the objects that agent/probes.py names. What this kernel refuses is left out
alone, with the reason; only without the first object nothing works."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.probes import OBJECTS, PROBES, Probe, Program, Tier, probes_of, programs_of
from dsagent.agent.sources.bpf import perf
from dsagent.agent.sources.bpf.libbpf import BpfObject, Library

# What sched.bpf.o makes and the others are given.
_SHARED = (
    "slots", "threads", "free_slots", "cpus", "processes", "wanted", "words", "names", "facts",
    ".bss",
)  # fmt: skip
_BASE = next(iter(OBJECTS))
_NOT_HERE = "this kernel has no "


class Loaded:
    """The programs in the kernel, until `close`."""

    def __init__(
        self, library: Library, folder: Path, constants: bytes, entries: Mapping[str, int]
    ) -> None:
        """`constants`: struct ds_config. `entries`: map → its size. Raises SourceUnavailable."""
        self._library = library
        self._folder, self._constants, self._entries = folder, constants, entries
        self._objects: dict[str, BpfObject] = {}
        self._attached: set[str] = set()
        self.tier: Tier = "core"
        self.missing: dict[str, str] = {}  # program → why it does not run
        self.scan_fd = -1
        try:
            self.base = self._load(_BASE)
        except BaseException:
            self.close()
            raise

    def attach(self, tier: Tier) -> None:
        """Attach the first object's programs, then load the others, and attach those of `tier`.
        Raises SourceUnavailable where the first one's cannot be attached."""
        for program in OBJECTS[_BASE]:
            link_fd = self.base.attach(program.name)
            if program.hook.startswith("iter:"):
                self.scan_fd = link_fd
        for name in list(OBJECTS)[1:]:
            try:
                self._load(name)
            except SourceUnavailable as error:
                for program in OBJECTS[name]:
                    self.missing.setdefault(program.name, str(error))
        self.set_tier(tier)
        self._library.forget_types()

    def set_tier(self, tier: Tier) -> None:
        """Attach what `tier` has beside the first object's programs, detach what it has not."""
        self.tier = tier
        wanted = programs_of(tier) - self.missing.keys()
        for name in list(OBJECTS)[1:]:
            for program in OBJECTS[name]:
                if program.name in wanted - self._attached:
                    self._attach(self._objects[name], program)
                elif program.name in self._attached - wanted:
                    self._objects[name].detach(program.name)
                    self._attached.remove(program.name)

    def _load(self, name: str) -> BpfObject:
        loaded = BpfObject(self._library, self._folder / f"{name}.bpf.o")
        try:
            loaded.set_constants(self._constants)
            if name == _BASE:
                for table, entries in self._entries.items():
                    loaded.set_entries(table, entries)
            else:
                loaded.share(self.base, _SHARED)
                for program in OBJECTS[name]:
                    if reason := self._not_for_this_kernel(program):
                        self.missing[program.name] = reason
                        loaded.leave_out(program.name)
            loaded.load()
        except BaseException:
            loaded.close()
            raise
        self._objects[name] = loaded
        return loaded

    def _not_for_this_kernel(self, program: Program) -> str:
        if ":" in program.hook:
            return ""
        arguments = self._library.arguments_of(program.hook)
        if arguments is None:
            return f"{_NOT_HERE}tracepoint {program.hook}"
        if arguments < program.arguments:
            return f"{_NOT_HERE}argument {program.arguments} of {program.hook}"
        if program.unless and self._library.arguments_of(program.unless) is not None:
            return f"not needed: this kernel has {program.unless}"
        return ""

    def _attach(self, loaded: BpfObject, program: Program) -> None:
        try:
            if program.hook.startswith("perf:"):
                for fd in perf.open_on_every_cpu(program.hook.removeprefix("perf:")):
                    loaded.attach_perf(program.name, fd)
            else:
                loaded.attach(program.name)
            self._attached.add(program.name)
        except (SourceUnavailable, OSError) as error:
            loaded.detach(program.name)  # from the CPUs where it could be attached
            self.missing[program.name] = str(error)

    def runs(self, program: str) -> tuple[int, int]:
        """BpfObject.runs of one that is not missing."""
        owner = next(name for name, of in OBJECTS.items() if program in [p.name for p in of])
        return self._objects[owner].runs(program)

    def why_not(self, probe: Probe) -> str:
        """Why a probe does not work; empty: it does."""
        reasons = []
        for way in probe.ways:
            reason = next((self.missing[name] for name in way if name in self.missing), "")
            if not reason:
                return ""
            reasons.append(reason)
        return reasons[0]

    def lost_probes(self) -> dict[str, str]:
        """Of the tier, probe → why it does not work."""
        names = probes_of(self.tier)
        return {
            probe.name: reason
            for probe in PROBES
            if probe.name in names and (reason := self.why_not(probe))
        }

    def close(self) -> None:
        """Detach and free everything; the first object, whose maps the others use, last."""
        while self._objects:
            self._objects.popitem()[1].close()


def is_absent(reason: str) -> bool:
    """Whether a reason says that the kernel lacks it, rather than that it refused."""
    return reason.startswith(_NOT_HERE)
