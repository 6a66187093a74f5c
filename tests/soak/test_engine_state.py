"""What watching could leave behind is seen where it is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_state import names_in, state_of, tree

CHILD = """
import mmap, os, sys, threading
print("ready", flush=True)
sys.stdin.readline()
file = os.memfd_create("left-behind")
os.ftruncate(file, 4096)
mapped = mmap.mmap(file, 4096)
threading.Thread(target=sys.stdin.read, daemon=True).start()
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
open(os.path.join(sys.argv[1], "new"), "w").close()
print("done", flush=True)
threading.Event().wait()
"""


def test_what_is_left_in_a_process_is_told(tmp_path: Path) -> None:
    working, temporary = tmp_path / "working", tmp_path / "temporary"
    working.mkdir()
    temporary.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(temporary)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            before = state_of(child.pid, working, temporary, tmp_path)
            assert before == state_of(child.pid, working, temporary, tmp_path)
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n"
            after = state_of(child.pid, working, temporary, tmp_path)
        finally:
            child.kill()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        *("descriptors", "mapped files", "threads", "niceness, policy", "its temporary files"),
    }


@pytest.mark.parametrize("change", ["content", "mode", "name"])
def test_a_tree_tells_each_change(change: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("one")
    before = tree(tmp_path), names_in(tmp_path)
    if change == "content":
        file.write_text("two")
    elif change == "mode":
        file.chmod(0o600 if file.stat().st_mode & 0o77 else 0o644)
    else:
        file.rename(tmp_path / "other")
    assert tree(tmp_path) != before[0]
    assert (names_in(tmp_path) != before[1]) == (change == "name")
