"""Bodies that wait on disk until the back end has them, also across a restart of the agent.

One file a body: a header with its length, its number of items, a checksum and when it was made,
then the body. A file is written beside its place and renamed, so that a killed agent leaves whole
files, or an unfinished one that the next start removes. What a power cut tears is found by the
checksum. Nothing is synced to the disk: that would make the target's own writes wait.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.sinks.delivery_ledger import DeliveryLedger
from dsagent.agent.sinks.outbox import Body

MAX_FILES = 65_536
MAX_BODY_BYTES = 64 << 20
MAX_ITEMS_PER_BODY = 1 << 20
MAX_AGE_NS = 24 * 3600 * 1_000_000_000  # older than this no back end takes it
MAX_MEMORY_BYTES = 16 << 20  # for what the disk does not take
_MAGIC = b"DSAQUE\x00\x01"
_HEADER = struct.Struct("<8sIIIQ")  # magic, length, items, crc of the body, when it was made
_NAME = re.compile(r"[0-9]{20}-[0-9]{8}\.otlp")
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class Entry:
    """One body that waits: in a file, or in memory where the disk did not take it."""

    name: str
    items: int
    nbytes: int  # of the file
    made_unix_ns: int
    data: bytes | None = None


class DiskQueue:
    """A folder of bodies. At most `max_bytes` of them: beyond that the oldest goes, and is
    counted. Any thread may call; one takes."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        ledger: DeliveryLedger,
        now_unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._ledger = ledger
        self._now_unix_ns = now_unix_ns
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque()
        self._disk_bytes = 0
        self._memory_bytes = 0
        self._number = 0
        self._held: Entry | None = None  # handed out, and not yet settled
        self._lock_fd = -1
        self._is_ending = False
        self._skipped: list[str] = []

    def open(self) -> None:
        """Finds what an earlier run has left. Raises DsagentError: the folder cannot be had, or
        another agent has it."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._scan()
        except BlockingIOError as error:
            self.close()
            raise DsagentError(
                f"the queue {self._directory} is another agent's; give this one a folder of its "
                "own with --otlp-queue",
                exit_code=USAGE,
            ) from error
        except OSError as error:
            self.close()
            raise DsagentError(
                f"cannot keep a queue in {self._directory}: {error.strerror}", exit_code=USAGE
            ) from error
        if self._skipped:
            self._tell_skipped()

    def put(self, body: Body) -> None:
        """Never raises: what the disk does not take waits in memory, while there is room."""
        now_ns = self._now_unix_ns()
        with self._changed:
            self._number += 1
            name = f"{now_ns:020d}-{self._number % 10**8:08d}.otlp"
        entry = Entry(name, body.items, _HEADER.size + len(body.data), now_ns)
        reason = ""
        try:
            self._write(entry, body.data)
        except OSError as error:
            self._remove(name + _UNFINISHED)
            entry = replace(entry, data=body.data)
            reason = f"{self._directory}: {error.strerror}"
            self._ledger.notice(f"the queue on disk takes no more, memory does: {reason}")
        with self._changed:
            if entry.data is not None:
                if self._memory_bytes + entry.nbytes > MAX_MEMORY_BYTES:
                    self._ledger.dropped(entry.items, "not_stored", reason)
                    return
                self._memory_bytes += entry.nbytes
            else:
                self._disk_bytes += entry.nbytes
            self._entries.append(entry)
            self._keep_within_bounds()
            self._changed.notify_all()

    def take(self) -> tuple[Entry, Body] | None:
        """The oldest one, which stays until `settle`. Blocks; None once `end` was called and
        nothing is left."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._entries or self._is_ending)
                if not self._entries:
                    return None
                entry = self._held = self._entries[0]
            if self._now_unix_ns() - entry.made_unix_ns > MAX_AGE_NS:
                self._ledger.dropped(entry.items, "too_old", "it waited on disk for a day")
                self.settle(entry)
                continue
            data = entry.data if entry.data is not None else self._read(entry)
            if data is not None:
                return entry, Body(data, entry.items)

    def settle(self, entry: Entry) -> None:
        """It has been answered for, or given up."""
        self._leave(entry)
        if entry.data is None:
            self._remove(entry.name)

    def _leave(self, entry: Entry) -> None:
        with self._changed:
            self._held = None
            if self._entries and self._entries[0] is entry:
                self._entries.popleft()
                self._count_out(entry)

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def close(self) -> None:
        """What waits in memory only is lost now; what is on disk stays."""
        with self._changed:
            left = sum(entry.items for entry in self._entries if entry.data is not None)
            self._ledger.dropped(left, "ended")
            self._entries.clear()
            self._is_ending = True
            self._changed.notify_all()
            fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def waiting(self) -> tuple[int, int]:
        """Items, and bytes on disk."""
        with self._changed:
            return sum(entry.items for entry in self._entries), self._disk_bytes

    def _scan(self) -> None:
        found: list[Entry] = []
        with os.scandir(self._directory) as listing:
            for file in listing:
                if file.name.endswith(_UNFINISHED) and _NAME.fullmatch(
                    file.name.removesuffix(_UNFINISHED)
                ):
                    self._remove(file.name)
                elif _NAME.fullmatch(file.name):
                    entry = self._header(file.name)
                    if entry is not None:
                        found.append(entry)
        found.sort(key=lambda entry: entry.name)
        self._ledger.recovered(sum(entry.items for entry in found))
        self._entries.extend(found)
        self._disk_bytes = sum(entry.nbytes for entry in found)
        self._keep_within_bounds()

    def _header(self, name: str) -> Entry | None:
        """None: not one of ours, or torn; then it is removed and counted."""
        try:
            fd = self._open(name)
            try:
                header, size = os.read(fd, _HEADER.size), os.fstat(fd).st_size
            finally:
                os.close(fd)
        except OSError as error:
            self._skipped.append(f"{name} ({error.strerror})")
            return None
        if len(header) == _HEADER.size:
            magic, length, items, _, made_ns = _HEADER.unpack(header)
            is_ours = magic == _MAGIC and 0 < items <= MAX_ITEMS_PER_BODY
            if is_ours and length <= MAX_BODY_BYTES and size == _HEADER.size + length:
                return Entry(name, items, size, made_ns)
        self._skipped.append(f"{name} (not whole)")
        self._ledger.recovered(1)  # how many there were nobody can tell
        self._ledger.dropped(1, "damaged")
        self._remove(name)
        return None

    def _read(self, entry: Entry) -> bytes | None:
        """The body; None where it is not what was written: then it is removed and counted."""
        try:
            fd = self._open(entry.name)
            with os.fdopen(fd, "rb") as file:
                content = file.read(entry.nbytes + 1)
        except OSError as error:
            self._skipped.append(f"{entry.name} ({error.strerror})")
            self._leave(entry)  # the file stays: it may be readable another time
        else:
            data = content[_HEADER.size :]
            if len(content) == entry.nbytes and _HEADER.unpack_from(content)[3] == zlib.crc32(data):
                return data
            self._skipped.append(f"{entry.name} (its checksum is wrong)")
            self.settle(entry)
        self._ledger.dropped(entry.items, "damaged")
        self._tell_skipped()
        return None

    def _tell_skipped(self) -> None:
        count, first = len(self._skipped), self._skipped[0]
        files = "1 file is" if count == 1 else f"{count} files are"
        self._ledger.notice(f"{self._directory}: {files} damaged and skipped, first {first}")

    def _open(self, name: str) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._lock_fd)

    def _write(self, entry: Entry, data: bytes) -> None:
        unfinished = entry.name + _UNFINISHED
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600, dir_fd=self._lock_fd)
        with os.fdopen(fd, "wb") as file:
            crc = zlib.crc32(data)
            file.write(_HEADER.pack(_MAGIC, len(data), entry.items, crc, entry.made_unix_ns))
            file.write(data)
        os.rename(unfinished, entry.name, src_dir_fd=self._lock_fd, dst_dir_fd=self._lock_fd)

    def _keep_within_bounds(self) -> None:
        while self._disk_bytes > self._max_bytes or len(self._entries) > MAX_FILES:
            oldest = next(
                (e for e in self._entries if e is not self._held and e.data is None), None
            )
            if oldest is None:
                return
            self._entries.remove(oldest)
            self._count_out(oldest)
            self._remove(oldest.name)
            self._ledger.dropped(oldest.items, "queue_full", "more than the queue on disk may hold")

    def _count_out(self, entry: Entry) -> None:
        if entry.data is not None:
            self._memory_bytes -= entry.nbytes
        else:
            self._disk_bytes -= entry.nbytes

    def _remove(self, name: str) -> None:
        if self._lock_fd < 0:
            return  # closed: the next run finds it
        try:
            os.unlink(name, dir_fd=self._lock_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            self._ledger.notice(f"cannot remove {self._directory / name}: {error.strerror}")
