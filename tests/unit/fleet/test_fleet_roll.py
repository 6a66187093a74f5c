"""Rolling: once each, whole or not at all, anew after a kill; the source is kept until then."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fleet_recordings import HOUR, LATER_UNIX_NS, write_recording
from made import S

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.fleet import batch as fleet_batch
from dsagent.agent.fleet.folder import FolderStore
from dsagent.agent.fleet.layout import place_of
from dsagent.agent.fleet.roll import Rolled, roll
from dsagent.agent.sinks.recording import RecordingSink
from dsagent.agent.sinks.schema import TABLES, VERSION

FIVE = (0, 10 * S, HOUR - 5 * S, HOUR + 5 * S, 2 * HOUR)


def rolled(recording: Path, store: FolderStore, **how: object) -> Rolled:
    return roll(recording, store, "pod-1", now_ns=LATER_UNIX_NS, **how)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("written") / "rec", FIVE)


@pytest.fixture
def recording(tmp_path: Path, written: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "rec"))


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def source_rows(recording: Path) -> Counter[str]:
    rows: Counter[str] = Counter()
    for path in recording.glob("*.parquet"):
        rows[path.name.partition("-")[0]] += pq.read_metadata(path).num_rows
    return rows


def store_rows(store: FolderStore) -> Counter[str]:
    rows: Counter[str] = Counter()
    for found in store.list("raw"):
        place = place_of(found.path)
        assert place is not None
        rows[place.table] += pq.read_metadata(Path(store.url) / found.path).num_rows
    return rows


def names(store: FolderStore) -> list[str]:
    return [found.path for found in store.list("")]


def test_every_row_lands_in_the_hour_of_its_segment(recording: Path, store: FolderStore) -> None:
    done = rolled(recording, store)
    assert [(b.hour, len(b.segments)) for b in done.batches] == [
        ("2023-11-14T22", 3),
        ("2023-11-14T23", 1),
        ("2023-11-15T00", 1),
    ]
    assert store_rows(store) == source_rows(recording)
    assert done.json()["rows"] == sum(source_rows(recording).values())
    assert "raw/requests/hour=2023-11-14T22/pod=pod-1" in {
        str(Path(n).parent) for n in names(store)
    }
    assert all(place_of(name) is not None for name in names(store))


def test_rolling_again_does_nothing(recording: Path, store: FolderStore) -> None:
    rolled(recording, store)
    before = {name: store.digest(name) for name in names(store)}
    again = rolled(recording, store)
    assert (again.batches, again.segments_before) == ([], 5)
    assert {name: store.digest(name) for name in names(store)} == before


def test_what_comes_later_is_a_batch_of_its_own(tmp_path: Path, store: FolderStore) -> None:
    recording = write_recording(tmp_path / "rec", (0,))
    rolled(recording, store)
    write_more = write_recording(tmp_path / "more", (0, 20 * S))
    for path in write_more.glob("*-00000002.parquet"):
        path.rename(recording / path.name)
    (batch,) = rolled(recording, store).batches
    assert list(batch.segments) == [2]
    assert store_rows(store) == source_rows(recording)


def test_two_recordings_of_one_pod_in_one_hour_are_both_kept(
    tmp_path: Path, store: FolderStore
) -> None:
    """A pod that was replaced begins to count its segments anew."""
    first = write_recording(tmp_path / "first", (0, 10 * S))
    second = write_recording(tmp_path / "second", (30 * S, 40 * S))
    rolled(first, store)
    assert len(rolled(second, store).batches) == 1
    assert store_rows(store) == source_rows(first) + source_rows(second)


def test_an_hour_that_is_not_over_waits_unless_asked_for(
    recording: Path, store: FolderStore
) -> None:
    in_it_ns = LATER_UNIX_NS - 100 * HOUR + 2 * HOUR + 60 * S
    done = roll(recording, store, "pod-1", now_ns=in_it_ns)
    assert (len(done.batches), done.segments_waiting) == (2, 1)
    done = roll(recording, store, "pod-1", now_ns=in_it_ns, unfinished_hour=True)
    assert (len(done.batches), done.segments_waiting) == (1, 0)
    assert store_rows(store) == source_rows(recording)


@pytest.mark.parametrize("damage", [b"", b"PAR1 nonsense", None])
def test_a_segment_that_cannot_be_read_is_left_out_whole_counted_and_kept(
    recording: Path, store: FolderStore, damage: bytes | None
) -> None:
    victim = recording / "parts-00000002.parquet"
    if damage is None:  # one bit, in the middle of the data
        content = bytearray(victim.read_bytes())
        content[30] ^= 1
        damage = bytes(content)
    victim.write_bytes(damage)
    done = rolled(recording, store, delete_source=True)
    assert len(done.left_out) == 1
    assert victim.name in done.left_out[0]
    assert store_rows(store)["requests"] == 8
    assert done.segments_deleted == 4
    assert victim.read_bytes() == damage
    assert (recording / "requests-00000002.parquet").exists()
    assert len(rolled(recording, store).left_out) == 1  # it is said each time


def test_a_file_larger_than_any_agent_makes_is_not_read(
    recording: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    biggest = max(path.stat().st_size for path in recording.glob("*.parquet"))
    monkeypatch.setattr(fleet_batch, "MAX_FILE_BYTES", biggest - 1)
    done = rolled(recording, store)
    assert done.left_out
    assert all("larger than any file of an agent" in why for why in done.left_out)
    monkeypatch.setattr(fleet_batch, "MAX_FILE_BYTES", biggest)
    monkeypatch.setattr(fleet_batch, "MAX_UNPACKED_BYTES", 10)
    done = rolled(recording, store)
    assert all("once unpacked" in why for why in done.left_out)


def test_a_clock_that_was_never_set_is_left_out(tmp_path: Path, store: FolderStore) -> None:
    recording = write_recording(tmp_path / "rec", (-1_699_999_000 * S,))
    (why,) = rolled(recording, store).left_out
    assert "no time" in why


def test_the_source_goes_only_after_the_store_has_been_read_back(
    recording: Path, store: FolderStore
) -> None:
    rolled(recording, store)
    spoilt = Path(store.url) / next(n for n in names(store) if "kernel" in n or "steps" in n)
    content = bytearray(spoilt.read_bytes())
    content[20] ^= 1
    spoilt.write_bytes(content)
    done = rolled(recording, store, delete_source=True)
    assert done.segments_deleted == 2  # of the other two hours
    assert len(list(recording.glob("requests-*.parquet"))) == 3


def test_nothing_is_deleted_while_an_agent_records_there(
    recording: Path, store: FolderStore
) -> None:
    sink = RecordingSink(recording)
    sink.start()
    try:
        with pytest.raises(DsagentError, match="an agent is recording"):
            rolled(recording, store, delete_source=True)
    finally:
        sink.stop(10.0)
    assert len(list(recording.glob("requests-*.parquet"))) == 5


def test_a_full_store_leaves_no_batch_and_is_said_in_one_line(
    recording: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.fsync, [3]

    def fails(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(DsagentError, match=r"cannot write .*: No space left on device"):
            rolled(recording, store)
    assert not list(store.list("rolled"))
    assert not [name for name in names(store) if name.endswith(".part")]
    done = rolled(recording, store)  # there is room again
    assert done.remnants_removed > 0
    assert store_rows(store) == source_rows(recording)


_KILLED = """
import os, signal, sys
from pathlib import Path
from dsagent.agent.fleet.folder import FolderStore
from dsagent.agent.fleet.roll import roll
class Killed(FolderStore):
    left = int(sys.argv[3])
    def put(self, source, path):
        Killed.left -= 1
        if Killed.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().put(source, path)
roll(Path(sys.argv[1]), Killed(Path(sys.argv[2])), "pod-1", now_ns=int(sys.argv[4]))
"""


@pytest.mark.parametrize("puts", [0, 2, 6, 7, 9])
def test_killed_at_any_moment_the_next_run_ends_with_the_same_rows(
    recording: Path, store: FolderStore, puts: int
) -> None:
    arguments = [str(recording), store.url, str(puts), str(LATER_UNIX_NS)]
    ended = subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    rolled(recording, store)
    assert store_rows(store) == source_rows(recording)
    assert all(place_of(name) is not None for name in names(store))


def test_what_a_killed_run_left_of_segments_that_are_gone_since_goes(
    recording: Path, store: FolderStore
) -> None:
    """The agent's cap has removed the first: the batch has another name than the killed one's."""
    arguments = [str(recording), store.url, "4", str(LATER_UNIX_NS)]
    ended = subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    for path in recording.glob("*-00000001.parquet"):
        path.unlink()
    assert rolled(recording, store).remnants_removed == 4
    assert store_rows(store) == source_rows(recording)


def test_a_link_in_the_store_is_not_followed(
    recording: Path, store: FolderStore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    Path(store.url).mkdir()
    (Path(store.url) / "raw").symlink_to(outside)
    with pytest.raises(DsagentError, match="cannot write"):
        rolled(recording, store)
    assert not list(outside.iterdir())


def test_personal_data_does_not_leave(recording: Path, store: FolderStore) -> None:
    rolled(recording, store)
    for found in store.list("raw"):
        table = pq.read_table(Path(store.url) / found.path, partitioning=None)
        text = str(table.to_pylist())
        assert "@example.com" not in text, found.path
    tenants = {
        tenant
        for found in store.list("raw/requests")
        for tenant in pq.read_table(Path(store.url) / found.path, columns=["tenant"])[
            "tenant"
        ].to_pylist()
    }
    assert tenants == {None, "mail [email]"}


def test_unmasked_it_is_as_it_was(recording: Path, store: FolderStore) -> None:
    rolled(recording, store, is_masked=False)
    for table in TABLES:
        sources = sorted(recording.glob(f"{table.name}-*.parquet"))
        rows = [row for path in sources for row in pq.read_table(path).to_pylist()]
        back = [
            row
            for found in store.list(f"raw/{table.name}")
            for row in pq.read_table(Path(store.url) / found.path, partitioning=None).to_pylist()
        ]
        assert back == rows


def test_an_hour_outlives_an_upgrade(recording: Path, store: FolderStore) -> None:
    rolled(recording, store)
    for found in list(store.list("rolled")):
        path = Path(store.url) / found.path
        text = path.read_text()
        assert f'"schema_version": {VERSION}' in text
        path.write_text(text.replace(f'"schema_version": {VERSION}', '"schema_version": 1'))
    assert rolled(recording, store).segments_before == 5


@pytest.mark.parametrize("text", ["", "[]", '{"format": "x"}', "[" * 100_000])
def test_a_manifest_that_is_none_stops_its_hour_and_says_which(
    recording: Path, store: FolderStore, text: str
) -> None:
    rolled(recording, store)
    path = Path(store.url) / next(iter(store.list("rolled"))).path
    path.write_text(text)
    before = names(store)
    with pytest.raises(DsagentError, match=f"{path.name}.*move it away"):
        rolled(recording, store)
    assert names(store) == before


def test_no_recording_there(tmp_path: Path, store: FolderStore) -> None:
    with pytest.raises(DsagentError, match="no recording there") as caught:
        rolled(tmp_path / "nothing", store)
    assert caught.value.exit_code == USAGE
