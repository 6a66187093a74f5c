"""What the sidecar changes in a pod, and what stays, with one rolling restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak_lab import ran, require_namespaces

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.ebpf


@pytest.mark.timeout(600)
def test_the_sidecar_changes_nothing_in_the_pod(tmp_path: Path) -> None:
    require_namespaces()
    out = tmp_path / "uninstall.json"
    done = ran(
        str(HERE / "uninstall_check.py"), "--restarts", "1", "--out", str(out), timeout_s=540
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
