"""The BPF programs that look at the target's sockets, and at a function it enters once a step.

They stand apart from the kernel source's, so that either can run without the
other; where both do, the number of the step that runs is shared, and what the
kernel measures is tagged with it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.host import privileges
from dsagent.agent.probes import OUTSIDE_OBJECTS
from dsagent.agent.sources.bpf.libbpf import BpfObject, Library
from dsagent.agent.sources.outside.mapped import Mapped
from dsagent.agent.sources.outside.messages import Message, MessageKind, MessageRing

MESSAGES_A_POLL = 20_000
MOST_PROCESSES = 1024
_ASK, _ASK_LOCAL = 1, 2
_PROGRAMS = {
    program.name: program.hook
    for program in OUTSIDE_OBJECTS["http"]
    if not program.hook.startswith("iter:")
}
_ITERATOR = "find_followed"
_CONFIG = struct.Struct("=II")
_CONTROL = struct.Struct("=QQQQQ")  # struct ds_outside_control
_MARKS = struct.Struct("=QQII")
_ENTRY_NS = 20  # to enter and leave a program, which it cannot see itself


@dataclass(frozen=True, slots=True)
class Place:
    """A function: the file that it is in, and the offset of its first instruction."""

    file: Mapped
    offset: int


class Capture:
    """The programs in the kernel, from construction to `close`. Raises SourceUnavailable."""

    def __init__(
        self, folder: Path = privileges.BPF_OBJECT.parent, *, ring_bytes: int = 1 << 22
    ) -> None:
        self._library = Library()
        self._folder = folder
        inode = privileges.pid_namespace()
        own = 0 if inode == privileges.INITIAL_PID_NAMESPACE else inode
        self._config = _CONFIG.pack(own, 0)
        self._marker: BpfObject | None = None
        self._read = 0  # messages but marks
        self._last_mark = 0
        self._marks_lost = 0
        self.uncounted_losses = 0
        self._mark_links: list[int] = []
        self._asked: dict[int, int] = {}
        lacking = [hook for hook in _PROGRAMS.values() if self._library.arguments_of(hook) is None]
        self._library.forget_types()
        if lacking:
            raise SourceUnavailable(f"this kernel has no tracepoint {lacking[0]} (Linux 6.3 has)")
        self._http = BpfObject(self._library, folder / "http.bpf.o")
        try:
            self._http.set_constants(self._config)
            self._http.set_entries("messages", ring_bytes)
            self._http.load()
            self._asked_map = self._http.map("asked")
            self._control = self._http.map(".bss").map_memory()
            self._ring = MessageRing(self._http.map("messages"))
            self._iterator = self._http.attach(_ITERATOR)
        except BaseException:
            self._http.close()
            raise

    def attach(self) -> None:
        """From now on messages come. Raises SourceUnavailable."""
        for program in _PROGRAMS:
            self._http.attach(program)

    def follow(self, pids: Iterable[int], senders: Collection[int] = ()) -> None:
        """These processes, as the agent sees their pids, and no others; of the `senders` among
        them also what they send over Unix sockets."""
        wanted = {
            pid: _ASK_LOCAL if pid in senders else _ASK for pid in list(pids)[:MOST_PROCESSES]
        }
        for pid, how in wanted.items():
            if self._asked.get(pid) != how:
                self._asked_map.update(struct.pack("=I", pid), struct.pack("=I", how))
        for pid in set(self._asked) - set(wanted):
            self._asked_map.delete(struct.pack("=I", pid))
        self._asked = wanted
        self._http.run_iterator(self._iterator)

    def mark(self, places: Sequence[Place], tags: BpfObject | None) -> list[str]:
        """Tell each time that one of these functions is entered. `tags`: the kernel source's first
        object, which then learns the step's number. Returns why some cannot be watched."""
        marker = BpfObject(self._library, self._folder / "marker.bpf.o")
        links, refused = [], []
        try:
            marker.set_constants(self._config)
            marker.for_uprobes("on_mark")
            marker.share(self._http, ("followed", "messages", "marks"))
            if tags is not None:
                marker.share(tags, (".bss",))
            marker.load()
            for file in dict.fromkeys(place.file for place in places):
                offsets = [place.offset for place in places if place.file == file]
                try:
                    with file.path_of_it() as path:
                        links.append(marker.attach_uprobes("on_mark", path, offsets))
                except OSError as error:
                    refused.append(_why_no_mark(error))
        except BaseException:
            marker.close()
            raise
        # Only now: where both see a call, they know it for the same by its time.
        self.unmark()
        self._marker, self._mark_links = marker, links
        return refused

    def unmark(self) -> None:
        while self._mark_links:
            os.close(self._mark_links.pop())
        if self._marker is not None:
            self._marker.close()
            self._marker = None

    def mark_any_process(self) -> None:
        """The process whose calls counted has gone: the next to make one takes its place."""
        marks = self._http.map("marks")
        now = marks.lookup(struct.pack("=I", 0))
        if now is not None:
            last_ns, step, _, _ = _MARKS.unpack(now)
            marks.update(struct.pack("=I", 0), _MARKS.pack(last_ns, step, 0, 0))

    def read(self) -> Iterator[Message]:
        """What has come since the last call; a bounded number of messages."""
        _, told, *_ = _CONTROL.unpack_from(self._control)
        for message in self._ring.read(MESSAGES_A_POLL):
            if message.kind is MessageKind.MARK:
                self._marks_lost += max(0, message.step - self._last_mark - 1)
                self._last_mark = message.step
            else:
                self._read += 1
            yield message
        if not self.behind:
            # All that was told before is there, or counted.
            dropped = _CONTROL.unpack_from(self._control)[2]
            self.uncounted_losses = max(0, told - dropped - self._read)

    @property
    def behind(self) -> bool:
        return self._ring.waiting

    @property
    def dropped(self) -> int:
        """Messages that found the ring full; of marks the numbers that are missing."""
        return int(_CONTROL.unpack_from(self._control)[2]) + self._marks_lost

    @property
    def cost_ns(self) -> int:
        """CPU time that the programs took of the target and of its clients."""
        *_, runs, cost_ns = _CONTROL.unpack_from(self._control)
        return int(cost_ns + runs * _ENTRY_NS)

    def runs(self, program: str) -> tuple[int, int]:
        """How often a program ran while the kernel was asked to time it, and nanoseconds in all."""
        owner = self._marker if program == "on_mark" else self._http
        return (0, 0) if owner is None else owner.runs(program)

    def close(self) -> None:
        self.unmark()
        self._ring.close()
        self._control.close()
        self._http.close()


def _why_no_mark(error: OSError) -> str:
    if error.errno == errno.EPERM:
        return "step markers need CAP_PERFMON, and CAP_SYS_ADMIN on older kernels"
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return f"step markers need Linux 6.6: {error}"
    return f"step markers: {error}"
