"""A mapped file is opened, and nothing else that its process could put in the way."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsagent.agent.sources.outside.capture import Place
from dsagent.agent.sources.outside.mapped import Mapped
from dsagent.agent.sources.outside.markers import find_function

PID = 4242
THREE = "-all,+bpf,+perfmon,+sys_ptrace"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a process of a made-up /proc, in which map_files may not be opened."""
    inside = tmp_path / "inside"
    inside.mkdir()
    folder = tmp_path / "proc" / str(PID)
    folder.mkdir(parents=True)
    (folder / "root").symlink_to(inside)
    return inside


def opened(root: Path, path: str, inode: int, monkeypatch: pytest.MonkeyPatch) -> bytes:
    real = os.open

    def no_map_files(name: object, *flags: int) -> int:
        if "map_files" in str(name):
            raise PermissionError("CAP_CHECKPOINT_RESTORE")
        return real(name, *flags)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_map_files)
    fd = Mapped(PID, "0-1", inode, path).open(root.parent / "proc")
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_the_file_is_read_inside_the_processs_root(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "libllama.so").write_bytes(b"ELF")
    inode = (root / "libllama.so").stat().st_ino
    assert opened(root, "/libllama.so", inode, monkeypatch) == b"ELF"


def test_a_link_out_of_the_root_stays_inside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = root.parent / "secret"
    outside.write_bytes(b"secret")
    (root / "up").symlink_to("../secret")
    (root / "absolute").symlink_to(outside)
    for path in ("/up", "/absolute", "/../secret"):
        with pytest.raises(OSError):
            opened(root, path, outside.stat().st_ino, monkeypatch)


def test_another_file_at_its_path_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "libllama.so").write_bytes(b"another")
    inode = (root / "libllama.so").stat().st_ino
    with pytest.raises(FileNotFoundError, match="another file"):
        opened(root, "/libllama.so", inode + 1, monkeypatch)


def test_a_pipe_or_a_device_is_never_opened_for_reading(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(FileNotFoundError, match="not a regular file"):
        opened(root, "/pipe", (root / "pipe").stat().st_ino, monkeypatch)


def test_nothing_stays_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for path in ("/none", "/", "/../..", "/x\x7f"):
        with pytest.raises(OSError):
            opened(root, path, 1, monkeypatch)
    assert len(set(os.listdir("/proc/self/fd"))) == len(before)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="drops capabilities")
def test_three_capabilities_are_enough_for_a_process_of_another_user() -> None:
    look = (
        "import sys; from dsagent.agent.sources.outside.markers import find_function; "
        "place = find_function(int(sys.argv[1]), 'libc.so', 'sched_yield'); "
        "print(place.offset if place else None)"
    )
    with subprocess.Popen(
        ["setpriv", "--reuid=65534", "--clear-groups", "--", "sleep", "100"]
    ) as other:
        try:
            give_up_s = time.monotonic() + 30
            while (mine := _of_sleep(other.pid)) is None:  # until its loader has mapped it
                assert other.poll() is None and time.monotonic() < give_up_s
            drop = ["setpriv", f"--bounding-set={THREE}", "--inh-caps=-all", "--no-new-privs"]
            seen = subprocess.run(
                [*drop, "--", sys.executable, "-c", look, str(other.pid)],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
        finally:
            other.kill()
    assert seen.stdout.strip() == str(mine.offset)


def _of_sleep(pid: int) -> Place | None:
    if Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
        return None
    return find_function(pid, "libc.so", "sched_yield")


def test_a_place_is_a_regular_file_of_this_very_process() -> None:
    place = find_function(os.getpid(), "libc.so", "sched_yield")
    assert place is not None
    with place.file.path_of_it() as path:
        assert stat.S_ISREG(os.stat(path).st_mode)
