"""Retention: what is added up is exact, what goes is old and safe, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import duckdb
import pytest
from fleet_recordings import HOUR, LATER_UNIX_NS, write_recording
from made import S

from dsagent.agent.errors import USAGE, DsagentError
from dsagent.agent.fleet import hourly
from dsagent.agent.fleet.folder import FolderStore
from dsagent.agent.fleet.layout import place_of
from dsagent.agent.fleet.policy import DAY_NS, Policy, load_policy
from dsagent.agent.fleet.retain import Retained, retain
from dsagent.agent.fleet.roll import roll

WEEK = Policy(7 * DAY_NS, 90 * DAY_NS)
TEN_UNIX_NS = LATER_UNIX_NS - 100 * HOUR
DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "fleet"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pods, two hours."""
    root = tmp_path_factory.mktemp("filled")
    for pod in ("pod-a", "pod-b"):
        recording = write_recording(root / f"rec-{pod}", (0, 10 * S, HOUR))
        roll(recording, FolderStore(root / "store"), pod, now_ns=LATER_UNIX_NS)
    return root / "store"


@pytest.fixture
def store(filled: Path, tmp_path: Path) -> FolderStore:
    return FolderStore(Path(shutil.copytree(filled, tmp_path / "store")))


def after(store: FolderStore, days: float, **how: object) -> Retained:
    """`days` after the second hour's end."""
    now_ns = TEN_UNIX_NS + 2 * HOUR + int(days * DAY_NS)
    return retain(store, WEEK, now_ns=now_ns, **how)  # type: ignore[arg-type]


def tiers(store: FolderStore) -> Counter[str]:
    return Counter(place.tier for found in store.list("") if (place := place_of(found.path)))


def sums(store: FolderStore, tier: str) -> dict[str, list[tuple[object, ...]]]:
    """By model, tenant and cause, from the raw files or from the hourly ones."""
    sql = duckdb.connect()

    def files(table: str) -> str:
        glob = f"{store.url}/{tier}/{table}/*/*/*.parquet"
        glob = glob if tier == "raw" else f"{store.url}/{tier}/{table}/*/*.parquet"
        return f"read_parquet('{glob}', hive_partitioning=true, hive_types_autocast=false)"

    count, of_parts = ("count(*)", "parts") if tier == "raw" else ("sum(requests)", "causes")
    requests = f"""SELECT hour, pod, model, tenant, {count}, sum(e2e_ns), sum(unattributed_ns),
        sum(output_tokens), sum(ttft_ns) FROM {files("requests")} GROUP BY ALL ORDER BY ALL"""
    causes = f"""SELECT hour, pod, whole, cause, how, sum(ns) FROM {files(of_parts)}
        GROUP BY ALL ORDER BY ALL"""
    return {"requests": sql.sql(requests).fetchall(), "causes": sql.sql(causes).fetchall()}


def test_the_sums_are_the_same_before_and_after(store: FolderStore) -> None:
    before = sums(store, "raw")
    done = after(store, 1)
    assert done.batches_added_up == 4
    assert sums(store, "hourly") == before
    assert sums(store, "raw") == before  # nothing is old yet
    done = after(store, 8)
    assert tiers(store)["raw"] == tiers(store)["rolled"] == 0
    assert sums(store, "hourly") == before
    for wave in done.waves:
        assert wave.sums["e2e_ns"] == wave.sums["parts_ns"] + wave.sums["unattributed_ns"]


def test_it_keeps_by_tier(store: FolderStore) -> None:
    after(store, 6.9)
    assert tiers(store)["raw"] > 0
    after(store, 7)
    assert (tiers(store)["raw"], tiers(store)["hourly"]) == (0, 8)
    after(store, 89.9)
    assert tiers(store)["hourly"] == 8
    after(store, 90)
    assert not list(store.list(""))
    assert Path(store.url).is_dir()


def test_a_dry_run_says_the_same_and_changes_nothing(store: FolderStore) -> None:
    before = {found.path: store.digest(found.path) for found in store.list("")}
    would = after(store, 8, dry_run=True)
    assert {found.path: store.digest(found.path) for found in store.list("")} == before
    does = after(store, 8)
    assert would.json()["deleted"] == does.json()["deleted"]
    assert (would.batches_added_up, does.batches_added_up) == (4, 4)


def test_applied_twice_it_does_nothing_more(store: FolderStore) -> None:
    after(store, 8)
    again = after(store, 8)
    assert (again.batches_added_up, again.json()["files_deleted"], again.raw_kept) == (0, 0, [])


def test_a_pod_that_rolls_late_is_a_wave_of_its_own(store: FolderStore, tmp_path: Path) -> None:
    after(store, 8)
    late = write_recording(tmp_path / "late", (30 * S,))
    roll(late, store, "pod-c", now_ns=LATER_UNIX_NS)
    done = after(store, 8)
    assert done.batches_added_up == 1
    hours = Counter(place_of(found.path).hour for found in store.list("aggregated"))  # type: ignore[union-attr]
    assert hours == {"2023-11-14T22": 2, "2023-11-14T23": 1}
    assert tiers(store)["raw"] == 0


def test_raw_files_stay_where_the_sums_have_been_spoilt(store: FolderStore) -> None:
    after(store, 1)
    victim = Path(store.url) / next(
        found.path for found in store.list("hourly/causes") if "T22" in found.path
    )
    victim.write_bytes(victim.read_bytes() + b"x")
    done = after(store, 8)
    assert "is not as it was written" in done.raw_kept[0]
    kept = {place_of(found.path).hour for found in store.list("raw")}  # type: ignore[union-attr]
    assert kept == {"2023-11-14T22"}


def test_raw_files_stay_where_the_sums_do_not_agree(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = hourly.TABLES["causes"].replace("sum(ns)", "sum(ns) + 1")
    monkeypatch.setitem(hourly.TABLES, "causes", broken)  # type: ignore[arg-type]
    done = after(store, 8)
    assert len(done.raw_kept) == 2
    assert "parts_ns does not add up" in done.raw_kept[0]
    assert (tiers(store)["hourly"], tiers(store)["aggregated"]) == (0, 0)
    assert tiers(store)["raw"] > 0


def test_a_raw_file_that_is_damaged_keeps_its_hour(store: FolderStore) -> None:
    victim = Path(store.url) / next(found.path for found in store.list("raw/parts"))
    victim.write_bytes(b"PAR1")
    done = after(store, 8)
    assert len(done.raw_kept) == 1
    assert victim.exists()


def test_nothing_outside_the_layout_is_touched(store: FolderStore, tmp_path: Path) -> None:
    root, outside = Path(store.url), tmp_path / "outside"
    batch = "1699999200000000000-00000001-00000001.parquet"
    mine = [
        root / "README",
        root / "raw" / "requests" / "hour=2023-11-14T22" / "pod=pod-a" / "notes.txt",
        root / "raw" / "requests" / "hour=2023-14-14T99" / "pod=pod-a" / batch,
        root / "hourly" / "other" / "hour=2023-11-14T22" / f"{'0' * 16}.parquet",
        outside / "hour=2023-11-14T22" / "pod=pod-a" / batch,
    ]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    (root / "raw" / "ranks").symlink_to(outside)  # a table that has no files here
    inside = root / "raw" / "steps" / "hour=2023-11-14T22" / "pod=pod-z"
    inside.symlink_to(outside / "hour=2023-11-14T22" / "pod=pod-a")
    after(store, 200)
    assert all(path.read_text() == "mine" for path in mine)
    assert inside.is_symlink()


def test_an_interrupted_deletion_is_finished(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.unlink, [5]

    def fails(path: str, *, dir_fd: int | None = None) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error")
        real(path, dir_fd=dir_fd)

    after(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails)
        with pytest.raises(DsagentError, match="cannot delete"):
            after(store, 8)
    assert tiers(store)["rolled"] == 4  # the manifests are the last to go
    before = sums(store, "hourly")
    after(store, 8)
    assert tiers(store)["raw"] == 0
    assert sums(store, "hourly") == before


@pytest.mark.parametrize(("name", "raw", "sums_kept"), [("7-90", 7, 90), ("3-60", 3, 60)])
def test_the_policies_that_come_with_it(name: str, raw: int, sums_kept: int) -> None:
    policy = load_policy(DEPLOY / f"{name}.toml")
    assert policy == Policy(raw * DAY_NS, sums_kept * DAY_NS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "needs a section [raw]"),
        ("raw = 7", "needs a section [raw]"),
        ("[raw]\nkeep_days = 7", "needs a section [hourly]"),
        ("[raw]\nkeep_day = 7\n[hourly]\nkeep_days = 90", "did you mean keep_days?"),
        ("[raw]\nkeep_days = 7\n[hourly]\nkeep_days = 90\n[daily]\n", "unknown key 'daily'"),
        ("[raw]\nkeep_days = 0\n[hourly]\nkeep_days = 90", "a number of days"),
        ("[raw]\nkeep_days = true\n[hourly]\nkeep_days = 90", "a number of days"),
        ("[raw]\nkeep_days = nan\n[hourly]\nkeep_days = 90", "a number of days"),
        ("[raw]\nkeep_days = '7'\n[hourly]\nkeep_days = 90", "a number of days"),
        ("[raw]\nkeep_days = 90\n[hourly]\nkeep_days = 7", "outlives"),
        ("[raw", "not TOML"),
        ("\udcff", "utf-8"),
    ],
)
def test_a_wrong_policy_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DsagentError) as caught:
        load_policy(path)
    assert says in str(caught.value)
    assert caught.value.exit_code == USAGE
