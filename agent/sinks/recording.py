"""Writes what the session hands out into a folder of Parquet files (docs/schemas.md).

A thread of its own writes; the caller only puts batches into a bounded queue.
A segment (one file a table) is closed every 10 s or 64 MB, so a crash loses
at most the last 10 s. A disk that refuses stops the recording, not the agent.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.facts import Target
from dsagent.agent.sinks import rows, schema
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.recording_meta import new_meta, read_meta, write_meta
from dsagent.agent.sinks.schema import PART_SUFFIX, TABLES
from dsagent.agent.sinks.segment import Segment, segment_files

SEGMENT_S = 10.0
SEGMENT_BYTES = 64 << 20
MAX_BYTES = 512 << 20
MAX_QUEUED_ROWS = 200_000
MAX_NAMES = 8192  # of threads and processes


class RecordingSink:
    """Counts rows: sent to the writer, acknowledged when their file is closed."""

    name = "recording"

    def __init__(
        self, directory: str | Path, max_bytes: int = MAX_BYTES, *, segment_s: float = SEGMENT_S
    ) -> None:
        self._directory = Path(directory)
        self._max_bytes = max_bytes
        self._segment_s = segment_s
        self._queue: deque[tuple[Explained, int]] = deque()
        self._queued_rows = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._broken = False
        self._status = SinkStatus(self.name)
        self._thread: threading.Thread | None = None
        self._lock_fd: int | None = None
        self._segment: Segment | None = None
        self._segment_rows = 0
        self._segment_due = 0.0
        self._next_number = 1
        self._names: dict[int, str] = {}
        self._states: dict[str, str] = {}
        self._last: Explained | None = None
        self._meta: dict[str, Any] = {}
        self._run: dict[str, Any] = {}
        self.unfinished_removed = 0  # files that an earlier run left behind

    def start(self) -> None:
        refused = f"cannot record to {self._directory}"
        try:
            str(self._directory).encode()
            self._open_folder()
        except UnicodeEncodeError as error:  # Parquet's writer takes no other names
            raise DsagentError(
                f"{refused}: its name is not UTF-8; choose another", exit_code=USAGE
            ) from error
        except FileExistsError as error:
            raise DsagentError(
                f"{refused}: it is not a folder; choose another name", exit_code=USAGE
            ) from error
        except OSError as error:
            self._unlock()
            raise DsagentError(f"{refused}: {error.strerror}") from error
        self._segment_due = time.monotonic() + self._segment_s
        self._thread = threading.Thread(target=self._work, name="sink-recording", daemon=True)
        self._thread.start()

    def take(self, batch: Explained) -> None:
        count = _rows_of(batch)
        with self._wake:
            if self._broken or self._stopping or self._queued_rows + count > MAX_QUEUED_ROWS:
                self._status = replace(self._status, dropped=self._status.dropped + count)
                return
            self._queue.append((batch, count))
            self._queued_rows += count
            self._wake.notify()

    def status(self) -> SinkStatus:
        with self._wake:
            return self._status

    def stop(self, deadline_s: float) -> None:
        with self._wake:
            if self._thread is None or self._stopping:
                return
            self._stopping = True
            self._wake.notify()
        self._thread.join(deadline_s)
        with self._wake:
            dropped = self._status.dropped + self._queued_rows
            self._status = replace(self._status, dropped=dropped)
            self._queue.clear()
            self._queued_rows = 0

    def _open_folder(self) -> None:
        """Takes the folder for this agent alone, and clears up after one that was killed."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise DsagentError(
                f"{self._directory}: another agent is recording there; choose another folder",
                exit_code=USAGE,
            ) from None
        if (self._directory / "meta.json").exists():
            self._meta = read_meta(self._directory)
        elif any(path.suffix != PART_SUFFIX for path in self._directory.iterdir()):
            self._unlock()
            raise DsagentError(
                f"{self._directory}: not empty and not a recording; choose another folder",
                exit_code=USAGE,
            )
        else:
            self._meta = new_meta()
        files = segment_files(self._directory)
        for file in files:
            if not file.is_closed:
                file.path.unlink()
                self.unfinished_removed += 1
        self._next_number = max((file.number for file in files), default=0) + 1
        for run in self._meta["runs"]:
            if run.get("ended_unix_ns") is None and not run.get("crashed"):
                run["crashed"] = True
                self._reason("an earlier run crashed: its last seconds are lost")
        self._run = {
            "started_unix_ns": time.time_ns(),
            "ended_unix_ns": None,
            "unfinished_files_removed": self.unfinished_removed,
            "first_segment": self._next_number,
        }
        self._meta["runs"].append(self._run)
        write_meta(self._directory, self._meta)

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _work(self) -> None:
        while True:
            with self._wake:
                if not self._queue and not self._stopping:
                    self._wake.wait(max(0.0, self._segment_due - time.monotonic()))
                batch, count = self._queue.popleft() if self._queue else (None, 0)
                self._queued_rows -= count
                is_last = self._stopping and batch is None
            try:
                if batch is not None:
                    self._write(batch)
                    count = 0
                if is_last or self._is_due():
                    self._close_segment()
                if is_last:
                    self._end_run()
            except Exception as error:  # noqa: BLE001  a part fails alone; its status says why
                self._break(error, count)
            if is_last or self._broken:
                self._unlock()
                return

    def _is_due(self) -> bool:
        segment_bytes = min(SEGMENT_BYTES, self._max_bytes // 8)
        is_full = self._segment is not None and self._segment.bytes >= segment_bytes
        return is_full or time.monotonic() >= self._segment_due

    def _write(self, batch: Explained) -> None:
        if self._segment is None:
            self._segment = Segment(self._directory, self._next_number)
            self._next_number += 1
        if "target" not in self._run:
            self._run["target"] = _target_json(batch.target)
            self._run["attached_ns"] = batch.attached_ns
            write_meta(self._directory, self._meta)
        if len(self._names) < MAX_NAMES:
            self._names.update(batch.names)
        segment, anchor = self._segment, batch.anchor
        self._last = batch
        added = segment.add(schema.STEPS, (rows.step_row(step, anchor) for step in batch.steps))
        for step in batch.steps:
            added += segment.add(schema.SHARES, rows.share_rows(step))
        added += segment.add(schema.RANKS, map(rows.rank_row, batch.rank_steps))
        added += segment.add(schema.OPENS, map(rows.open_row, batch.opened))
        added += segment.add(schema.POLLS, [rows.poll_row(batch)])
        if len(batch.facts):
            columns = rows.kernel_columns(batch.facts, self._names, anchor)
            added += segment.add_columns(schema.KERNEL, columns)
        added += segment.add(schema.SAMPLES, rows.sample_rows(batch.samples, anchor))
        added += segment.add(
            schema.STATUSES, (rows.event_row(event, anchor) for event in batch.events)
        )
        changed = [s for s in batch.sources if self._states.get(s.name) != s.state]
        self._states.update((status.name, status.state) for status in changed)
        added += segment.add(
            schema.STATUSES, (rows.source_row(s, batch.now_ns, anchor) for s in changed)
        )
        for account in batch.accounts:
            added += segment.add(schema.PARTS, rows.part_rows(account))
            added += segment.add(schema.REQUESTS, [rows.request_row(account, anchor)])
        self._count_sent(added)

    def _count_sent(self, count: int) -> None:
        self._segment_rows += count
        with self._wake:
            self._status = replace(self._status, sent=self._status.sent + count)

    def _close_segment(self) -> None:
        self._segment_due = time.monotonic() + self._segment_s
        segment, last = self._segment, self._last
        if segment is None or last is None:
            return
        sources = (rows.source_row(s, last.now_ns, last.anchor) for s in last.sources)
        sinks = (rows.sink_row(s, last.now_ns, last.anchor) for s in last.sinks)
        self._count_sent(segment.add(schema.STATUSES, [*sources, *sinks]))
        closed = segment.close()
        lost = self._segment_rows - closed
        self._segment, self._segment_rows = None, 0
        with self._wake:
            self._status = replace(
                self._status,
                acknowledged=self._status.acknowledged + closed,
                failed=self._status.failed + lost,
                reason=segment.reason or self._status.reason,
            )
        self._keep_below_cap()

    def _keep_below_cap(self) -> None:
        """Removes the oldest segments, their requests first so that no reader misses parts."""
        order = {table.name: i for i, table in enumerate(reversed(TABLES))}
        files = sorted(segment_files(self._directory), key=lambda f: (f.number, order[f.table]))
        sizes = {file.path: file.path.stat().st_size for file in files}
        total = sum(sizes.values())
        newest = self._next_number - 1
        over: int | None = None  # the segment being removed: whole or not at all
        for file in files:
            if (total <= self._max_bytes and file.number != over) or file.number == newest:
                break
            over = file.number
            file.path.unlink()
            total -= sizes[file.path]

    def _end_run(self) -> None:
        with self._wake:
            status = self._status
        self._run.update(
            ended_unix_ns=time.time_ns(),
            rows=status.acknowledged,
            rows_failed=status.failed,
            rows_dropped=status.dropped,
            reason=status.reason,
        )
        write_meta(self._directory, self._meta)

    def _break(self, error: Exception, count: int) -> None:
        """The disk is full or gone, or the sink is at fault: record no more, keep what is closed,
        count the rest; `count`: the rows of the batch that it came with."""
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            why = os.strerror(error.errno) if error.errno else str(error)
        if self._segment is not None:
            self._segment.discard()
        lost, self._segment, self._segment_rows = self._segment_rows, None, 0
        with self._wake:
            self._broken = True
            self._status = replace(
                self._status,
                failed=self._status.failed + lost,
                dropped=self._status.dropped + self._queued_rows + count,
                reason=f"recording stopped: {why}",
                ended=True,
            )
            self._queue.clear()
            self._queued_rows = 0
        with suppress(OSError):  # the disk that has just refused; it was counted
            self._end_run()
        self._last = None
        self._names.clear()

    def _reason(self, reason: str) -> None:
        self._status = replace(self._status, reason=reason)


def _rows_of(batch: Explained) -> int:
    """How many rows a batch makes, near enough to bound the queue."""
    return (
        len(batch.steps)
        + sum(len(step.shares) for step in batch.steps)
        + len(batch.facts)
        + len(batch.samples)
        + len(batch.events)
        + sum(1 + len(a.parts) + len(a.ttft_parts) for a in batch.accounts)
    )


def _target_json(target: Target) -> dict[str, Any]:
    return {
        "pid": target.pid,
        "start_ticks": target.start_ticks,
        "engine": target.engine,
        "service_name": target.service_name,
        "container_id": target.container_id,
    }
