"""An hour of a busy pod's recording (made up, by a seeded generator: 100 steps a second) rolled
into a store, and what it adds up to; ten minutes beside it, to see whether memory grows.

    python tests/overhead/bench_fleet.py [--minutes 60] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import synthetic_recording
from synthetic_recording import write_recording

from dsagent.agent.fleet.folder import FolderStore
from dsagent.agent.fleet.layout import HOUR_NS
from dsagent.agent.fleet.policy import DAY_NS, Policy
from dsagent.agent.fleet.retain import retain
from dsagent.agent.fleet.roll import roll

STEPS_A_SECOND, SEGMENT_S = 100, 10
BEGUN_UNIX_NS = 1_700_000_000_000_000_000 // HOUR_NS * HOUR_NS  # a full hour
LATER_UNIX_NS = BEGUN_UNIX_NS + 5 * HOUR_NS


def make(folder: Path, minutes: int) -> dict[str, int]:
    """Segments of 10 s, as an agent closes them; within the hour. Rows by table."""
    synthetic_recording.STEPS_A_SEGMENT = STEPS_A_SECOND * SEGMENT_S
    rows = write_recording(folder, minutes * 60 * STEPS_A_SECOND)
    for path in folder.glob("polls-*.parquet"):
        table = pq.read_table(path)
        # Of the generator's clock, which runs a little slower: squeezed into the hour.
        times = pc.add(pc.divide(table["mono_ns"], 4), BEGUN_UNIX_NS)
        position = table.schema.get_field_index("unix_ns")
        moved = table.set_column(position, table.schema.field(position), times.cast(pa.int64()))
        pq.write_table(moved, path, compression="zstd")
    return rows


def work(recording: Path, store: Path) -> dict[str, Any]:
    """In this process: rolls, then adds up."""
    cpu = time.process_time()
    done = roll(recording, FolderStore(store), "busy", now_ns=LATER_UNIX_NS)
    cpu_s = time.process_time() - cpu
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    added = retain(FolderStore(store), Policy(DAY_NS, DAY_NS), now_ns=LATER_UNIX_NS)
    assert not done.left_out
    assert not added.raw_kept
    hourly = sum(found.bytes for found in FolderStore(store).list("hourly"))
    found = done.json()
    return {
        "segments": found["segments_rolled"],
        "rows": found["rows"],
        "rolled_bytes": found["bytes"],
        "seconds": found["seconds"],
        "cpu_seconds": cpu_s,
        "most_bytes": most_bytes,
        "add_up_seconds": added.seconds,
        "hourly_bytes": hourly,
    }


def measure(minutes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "made-up"
        make(recording, minutes)
        source_bytes = sum(path.stat().st_size for path in recording.glob("*.parquet"))
        # In a process of its own: its memory is what rolling takes, and nothing else.
        command = [sys.executable, __file__, "--work", str(recording), str(Path(folder) / "store")]
        found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return {"minutes": minutes, "source_bytes": source_bytes, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(*options.work)))
        return
    results = [measure(minutes) for minutes in sorted({10, options.minutes})]
    if options.json:
        print(json.dumps({"fleet": results}))
        return
    for each in results:
        print(
            f"{each['minutes']} min: {each['segments']} segments, {each['rows']:,} rows, "
            f"{each['source_bytes'] / 1e6:.1f} MB became {each['rolled_bytes'] / 1e6:.1f} MB in "
            f"{each['seconds']:.1f} s ({each['rows'] / each['seconds']:,.0f} rows/s, "
            f"{each['cpu_seconds']:.1f} s of CPU), at most {each['most_bytes'] / 1e6:.0f} MB "
            "resident"
        )
        print(
            f"        added up in {each['add_up_seconds']:.1f} s to "
            f"{each['hourly_bytes'] / 1e3:.1f} kB"
        )


if __name__ == "__main__":
    main()
