"""Requests to a block device of a known number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kernel_lab import Child, Watch, require_kernel_source, within

from dsagent.agent.facts import Kind
from dsagent.agent.sources.bpf.libbpf import Library

pytestmark = pytest.mark.ebpf


@pytest.mark.parametrize("older", [False, True], ids=["this kernel", "older kernels"])
def test_47_direct_reads_are_47_requests(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_kernel_source()
    if older:  # before Linux 6.5 requests are known from their issue on
        arguments_of = Library.arguments_of
        monkeypatch.setattr(
            Library,
            "arguments_of",
            lambda self, name: None if name.startswith("block_io_") else arguments_of(self, name),
        )
    body = f"""
path = {str(tmp_path / "data")!r}
with open(path, "wb") as file:
    file.write(os.urandom(47 * 4096)); file.flush(); os.fsync(file.fileno())
memory = mmap.mmap(-1, 4096)
try:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
except OSError as error:
    fd = -1
say(ready=True, fd=fd); hear()
start = now()
for n in range(47):
    os.preadv(fd, [memory], n * 4096)
say(start=start, end=now()); hear()
"""
    with Child(body) as child:
        if child.hear()["fd"] < 0:
            pytest.skip("the file system has no direct reads")
        with Watch(child.pid) as watch:
            child.say()
            told = child.hear()
            watch.until(told["end"])
    requests = within(watch.of(Kind.BLOCK_IO, tid=child.pid), told["start"], told["end"])
    assert len(requests) == 47
    assert np.all(requests["ns"] > 0)
    # One after the other, so no two overlap.
    order = np.argsort(requests["start_ns"])
    assert np.all(requests["end_ns"][order][:-1] <= requests["start_ns"][order][1:])
