"""A real disk of 1 MB that is all but full, in a mount namespace of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_MOUNT = """
set -e
mount -t tmpfs -o size=1m none "$1"
head -c 1000k /dev/zero > "$1/others"
shift
exec "$@"
"""


def _can_mount() -> bool:
    tried = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


needs_a_mount = pytest.mark.skipif(not _can_mount(), reason="no mount namespace can be had here")


def on_small_disk(folder: Path) -> tuple[str, ...]:
    """The words before a command's that put the disk at `folder`, for that command alone."""
    return ("unshare", "-m", "sh", "-c", _MOUNT, "sh", str(folder))
