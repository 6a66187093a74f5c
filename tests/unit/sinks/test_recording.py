"""A recording gives back what went in, survives crashes and full disks, and stays below its cap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import made
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import MS, S, account, batch, step, until

from dsagent.agent.attribution.account import Account, Culprit, Part
from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.facts import FACT_DTYPE, Event, Kind, Sample, SourceStatus
from dsagent.agent.sinks.base import SinkStatus
from dsagent.agent.sinks.reader import read_accounts
from dsagent.agent.sinks.recording import RecordingSink
from dsagent.agent.sinks.schema import TABLES
from dsagent.instrumentation.records import RankStep, RequestOpen

ROOT = Path(__file__).resolve().parents[3]
RICH = replace(
    account("rich", parent_span_id=2**63 + 5, sampled=True, tenant="t", external_id="x", top_p=0.5),
    parts=(
        *account("rich").parts,
        Part("lock.wait", 0, "assumed", (), (Culprit("request", "r", 5, None, "req-9", "f" * 32),)),
    ),
    engine_id=2**64 - 1,
)
REFUSED = account("refused", first_sent_ns=None, prompt_tokens=None, output_tokens=0, error="bad")


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RecordingSink]:
    sink = RecordingSink(tmp_path / "rec")
    sink.start()
    yield sink
    sink.stop(10.0)


def record_all(directory: Path, *accounts: Account) -> SinkStatus:
    sink = RecordingSink(directory)
    sink.start()
    sink.take(batch(accounts=accounts))
    sink.stop(10.0)
    return sink.status()


def test_accounts_come_back_complete(tmp_path: Path) -> None:
    given = (RICH, REFUSED, account("partial", partial=True))
    status = record_all(tmp_path / "rec", *given)
    assert status.sent == status.acknowledged > 0
    assert status.failed == status.dropped == 0
    assert read_accounts(tmp_path / "rec") == list(given)


def test_since_leaves_out_what_ended_before(tmp_path: Path) -> None:
    early = account("early", start_ns=2000 * S)
    late = account("late", start_ns=3000 * S)
    record_all(tmp_path / "rec", late, early)
    assert read_accounts(tmp_path / "rec") == [early, late]
    assert read_accounts(tmp_path / "rec", made.ANCHOR.unix(2500 * S)) == [late]


def test_a_second_run_adds_to_the_first(tmp_path: Path) -> None:
    record_all(tmp_path / "rec", account("one"))
    record_all(tmp_path / "rec", account("two", start_ns=2001 * S))
    assert [a.record.request_id for a in read_accounts(tmp_path / "rec")] == ["one", "two"]
    meta = json.loads((tmp_path / "rec" / "meta.json").read_text())
    assert [run["ended_unix_ns"] is not None for run in meta["runs"]] == [True, True]


def documented_queries() -> list[str]:
    """The SQL of docs/schemas.md."""
    text = (ROOT / "docs" / "schemas.md").read_text()
    return text.partition("```sql")[2].partition("```")[0].strip().removesuffix(";").split(";")


def test_duckdb_reads_every_table(tmp_path: Path) -> None:
    import duckdb

    facts = np.zeros(3, FACT_DTYPE)
    facts["kind"] = [Kind.RUNQUEUE, Kind.FOREIGN, 99]
    facts["tid"], facts["culprit_pid"] = [11, 0, 12], [0, 777, 0]
    facts["ns"], facts["start_ns"] = [5, 6, 7], 2000 * S
    sink = RecordingSink(tmp_path / "rec")
    sink.start()
    sink.take(
        batch(
            accounts=(RICH, account("other")),
            steps=(step(1, ("rich", "other")), step(2)),
            rank_steps=(RankStep(5, 1, 0, 4244, 4244, 2050 * S, 2050 * S + 9),),
            opened=(RequestOpen(7, "req-7", 8, 9, None, None, 2050 * S, 4242, 4242),),
            facts=facts,
            names={11: "engine-loop", 777: "stress-ng"},
            samples=(Sample("hw.power", 70.5, 2000 * S, {"hw.id": "GPU-1"}),),
            events=(Event("stall", 2000 * S, "stood still", {"ns": 5}),),
            sources=(SourceStatus("kernel", "ok"),),
            sinks=(SinkStatus("otlp", 1, 1),),
        )
    )
    sink.stop(10.0)

    def ask(query: str) -> list[tuple[object, ...]]:
        return duckdb.sql(query.replace("DIR", str(tmp_path / "rec"))).fetchall()

    for table in TABLES:
        columns = [row[0] for row in ask(f"DESCRIBE SELECT * FROM 'DIR/{table.name}-*.parquet'")]
        assert columns == [column.name for column in table.columns]
    assert ask("SELECT kind, thread, culprit, ns FROM 'DIR/kernel-*.parquet' ORDER BY ns") == [
        ("runqueue", "engine-loop", None, 5),
        ("foreign", None, "stress-ng", 6),
        ("unknown", None, None, 7),
    ]
    assert (
        ask(
            "SELECT c.name, c.ns FROM (SELECT unnest(culprits) c FROM 'DIR/parts-*.parquet') "
            "WHERE c.kind = 'process'"
        )
        == [("stress-ng", 500 * MS)] * 2
    )
    seconds, blame, steps = documented_queries()
    assert ask(seconds)[0] == ("cpu.runqueue", 1.0)
    assert ask(blame)[0] == ("stress-ng", 1.0)
    assert len(ask(steps.replace("TRACE_ID", account("other").trace_id))) == 1
    assert ask("SELECT attributes['hw.id'], value FROM 'DIR/samples-*.parquet'") == [
        ("GPU-1", 70.5)
    ]
    kinds = ask("SELECT DISTINCT kind FROM 'DIR/statuses-*.parquet' ORDER BY kind")
    assert kinds == [("event",), ("sink",), ("source",)]


def test_segments_close_while_it_runs(tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "rec", segment_s=0.05)
    sink.start()
    sink.take(batch(accounts=(account("one"),)))
    until(lambda: [a.record.request_id for a in read_accounts(tmp_path / "rec")] == ["one"])
    sink.stop(10.0)
    assert not list((tmp_path / "rec").glob("*.part"))


def test_a_killed_recorder_is_noticed_and_its_unfinished_files_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "rec"
    script = (
        "import sys; sys.path.insert(0, 'tests/fixtures')\n"
        "import os, signal, time\n"
        "from pathlib import Path\n"
        "from made import account, batch, step\n"
        "from dsagent.agent.sinks.recording import RecordingSink\n"
        f"sink = RecordingSink({str(directory)!r}, segment_s=3600)\n"
        "sink.start()\n"
        "sink.take(batch(steps=(step(1, tuple(f'r{i}' for i in range(9000))),)))\n"
        f"while not list(Path({str(directory)!r}).glob('*.parquet.part')): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, timeout=60)
    assert child.returncode == -9
    unfinished = list(directory.glob("*.parquet.part"))
    assert unfinished
    sink = RecordingSink(directory)
    sink.start()
    sink.stop(10.0)
    assert sink.unfinished_removed == len(unfinished)
    assert not list(directory.glob("*.part"))
    assert "crashed" in sink.status().reason
    runs = json.loads((directory / "meta.json").read_text())["runs"]
    assert [run.get("crashed", False) for run in runs] == [True, False]
    assert runs[1]["unfinished_files_removed"] == len(unfinished)


def test_the_cap_removes_whole_segments_oldest_first(tmp_path: Path) -> None:
    directory = tmp_path / "rec"
    cap = 200_000
    sink = RecordingSink(directory, cap, segment_s=0.0)
    sink.start()
    for i in range(40):
        sink.take(batch(accounts=(account(f"r{i}", start_ns=(2000 + i) * S),), steps=(step(i),)))
        until(lambda: sink.status().sent == sink.status().acknowledged > 0)
    sink.stop(10.0)
    assert sum(f.stat().st_size for f in directory.glob("*.parquet")) <= cap
    kept = [int(a.record.request_id[1:]) for a in read_accounts(directory)]
    assert kept
    assert kept == list(range(kept[0], 40))
    assert kept[0] > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_stops_the_recording_and_is_counted(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], check=True)
    try:
        sink = RecordingSink(tmp_path / "rec", segment_s=0.0)
        sink.start()
        keys = tuple(f"r{i}" for i in range(3000))
        given = 0
        while "stopped" not in sink.status().reason:
            given += 1
            sink.take(batch(steps=(step(given, keys),)))
            until(lambda: sink.status().sent > 0)
        before = sink.status()
        sink.take(batch(steps=(step(1, keys),)))
        sink.stop(10.0)
        after = sink.status()
        assert "No space left" in after.reason
        assert after.failed > 0
        assert after.sent == after.acknowledged + after.failed
        assert after.dropped >= before.dropped + 3001
        assert not list((tmp_path / "rec").glob("*.parquet.part"))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_values_that_do_not_fit_are_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "rec")
    sink.start()
    sink.take(batch(steps=(step(1, end_ns=2**70),), accounts=(account("kept"),)))
    sink.stop(10.0)
    status = sink.status()
    assert status.failed == 1
    assert "steps" in status.reason
    assert status.sent == status.acknowledged + 1
    assert len(read_accounts(tmp_path / "rec")) == 1


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "rec")  # not started: a disk that hangs
    many = batch(steps=(step(1, tuple(f"r{i}" for i in range(1000))),))
    for _ in range(300):
        sink.take(many)
    assert sink.status().dropped > 90_000


def test_a_folder_is_taken_once_and_must_be_a_recording(
    recorder: RecordingSink, tmp_path: Path
) -> None:
    with pytest.raises(DsagentError, match="another agent is recording there"):
        RecordingSink(tmp_path / "rec").start()
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").touch()
    with pytest.raises(DsagentError, match="not empty and not a recording"):
        RecordingSink(tmp_path / "letters").start()
    (tmp_path / "file").touch()
    with pytest.raises(DsagentError, match="file: it is not a folder"):
        RecordingSink(tmp_path / "file").start()


def test_a_name_that_the_files_cannot_have_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DsagentError, match="its name is not UTF-8"):
        RecordingSink(tmp_path / os.fsdecode(b"\xff")).start()
    assert not list(tmp_path.iterdir())


def test_a_fault_of_the_sink_ends_it_and_its_status_says_why(tmp_path: Path) -> None:
    sink = RecordingSink(tmp_path / "rec")
    sink.start()
    broken = replace(account("r"), record=None)  # type: ignore[arg-type]
    sink.take(batch(steps=(step(1),), accounts=(broken,)))
    until(lambda: sink.status().ended)
    sink.take(batch(steps=(step(2),)))
    sink.stop(10.0)
    status = sink.status()
    assert "recording stopped: AttributeError" in status.reason
    assert status.dropped > 0
    assert status.sent == status.acknowledged + status.failed


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (None, "no recording there"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not of a recording"),
        ('{"format": "dsagent recording", "version": 99}', "version 99"),
        ('{"format": "dsagent recording", "version": 3, "runs": [3]}', "runs"),
    ],
)
def test_what_is_no_recording_is_one_clear_line(
    tmp_path: Path, meta: str | None, message: str
) -> None:
    if meta is not None:
        (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(DsagentError, match=message) as raised:
        read_accounts(tmp_path)
    assert raised.value.exit_code == USAGE
    assert "\n" not in str(raised.value)


def two_segments(directory: Path) -> None:
    record_all(directory, account("one"))
    record_all(directory, account("two", start_ns=2001 * S))


def names_and_lines(directory: Path) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    found = read_accounts(directory, tell=lines.append)
    return [each.record.request_id for each in found], lines


def overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 3
    content[middle : middle + 64] = b"garbage!" * 8
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40] + b"garbage" * 8)


def make_foreign(path: Path) -> None:
    pq.write_table(pa.table({"trace_id": ["x"], "colour": ["red"]}), path)


def make_null(path: Path) -> None:
    table = pq.read_table(path)
    rows = [pa.nulls(table.num_rows, kind) for kind in table.schema.types]
    pq.write_table(pa.Table.from_arrays(rows, schema=table.schema), path)


def make_another_type(path: Path) -> None:
    table = pq.read_table(path)
    columns = [pa.array(["x"] * table.num_rows)] * table.num_columns
    pq.write_table(pa.table(columns, names=table.schema.names), path)


def change_text(path: Path) -> None:
    """Sound Parquet; its ids are no numbers, its enumerations unknown."""
    table = pq.read_table(path)
    for index, column in enumerate(table.schema):
        if column.type == pa.string():
            new = pa.array(["never heard of"] * table.num_rows)
            table = table.set_column(index, column, new)
    pq.write_table(table, path)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("table", ["requests", "parts"])
@pytest.mark.parametrize(
    "damage",
    [
        overwrite,
        cut_off,
        make_foreign,
        make_null,
        make_another_type,
        change_text,
        make_fifo,
        make_directory,
    ],
)
def test_a_bad_file_is_left_out_and_told_and_the_rest_is_read(
    tmp_path: Path, table: str, damage: Callable[[Path], None]
) -> None:
    two_segments(tmp_path)
    damage(tmp_path / f"{table}-00000001.parquet")
    found, lines = names_and_lines(tmp_path)
    assert found == ["two"]
    (line,) = lines
    assert line.startswith(f"left out: {tmp_path}/{table}-00000001.parquet: ")
    damage(tmp_path / f"{table}-00000002.parquet")
    with pytest.raises(DsagentError, match=f"nothing of it can be read: .*{table}-0") as raised:
        read_accounts(tmp_path)
    assert raised.value.exit_code == USAGE
    assert "\n" not in str(raised.value)


def test_wherever_bytes_are_overwritten_no_other_error_comes_out(tmp_path: Path) -> None:
    two_segments(tmp_path)
    for table in ("requests", "parts"):
        path = tmp_path / f"{table}-00000001.parquet"
        sound = path.read_bytes()
        for at in range(0, len(sound), len(sound) // 15):
            path.write_bytes(sound[:at] + b"\xff\x00\x7f\x80" + sound[at + 4 :])
            found, lines = names_and_lines(tmp_path)
            assert found == ["two"] if lines else found[-1] == "two"
        path.write_bytes(sound)


def test_a_fifo_where_the_recording_tells_what_it_is_holds_nobody_up(tmp_path: Path) -> None:
    record_all(tmp_path / "rec", account())
    make_fifo(tmp_path / "rec" / "meta.json")
    with pytest.raises(DsagentError, match="not a regular file"):
        read_accounts(tmp_path / "rec")
    (tmp_path / "next").mkdir()
    os.mkfifo(tmp_path / "next" / "meta.json.part")
    assert record_all(tmp_path / "next", account()).acknowledged > 0
