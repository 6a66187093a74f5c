"""The queue on disk: what survives, what goes first, and what is not what was written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.sinks import disk_queue
from dsagent.agent.sinks.delivery_ledger import DeliveryLedger
from dsagent.agent.sinks.disk_queue import MAX_AGE_NS, DiskQueue
from dsagent.agent.sinks.outbox import Body


def queue_in(
    folder: Path, max_bytes: int = 1 << 20, **more: object
) -> tuple[DiskQueue, DeliveryLedger]:
    ledger = DeliveryLedger("traces")
    queue = DiskQueue(folder, max_bytes, ledger, **more)  # type: ignore[arg-type]
    queue.open()
    return queue, ledger


def put(queue: DiskQueue, ledger: DeliveryLedger, data: bytes, items: int = 1) -> None:
    ledger.made(items)
    queue.put(Body(data, items))


def taken(queue: DiskQueue) -> list[bytes]:
    """All that is left, settled."""
    queue.end()
    bodies = []
    while (found := queue.take()) is not None:
        entry, body = found
        bodies.append(body.data)
        queue.settle(entry)
    return bodies


def test_what_was_not_answered_for_is_there_again(tmp_path: Path) -> None:
    queue, ledger = queue_in(tmp_path)
    for data in (b"one", b"two", b"three"):
        put(queue, ledger, data, items=2)
    found = queue.take()
    assert found is not None
    queue.settle(found[0])
    assert queue.take() is not None  # on its way when the agent is killed
    queue.close()
    again, ledger = queue_in(tmp_path)
    assert ledger.status().recovered == ledger.status().queued == 4
    assert taken(again) == [b"two", b"three"]
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    queue, ledger = queue_in(tmp_path / "new")
    put(queue, ledger, b"x")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in (tmp_path / "new").iterdir()] == [0o600]
    queue.close()


def test_beyond_its_size_the_oldest_goes_but_never_the_one_on_its_way(tmp_path: Path) -> None:
    queue, ledger = queue_in(tmp_path, max_bytes=400)
    put(queue, ledger, b"a" * 100)
    assert queue.take() is not None
    for letter in (b"b", b"c", b"d"):
        put(queue, ledger, letter * 100)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 400
    assert ledger.status().lost == {"queue_full": 1}
    assert [data[:1] for data in taken(queue)] == [b"a", b"c", b"d"]
    queue.close()


def test_a_smaller_queue_than_before_lets_the_oldest_go(tmp_path: Path) -> None:
    queue, ledger = queue_in(tmp_path)
    for letter in (b"a", b"b", b"c"):
        put(queue, ledger, letter * 100)
    queue.close()
    again, ledger = queue_in(tmp_path, max_bytes=150)
    assert ledger.status().lost == {"queue_full": 2}
    assert taken(again) == [b"c" * 100]
    again.close()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "longer", "header", "lying"])
def test_a_damaged_file_is_skipped_counted_and_told_in_one_line(
    tmp_path: Path, damage: str
) -> None:
    queue, ledger = queue_in(tmp_path)
    for data in (b"good before", b"to be damaged", b"good after"):
        put(queue, ledger, data, items=3)
    queue.close()
    file = sorted(tmp_path.iterdir())[1]
    content = file.read_bytes()
    file.write_bytes(
        {
            "cut": content[:-4],
            "flipped": content[:-1] + bytes((content[-1] ^ 1,)),
            "empty": b"",
            "longer": content + b"x",
            "header": b"\xff" * len(content),
            "lying": content[:12] + b"\xff\xff\xff\xff" + content[16:],  # four billion items
        }[damage]
    )
    again, ledger = queue_in(tmp_path)
    assert taken(again) == [b"good before", b"good after"]
    status = ledger.status()
    assert status.lost == {"damaged": 3 if damage == "flipped" else 1}
    assert file.name in status.notice
    assert "\n" not in status.notice
    assert not file.exists()
    again.close()


def test_what_is_not_ours_stays_and_an_unfinished_file_goes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    name = f"{1:020d}-{1:08d}.otlp"
    (tmp_path / f"{name}.unfinished").write_bytes(b"half")
    (tmp_path / f"{2:020d}-{2:08d}.otlp").symlink_to("/etc/passwd")
    queue, ledger = queue_in(tmp_path)
    assert taken(queue) == []
    assert "passwd" not in ledger.status().notice
    assert sorted(file.name for file in tmp_path.iterdir())[1:] == ["notes.txt"]
    queue.close()


def test_two_agents_do_not_share_a_folder(tmp_path: Path) -> None:
    queue, _ = queue_in(tmp_path)
    with pytest.raises(DsagentError, match="another agent's") as raised:
        queue_in(tmp_path)
    assert raised.value.exit_code == USAGE
    queue.close()
    queue_in(tmp_path)[0].close()


def test_a_folder_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DsagentError, match="cannot keep a queue in"):
        queue_in(tmp_path / "file" / "below")


def test_what_no_back_end_would_take_any_more_is_let_go(tmp_path: Path) -> None:
    now_ns = [1_700_000_000_000_000_000]
    queue, ledger = queue_in(tmp_path, now_unix_ns=lambda: now_ns[0])
    put(queue, ledger, b"old")
    now_ns[0] += MAX_AGE_NS + 1
    put(queue, ledger, b"new")
    assert taken(queue) == [b"new"]
    assert ledger.status().lost == {"too_old": 1}
    queue.close()


def test_a_disk_that_takes_no_more_is_stood_in_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is gone, as a full disk would be: memory holds what it can."""
    queue, ledger = queue_in(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(disk_queue, "MAX_MEMORY_BYTES", 300)
    for letter in (b"a", b"b", b"c"):
        put(queue, ledger, letter * 100)
    assert ledger.status().lost == {"not_stored": 1}
    assert "memory" in ledger.status().notice
    assert taken(queue) == [b"a" * 100, b"b" * 100]
    queue.close()


class Model(RuleBasedStateMachine):
    """Whatever is put, taken and killed in whatever order: everything is in one place."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._expected: list[bytes] = []
        self._number = 0
        self._start()

    def _start(self) -> None:
        self.queue, self.ledger = queue_in(Path(self._folder.name))

    @rule(size=st.integers(0, 5000), items=st.integers(1, 9))
    def put_one(self, size: int, items: int) -> None:
        self._number += 1
        data = self._number.to_bytes(4, "big") + bytes(size)
        put(self.queue, self.ledger, data, items)
        self._expected.append(data)

    @precondition(lambda self: self._expected)
    @rule(is_answered=st.booleans())
    def send_one(self, is_answered: bool) -> None:
        found = self.queue.take()
        assert found is not None
        entry, body = found
        assert body.data == self._expected[0]
        if is_answered:
            self.ledger.answered(body.items, 0, "refused", "")
            self.queue.settle(entry)
            self._expected.pop(0)

    @rule()
    def start_again(self) -> None:
        self.queue.close()
        self._start()

    @invariant()
    def adds_up(self) -> None:
        status = self.ledger.status()
        assert status.queued == self.queue.waiting[0]
        assert (status.made or 0) + status.recovered == status.queued + status.sent + status.dropped

    def teardown(self) -> None:
        self.queue.close()
        self._folder.cleanup()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_bytes_in_the_place_of_a_file_are_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("queue")
    (folder / f"{1:020d}-{1:08d}.otlp").write_bytes(content)
    queue, ledger = queue_in(folder)
    assert taken(queue) == []
    assert ledger.status().lost == {"damaged": 1}
    queue.close()
