"""Losses are counted, nothing stays behind, and what cannot run says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from kernel_lab import Child, Watch, measured, require_kernel_source, within

from dsagent.agent.errors import SourceUnavailable
from dsagent.agent.facts import Kind, Target
from dsagent.agent.host.privileges import BPF_OBJECT
from dsagent.agent.probes import OBJECTS
from dsagent.agent.sources.bpf.libbpf import BpfObject, Library
from dsagent.agent.sources.kernel import KernelSource

pytestmark = pytest.mark.ebpf

NAPS = """
say(ready=True); hear()
start = now()
for _ in range(211):
    nap(10)
say(start=start, end=now()); hear()
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    require_kernel_source()


def test_a_full_ring_is_counted_and_what_came_through_is_whole() -> None:
    with Child(NAPS) as child:
        child.hear()
        with Watch(child.pid, exact_ns=1, ring_bytes=4096) as watch:
            child.say()
            told = child.hear()  # nobody reads meanwhile: 64 facts fit
            watch.until(told["end"])
            dropped = watch.source.status().dropped
            assert dropped > 0
            received = int(watch.of(Kind.OFF_OTHER, tid=child.pid)["count"].sum())
            assert 0 < received < 211
            assert received + dropped >= 211
            child.say()
            child.process.wait()
            watch.until(time.monotonic_ns())  # it goes on after the loss


def test_without_the_new_argument_of_sched_switch_the_same_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 5.18 the state is read from the task."""
    monkeypatch.setattr(Library, "arguments_of", lambda self, tracepoint: 3)
    watch, told = measured(NAPS.replace("nap(10)", "nap(1000)"), exact_ns=1)
    naps = within(watch.of(Kind.OFF_OTHER, tid=told["pid"]), told["start"], told["end"])
    assert len(naps) >= 211


def test_nothing_stays_in_the_kernel_after_stop_or_sigkill() -> None:
    agent = textwrap.dedent("""
        import json, os, sys
        from dsagent.agent.facts import Target
        from dsagent.agent.sources.kernel import KernelSource
        source = KernelSource(Target(os.getppid(), 0, 0, "x", (), "reference"), {})
        source.start()
        missing = list(source.loaded.missing)
        print(json.dumps({"pid": os.getpid(), "missing": missing}), flush=True)
        if sys.stdin.readline().strip() == "stop":
            source.stop()
            source.stop()
            print(json.dumps({"stopped": True}), flush=True)
        sys.stdin.readline()
        """)
    for how in ("stop", "kill"):
        with subprocess.Popen(
            [sys.executable, "-c", agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            said = json.loads(process.stdout.readline())
            assert said["pid"] == process.pid
            loaded = _programs_of(process.pid)
            assert len(loaded) == sum(map(len, OBJECTS.values())) - len(said["missing"])
            assert loaded <= _programs()
            if how == "stop":
                process.stdin.write("stop\n")
                process.stdin.flush()
                process.stdout.readline()
                assert not _programs_of(process.pid)
                _wait_until_gone(loaded)
            process.kill()
            process.wait()
            _wait_until_gone(loaded)


def _programs_of(pid: int) -> set[int]:
    found = set()
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        for line in info.read_text().splitlines():
            if line.startswith("prog_id:"):
                found.add(int(line.split()[1]))
    return found


def _programs() -> set[int]:
    listed = subprocess.run(
        ["bpftool", "--json", "prog", "show"], check=True, capture_output=True, text=True
    )
    return {program["id"] for program in json.loads(listed.stdout)}


def _wait_until_gone(programs: set[int]) -> None:
    """The kernel frees programs a moment after their last user."""
    deadline = time.monotonic() + 10
    while programs & _programs():
        assert time.monotonic() < deadline, "BPF programs stayed in the kernel"
        time.sleep(0.02)


def test_from_within_a_pid_namespace_pids_are_its_own() -> None:
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from kernel_lab import *
        body = '''
        say(ready=True); hear()
        start = now()
        child = os.fork()
        for _ in range(7): nap(20_000)
        if child == 0: os._exit(0)
        os.waitpid(child, 0)
        say(start=start, end=now(), child=child); hear()
        '''.replace("\\n        ", "\\n")
        with Child(body) as child:
            child.hear()
            with Watch(child.pid) as watch:
                child.say()
                told = child.hear()
                watch.until(told["end"])
        result = {{}}
        for tid in (child.pid, told["child"]):
            naps = watch.of(Kind.OFF_OTHER, tid=tid, least_ns=1_000_000)
            naps = within(naps, told["start"], told["end"])
            result[tid] = [len(naps), sorted(set(naps["pid"].tolist()))]
        print(json.dumps(dict(result=result, ns=os.readlink("/proc/self/ns/pid"))))
        """)
    unshared = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run(
        [*unshared, sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode != 0 and "unshare" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ns"] != os.readlink("/proc/self/ns/pid")
    assert len(said["result"]) == 2
    for tid, (naps, pids) in said["result"].items():
        assert int(tid) < 100  # a young namespace
        assert naps in (7, 8)  # one more where the parent waits for its child
        assert pids == [int(tid)]


def test_a_missing_object_says_what_to_do(tmp_path: Path) -> None:
    source = KernelSource(_target(), {}, object_path=tmp_path / "sched.bpf.o")
    with pytest.raises(SourceUnavailable, match="make bpf"):
        source.start()
    assert source.status().state == "unavailable"
    source.stop()


def test_a_broken_object_is_refused_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "sched.bpf.o"
    broken.write_bytes(BPF_OBJECT.read_bytes()[:4096])
    source = KernelSource(_target(), {}, object_path=broken)
    with pytest.raises(SourceUnavailable, match="cannot be opened") as caught:
        source.start()
    assert "\n" not in str(caught.value)


def test_an_object_of_another_version_is_refused() -> None:
    with (
        BpfObject(Library(), BPF_OBJECT) as loaded,
        pytest.raises(SourceUnavailable, match="rebuild"),
    ):
        loaded.set_constants(b"12345678")


def test_without_capabilities_the_reason_is_one_line() -> None:
    script = textwrap.dedent("""
        import ctypes, os, struct
        from dsagent.agent.errors import SourceUnavailable
        from dsagent.agent.facts import Target
        from dsagent.agent.sources.kernel import KernelSource
        none = struct.pack("6I", *[0] * 6)  # effective, permitted, inheritable, twice 32 bits
        assert ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), none) == 0
        try:
            KernelSource(Target(os.getpid(), 0, 0, "x", (), "reference"), {}).start()
        except SourceUnavailable as reason:
            print(reason)
        """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "not permitted, CAP_BPF and CAP_PERFMON missing: run as root or grant them"
    )


def _target() -> Target:
    return Target(os.getpid(), 0, 0, "self", (), "reference")
