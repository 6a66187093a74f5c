"""The step rings of the target's processes: found, opened, given up, and read to their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dsagent.agent.host import procfs
from dsagent.instrumentation.ring import RingCandidate, RingReader, RingRejected, find_rings

MAX_RINGS = 256
NEWEST_BYTES = 128 << 10  # of a ring that was there when we came: what is under way, not all of it
MAX_REFUSED = 64  # kept by reason, and tried again at each look
MAX_GIVEN_UP = 4096  # inodes remembered of rings that made no sense
MAX_HOLDERS = 16  # of one ring: children inherit their parent's
LEAVE_NS = 10_000_000_000  # a ring without a writer is read to its end for at most so long
REASONS_TOLD = 3


class RingSet:
    """Rings by inode. A ring whose writer has let it go leaves once it is read to its end; what
    it lost is kept in `dropped` and `uncounted_loss`.

    A candidate that is refused is tried again at the next look: it may have been seen before its
    writer was done with making it. A ring that was opened and made no sense later is not.
    """

    def __init__(self) -> None:
        self.open: dict[int, RingReader] = {}
        self.refused: dict[int, str] = {}
        self.untried = 0  # candidates beyond the bounds, at the last look
        self.given_up: dict[int, str] = {}  # by inode: rings whose counts cannot be
        self._crowded: list[int] = []  # processes with more rings than are looked for
        self._looked = False
        self._leaving: dict[int, int] = {}  # inode → until when it is read
        self._dropped = 0
        self._uncounted_loss = 0

    def look(self, pids: Iterable[int], now_ns: int) -> list[RingReader]:
        """Looks through the processes' descriptors; returns the rings opened."""
        there: set[int] = set()  # inodes of the open rings that still have their writer
        candidates: dict[int, list[RingCandidate]] = {}
        self._crowded = []
        for pid in pids:
            found = _rings_of(pid)
            if found is not None and len(found) >= MAX_RINGS:
                self._crowded.append(pid)
            if found is None or pid in self._crowded:  # not all are seen: nothing follows
                there |= {i for i, reader in self.open.items() if reader.header.pid == pid}
            for candidate in found or ():
                reader = self.open.get(candidate.inode)
                if candidate.inode in self.given_up:
                    continue
                if reader is None:
                    candidates.setdefault(candidate.inode, []).append(candidate)
                elif reader.header.pid == pid:  # others may have inherited it, but do not write
                    there.add(candidate.inode)
        for inode in self.open:
            if inode in there:
                self._leaving.pop(inode, None)
            else:
                self._leaving.setdefault(inode, now_ns + LEAVE_NS)
        opened = self._open_some(candidates)
        self._looked = True
        return opened

    def _open_some(self, candidates: dict[int, list[RingCandidate]]) -> list[RingReader]:
        """The new ones first: those refused before must not keep them out."""
        before, self.refused, self.untried = self.refused, {}, 0
        opened = []
        for inode in sorted(candidates, key=before.__contains__):
            if len(self.open) >= MAX_RINGS or len(self.refused) >= MAX_REFUSED:
                self.untried += 1
            elif (reader := self._opened(inode, candidates[inode])) is not None:
                self.open[inode] = reader
                opened.append(reader)
        return opened

    def _opened(self, inode: int, holders: list[RingCandidate]) -> RingReader | None:
        """The ring, through the first of the processes that hold it which is its writer."""
        for candidate in holders[:MAX_HOLDERS]:
            try:
                reader = RingReader.open(
                    candidate, newest_bytes=None if self._looked else NEWEST_BYTES
                )
            except RingRejected as rejection:
                self.refused[inode] = procfs.escape(str(rejection))
            else:
                self.refused.pop(inode, None)
                return reader
        return None

    def let_go(self, now_ns: int) -> list[RingReader]:
        """Closes the rings that are leaving and, as the last read has seen, read to their ends;
        returns them. What is left of one after 10 s counts as lapped."""
        gone = []
        for inode, until_ns in tuple(self._leaving.items()):
            reader = self.open[inode]
            if reader.counters.pending and now_ns < until_ns:
                continue
            _leave_unread(reader)
            self._close(inode)
            gone.append(reader)
        return gone

    def leave_unread(self) -> None:
        """No more will be read: what is left counts as lapped."""
        for reader in self.open.values():
            _leave_unread(reader)

    def give_up(self, inode: int, why: str) -> None:
        """Closes a ring that cannot be right; what its counters said while they could stays."""
        if len(self.given_up) >= MAX_GIVEN_UP:
            self.given_up.pop(next(iter(self.given_up)))
        self.given_up[inode] = why
        self._close(inode)

    def _close(self, inode: int) -> None:
        reader = self.open.pop(inode)
        self._leaving.pop(inode, None)
        self._dropped += losses(reader)
        self._uncounted_loss += reader.counters.uncounted_loss
        reader.close()

    @property
    def dropped(self) -> int:
        """Records lapped, torn or rejected, those of rings gone included."""
        return self._dropped + sum(map(losses, self.open.values()))

    @property
    def uncounted_loss(self) -> int:
        return self._uncounted_loss + sum(
            reader.counters.uncounted_loss for reader in self.open.values()
        )

    def refusals(self) -> str:
        """Why rings are not read, in few words; empty where all are."""
        told = [
            *_told(self.given_up.values(), "rejected as it makes no sense"),
            *_told(self.refused.values(), "refused"),
        ]
        if (more := len(told) - REASONS_TOLD) > 0:
            told[REASONS_TOLD:] = [f"rings are refused for {more} more reasons"]
        if self.untried:
            told.append(f"{self.untried} rings beyond the first {MAX_RINGS} are not looked at")
        elif self._crowded:
            told.append(f"of one process, only {MAX_RINGS} rings are looked at")
        return "; ".join(told)

    def close(self) -> None:
        for inode in tuple(self.open):
            self._close(inode)


def _told(reasons: Iterable[str], done: str) -> list[str]:
    return [
        f"a ring is {done}: {why}" if count == 1 else f"{count} rings are {done}: {why}"
        for why, count in Counter(reasons).most_common()
    ]


def _leave_unread(reader: RingReader) -> None:
    reader.counters.lapped += reader.counters.pending
    reader.counters.pending = 0


def losses(reader: RingReader) -> int:
    counters = reader.counters
    return counters.lapped + counters.torn + counters.rejected


def _rings_of(pid: int) -> list[RingCandidate] | None:
    """None where the process's descriptors cannot be seen just now."""
    try:
        return find_rings(pid)
    except (FileNotFoundError, ProcessLookupError):
        return []  # it has ended
    except PermissionError:
        return None
