"""The documented questions answer, on what has been rolled and added up, once each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import pytest
from fleet_recordings import HOUR, LATER_UNIX_NS, write_recording
from made import S

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.fleet.folder import FolderStore
from dsagent.agent.fleet.policy import DAY_NS, Policy
from dsagent.agent.fleet.query import NAMED, ask
from dsagent.agent.fleet.retain import retain
from dsagent.agent.fleet.roll import roll

PAGE = Path(__file__).resolve().parents[3] / "docs" / "fleet.md"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FolderStore:
    root = tmp_path_factory.mktemp("asked")
    store = FolderStore(root / "store")
    for pod in ("pod-a", "pod-b"):
        roll(write_recording(root / pod, (0, HOUR)), store, pod, now_ns=LATER_UNIX_NS)
    retain(store, Policy(30 * DAY_NS, 90 * DAY_NS), now_ns=LATER_UNIX_NS)
    return store


def column(answer_rows: list[tuple[object, ...]], index: int) -> list[object]:
    return [row[index] for row in answer_rows]


def test_slowest(store: FolderStore) -> None:
    answer = ask(store, "slowest")
    assert len(answer.rows) == 8
    assert set(column(answer.rows, 4)) == {1000.0}
    assert set(column(answer.rows, 6)) == {"cpu.runqueue"}


def test_causes_by_hour_and_model(store: FolderStore) -> None:
    answer = ask(store, "causes")
    rows = {row[:3]: row[3:] for row in answer.rows}
    assert rows["2023-11-14T22", "tiny-llama", "cpu.runqueue"] == (1.0, pytest.approx(55.6))
    assert rows["2023-11-14T23", "qwen", "lock.wait"] == (pytest.approx(0.2), 10.0)


def test_the_culprits_of_a_fleet(store: FolderStore) -> None:
    (row,) = ask(store, "culprits").rows
    assert row == ("cpu.runqueue", "process", "stress-ng", 2, 8, 4.0)


def test_latency_percentiles_from_the_histogram(store: FolderStore) -> None:
    rows = ask(store, "latency").rows
    assert column(rows, 0) == ["qwen", "tiny-llama"]
    for row in rows:  # 300 ms, in buckets of a quarter of a doubling
        assert 300 <= row[2] <= 300 * 2**0.25
        assert 300 <= row[3] <= 300 * 2**0.25


def test_only_the_last_hours(store: FolderStore) -> None:
    at_ns = LATER_UNIX_NS - 100 * HOUR + HOUR + 60 * S
    assert ask(store, "SELECT count(*) FROM requests", HOUR // 2, at_ns).rows == [(4,)]
    assert ask(store, "SELECT count(*) FROM requests", 30 * HOUR, at_ns).rows == [(8,)]
    assert ask(store, "SELECT count(*) FROM requests", HOUR // 2, LATER_UNIX_NS).rows == [(0,)]


def test_a_batch_without_its_manifest_is_not_seen(store: FolderStore) -> None:
    other = Path(store.url) / "raw/requests/hour=2023-11-14T22/pod=pod-c"
    other.mkdir()
    remnant = other / "1699999200000000000-00000001-00000001.parquet"
    remnant.write_bytes(b"half of it")
    try:
        assert ask(store, "SELECT count(*) FROM requests").rows == [(8,)]
    finally:
        remnant.unlink()
        other.rmdir()


def test_hours_and_pods_are_columns(store: FolderStore) -> None:
    answer = ask(store, "SELECT DISTINCT hour, pod FROM steps ORDER BY ALL")
    assert answer.rows[0] == ("2023-11-14T22", "pod-a")
    assert len(answer.rows) == 4
    assert json.dumps(answer.json())


@pytest.mark.parametrize(
    "text",
    [
        "SELEKT 1",
        "SELECT * FROM no_such_table",
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY (SELECT 1) TO '/tmp/written-by-sql'",
        "SET enable_external_access = true",
        "ATTACH '/tmp/written-by-sql.db'",
        "SELECT hour FROM requests WHERE pod = 7 / 'x'",
    ],
)
def test_what_is_no_question_is_one_line_and_touches_no_file(store: FolderStore, text: str) -> None:
    with pytest.raises(DsagentError) as caught:
        ask(store, text)
    assert caught.value.exit_code == USAGE
    assert "\n" not in str(caught.value)
    assert not list(Path("/tmp").glob("written-by-sql*"))


def test_the_page_shows_the_questions_as_they_are(store: FolderStore) -> None:
    text = PAGE.read_text()
    for name, question in NAMED.items():
        assert question.strip() in text, f"docs/fleet.md does not show {name}"


def test_plain_duckdb_gives_the_same(store: FolderStore) -> None:
    """The views that the page defines for who has no dsagent at hand."""
    text = PAGE.read_text()
    views = re.findall(r"CREATE VIEW .*?;", text, re.DOTALL)
    assert views
    sql = duckdb.connect()
    for view in views:
        sql.execute(view.replace("/srv/fleet", store.url))
    for name in NAMED:
        mine = sorted(map(str, sql.sql(NAMED[name]).fetchall()))
        assert mine == sorted(map(str, ask(store, name).rows)), name
