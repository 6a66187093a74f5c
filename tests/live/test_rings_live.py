"""Rings between real processes: a child writes, we read; nobody trusts or waits for the other."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsagent.instrumentation.records import Admission, Phase, Share, Step, request_key
from dsagent.instrumentation.ring import (
    RingReader,
    RingRejected,
    Role,
    find_rings,
    step_word_address,
)

ENGINE_ID = 99

# Every field of a step follows from its id, so that a mixed-up record shows.
WRITER = f"""
import os, sys, time
from dsagent.instrumentation.ring import RingWriter, Role

def step(step_id):
    shares = step_id % 90
    head = (step_id, step_id * 1000, step_id * 1000 + 999, step_id & 255, 2, 3, 4, 5,
            step_id & 0xFFFFFFFF, shares, 6, shares, 7, 8, 9, 1, bool(step_id & 1))
    ring.write_step(head, [(f"r{{n}}", n == 0, step_id & 0xFFFF, n, n + 1, 1, n == 1)
                           for n in range(shares)])

def say(*words):
    print(*words, flush=True)

ring = RingWriter(role=Role.SCHEDULER, engine_id={ENGINE_ID}, capacity_bytes=128 << 10)
say("ready")
"""


def expected(step_id: int, pid: int) -> Step:
    count = step_id % 90
    return Step(
        engine_id=ENGINE_ID,
        step_id=step_id,
        pid=pid,
        tid=pid,
        start_ns=step_id * 1000,
        end_ns=step_id * 1000 + 999,
        schedule_ns=step_id & 255,
        prepare_ns=2,
        forward_ns=3,
        sample_ns=4,
        output_ns=5,
        prefill_tokens=step_id & 0xFFFFFFFF,
        decode_tokens=count,
        waiting=6,
        running=count,
        preempted=7,
        kv_blocks_used=8,
        kv_blocks_total=9,
        admission=Admission.NO_PLACE,
        graph=bool(step_id & 1),
        shares=tuple(
            Share(
                request_key(f"r{n}"),
                Phase.PREFILL if n == 0 else Phase.DECODE,
                step_id & 0xFFFF,
                n,
                n + 1,
                1,
                n == 1,
            )
            for n in range(count)
        ),
    )


class Child:
    """A writing process that says a line when it is through with what it was told."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid

    def has_spoken(self) -> bool:
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def heard(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().split()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())


@contextmanager
def child(script: str, *launcher: str) -> Iterator[Child]:
    process = subprocess.Popen(
        [*launcher, sys.executable, "-c", WRITER + textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    try:
        running = Child(process)
        assert running.heard() == ["ready"]
        yield running
    finally:
        process.kill()
        process.communicate()


def attach(pid: int) -> RingReader:
    (candidate,) = find_rings(pid)
    return RingReader.open(candidate)


def test_a_flood_is_read_right_or_counted_to_the_last_record() -> None:
    with child(
        """
        sys.stdin.readline()
        n = 0
        while n < 2000:  # several times round before anybody reads
            n += 1
            step(n)
        say("lapped")
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            n += 1
            step(n)
        say("done", n)
        sys.stdin.readline()
        """
    ) as writing:
        reader = attach(writing.pid)
        assert reader.header.role is Role.SCHEDULER
        assert (reader.header.pid, reader.header.tid) == (writing.pid, writing.pid)
        writing.tell("go")
        assert writing.heard() == ["lapped"]
        got = 0
        last = 0
        done = False
        while True:
            # Asked first: what is read after "done" is all there will be.
            done = done or writing.has_spoken()
            records = reader.read()
            for record in records:
                assert isinstance(record, Step)
                assert record.step_id > last
                last = record.step_id
                assert record == expected(last, writing.pid)
            got += len(records)
            assert reader.counters.uncounted_loss == 0
            if done and not records and not reader.counters.pending:
                break
        total = int(writing.heard()[1])
        counters = reader.counters
        assert counters.written == total
        assert counters.read == got
        assert last == total
        assert counters.lapped > 0
        assert counters.rejected == 0
        assert counters.uncounted_loss == 0
        reader.close()


def test_what_others_read_while_it_changes_is_never_torn() -> None:
    with child(
        """
        n = 0
        while True:
            n += 1
            ring.step_started(n * 0x100000001, n * 0x100000001 ^ 0x55)
            if n == 1:
                say("running")
            if n % 1000 == 0:
                ring.idle(n)
        """
    ) as writing:
        assert writing.heard() == ["running"]
        reader = attach(writing.pid)
        seen: set[int] = set()
        while len(seen) < 5_000:
            step_id, start_ns, _ = reader.running()
            if step_id:
                assert step_id % 0x100000001 == 0
                assert start_ns == step_id ^ 0x55
                seen.add(step_id)
            else:
                assert start_ns == 0
        reader.close()


def test_kill_9_leaves_its_last_words_and_nothing_else() -> None:
    with child(
        """
        for n in range(1, 51):
            step(n)
        say("wrote")
        sys.stdin.readline()
        """
    ) as writing:
        assert writing.heard() == ["wrote"]
        reader = attach(writing.pid)
        address = step_word_address(writing.pid, reader.inode)
        assert address is not None
        writing.process.kill()
        writing.process.wait()
        assert reader.read() == [expected(n, writing.pid) for n in range(1, 51)]
        assert reader.counters.uncounted_loss == 0
        with pytest.raises((FileNotFoundError, ProcessLookupError)):
            find_rings(writing.pid)
        # The only descriptor left is our own, and it goes with the reader.
        inode = reader.inode
        assert [ring.inode for ring in find_rings(os.getpid())] == [inode]
        reader.close()
        assert find_rings(os.getpid()) == []
        assert "dsagent.steps" not in os.listdir("/dev/shm")


def test_a_fork_gets_its_own_ring_and_leaves_its_parents_alone() -> None:
    with child(
        """
        step(1)
        down, up = os.pipe()
        forked = os.fork()
        if forked == 0:
            os.close(up)
            ring.step_started(7, 7)
            step(11)
            step(12)
            say("child", os.getpid(), ring.failures)
            os.read(down, 1)
            os._exit(0)
        sys.stdin.readline()
        step(2)
        say("parent")
        sys.stdin.readline()
        os.write(up, b"x")
        os.wait()
        """
    ) as writing:
        word, forked, failures = writing.heard()
        assert (word, failures) == ("child", "0")
        writing.tell("go on")
        assert writing.heard() == ["parent"]
        parents, childs = attach(writing.pid), attach(int(forked))
        assert parents.read() == [expected(1, writing.pid), expected(2, writing.pid)]
        assert childs.read() == [expected(11, int(forked)), expected(12, int(forked))]
        assert parents.running()[0] == 0
        assert childs.running()[0] == 7
        assert parents.counters.uncounted_loss == childs.counters.uncounted_loss == 0
        writing.tell("end")
        parents.close()
        childs.close()


def test_a_ring_that_was_only_inherited_is_not_the_childs() -> None:
    """Between fork and exec a child still holds its parent's descriptors."""
    with child(
        """
        import ctypes
        forked = ctypes.PyDLL(None).fork()  # past Python's hooks
        if forked == 0:
            os.write(1, f"forked {os.getpid()}\\n".encode())
            os.read(0, 1)
            os._exit(0)
        os.waitpid(forked, 0)
        """
    ) as writing:
        _, forked = writing.heard()
        (candidate,) = find_rings(int(forked))
        with pytest.raises(RingRejected, match=f"made by another process .{writing.pid}."):
            RingReader.open(candidate)
        writing.tell("x")


def test_ids_from_a_container_are_told_as_we_see_them() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make a pid namespace")
    with child(
        """
        import threading
        ring.close()
        def work():
            global ring
            ring = RingWriter(role=Role.SCHEDULER, engine_id=1, capacity_bytes=128 << 10)
            step(1)
            say("wrote", os.getpid(), threading.get_native_id())
            sys.stdin.readline()
        threading.Thread(target=work).start()
        """,
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
    ) as writing:
        word, inner_pid, inner_tid = writing.heard()
        assert (word, inner_pid) == ("wrote", "1")
        children = f"/proc/{writing.pid}/task/{writing.pid}/children"
        pid = int(Path(children).read_text(encoding="ascii"))
        reader = attach(pid)
        assert reader.header.pid == pid
        assert reader.header.tid not in (pid, int(inner_tid))
        assert str(reader.header.tid) in os.listdir(f"/proc/{pid}/task")
        (step,) = reader.read()
        assert isinstance(step, Step)
        assert (step.pid, step.tid) == (reader.header.pid, reader.header.tid)
        reader.close()


def test_a_hostile_owner_that_truncates_cannot_kill_us() -> None:
    """An unsealed file is never mapped; a sealed one cannot be truncated."""
    with child(
        """
        from dsagent.instrumentation.ring import find_rings
        original = find_rings(os.getpid())[0].fd
        unsealed = os.memfd_create("dsagent.steps", os.MFD_ALLOW_SEALING)
        os.write(unsealed, os.pread(original, 4096 + (128 << 10), 0))
        step(1)
        say("made", unsealed)
        sys.stdin.readline()
        os.ftruncate(unsealed, 0)
        try:
            os.ftruncate(original, 0)
        except PermissionError:
            say("refused")
        sys.stdin.readline()
        """
    ) as writing:
        _, unsealed = writing.heard()
        sealed, copy = sorted(find_rings(writing.pid), key=lambda c: c.fd == int(unsealed))
        with pytest.raises(RingRejected, match="not sealed"):
            RingReader.open(copy)
        reader = RingReader.open(sealed)
        writing.tell("truncate")
        assert writing.heard() == ["refused"]
        assert reader.read() == [expected(1, writing.pid)]
        reader.close()
