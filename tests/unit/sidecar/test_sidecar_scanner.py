"""Engines are found in a made /proc: what is looked at, how often, and what is left alone."""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from dsagent.agent.host import procfs
from dsagent.agent.host.target import Rings
from dsagent.agent.sidecar.backoff import SECOND_NS
from dsagent.agent.sidecar.scanner import KNOWN, Found, Scanner

OWN, S = 900, SECOND_NS
RINGS = Rings(frozenset({7}))
VLLM_RINGS = Rings(frozenset({7}), vllm=True)


class Machine:
    """Processes that come and go; `rings`, `listens` and `barred` are what they have."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.rings: set[int] = set()
        self.listening: set[int] = set()
        self.starting: set[int] = set()
        self.barred: set[int] = set()
        self.asked: list[int] = []
        self.kind_of_rings = RINGS
        self.start(OWN, "dsagent sidecar")

    def start(
        self, pid: int, command: str, parent: int = 1, ticks: int = 5, comm: str = "a b) "
    ) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 17, str(ticks), "0", "10", *["0"] * 10]
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))

    def rings_of(self, pid: int) -> Rings:
        self.asked.append(pid)
        if pid in self.barred:
            raise PermissionError
        return self.kind_of_rings if pid in self.rings else Rings()

    def scanner(self, match: str | None = None) -> Scanner:
        return Scanner(
            None if match is None else re.compile(match),
            proc=self.proc,
            rings_of=self.rings_of,
            listens=self.listening.__contains__,
            starts=lambda pid, _below: pid in self.starting,
            own_pid=OWN,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_process_with_rings_is_an_engine_whatever_its_name(machine: Machine) -> None:
    machine.start(10, "anything")
    machine.rings.add(10)
    assert machine.scanner().look(0, ()) == [Found(10, "rings")]


def test_of_others_only_known_servers_that_listen(machine: Machine) -> None:
    machine.start(10, "nginx -g daemon")
    machine.start(11, "llama-server -m model.gguf")
    machine.start(12, "/usr/bin/python3 /usr/local/bin/vllm serve some/model")
    machine.listening |= {10, 11}
    assert machine.scanner().look(0, ()) == [Found(11, "outside")]
    machine.listening.add(12)
    machine.starting.add(12)  # it may still get its rings
    scanner = machine.scanner()
    assert scanner.look(0, ()) == [Found(11, "outside")]
    machine.starting.clear()
    assert scanner.look(S, (11,)) == [Found(12, "outside")]


@pytest.mark.parametrize("match", [None, "vllm serve"])
def test_a_vllm_server_is_found_when_its_core_has_a_ring(
    machine: Machine, match: str | None
) -> None:
    """Which is before its front end has one, and before it serves."""
    machine.kind_of_rings = VLLM_RINGS
    machine.start(10, "sh -c vllm serve some/model")
    machine.start(11, "python3 vllm serve some/model", parent=10, comm="vllm")
    machine.start(12, "VLLM::EngineCore", parent=11, comm="VLLM::EngineCor")
    scanner = machine.scanner(match)  # loading a large model, it is no longer young
    assert scanner.look(0, ()) == []
    machine.rings.add(12)
    found = {each.pid for each in scanner.look(S, ())}
    assert 11 in found
    assert 10 not in found  # the shell that started it


def test_what_outlives_a_vllm_server_is_no_engine(machine: Machine) -> None:
    machine.kind_of_rings = VLLM_RINGS
    machine.start(11, "python3 vllm serve some/model", comm="vllm")
    machine.start(12, "VLLM::EngineCore", parent=11, comm="VLLM::EngineCor")
    machine.start(13, "VLLM::Worker", parent=12, comm="VLLM::Worker")
    machine.rings |= {11, 12, 13}
    found = machine.scanner().look(0, ())
    assert found == [Found(pid, "rings") for pid in (11, 12, 13)]  # all of one server
    machine.end(12)
    machine.start(13, "VLLM::Worker", comm="VLLM::Worker")
    assert machine.scanner().look(0, (11,)) == []
    machine.end(11)
    assert machine.scanner().look(0, ()) == []


def test_a_vllm_that_is_the_first_process_of_its_container_has_no_orphans(
    machine: Machine,
) -> None:
    """As `kubectl debug --target` sees it, in the engine's own pid namespace."""
    machine.kind_of_rings = VLLM_RINGS
    machine.start(1, "python3 vllm serve some/model", parent=0, comm="vllm")
    machine.start(12, "VLLM::EngineCore", comm="VLLM::EngineCor")
    for pid in (1, 12):
        (machine.proc / str(pid) / "exe").symlink_to(sys.executable)
    machine.rings.add(12)
    assert {each.pid for each in machine.scanner().look(0, ())} == {1, 12}
    machine.start(1, "python3 supervisord", parent=0, comm="supervisord")
    assert machine.scanner().look(0, ()) == []
    machine.start(1, "sh -c vllm serve some/model", parent=0, comm="sh")
    (machine.proc / "1" / "exe").unlink()
    (machine.proc / "1" / "exe").symlink_to("/bin/sh")
    assert machine.scanner().look(0, ()) == []


def test_match_is_the_only_rule_where_it_is_given(machine: Machine) -> None:
    machine.start(10, "my-server --port 1")
    machine.start(11, "python engine.py")
    machine.listening.add(10)
    machine.rings.add(11)
    assert machine.scanner("my-server").look(0, ()) == [Found(10, "outside")]
    assert machine.scanner(r"engine\.py$").look(0, ()) == [Found(11, "rings")]


def test_what_belongs_to_a_watched_engine_or_to_us_is_left_alone(machine: Machine) -> None:
    machine.start(10, "engine")
    machine.start(11, "fork of it", parent=10)
    machine.start(12, "fork of that", parent=11)
    machine.start(13, "child of ours", parent=OWN)
    machine.rings |= {10, 11, 12, 13, OWN}
    assert machine.scanner().look(0, (10,)) == []
    assert machine.asked == []
    # Without its root a fork stands for itself.
    machine.end(10)
    machine.start(11, "fork of it", parent=1)
    assert [each.pid for each in machine.scanner().look(0, ())] == [11, 12]


def test_others_are_looked_at_ever_more_rarely_and_likely_ones_each_time(machine: Machine) -> None:
    machine.start(10, "bash")
    machine.start(11, "vllm serve model")
    scanner = machine.scanner()
    for second in range(64):
        scanner.look(second * S, ())
    assert machine.asked.count(11) == 64
    assert machine.asked.count(10) == 8  # after 0, 1, 3, 7, 15, 31, 47, 63 s
    machine.rings.add(10)  # however late they come
    found = [second for second in range(64, 81) if scanner.look(second * S, (11,))]
    assert found[0] <= 63 + 16


def test_a_young_process_is_looked_at_each_time_whatever_its_name(machine: Machine) -> None:
    """An engine in a program of one's own, which imports for a minute."""
    just_now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 100)  # in clock ticks
    machine.start(10, "python my_engine.py", ticks=just_now)
    machine.start(11, "python as_old_as_the_machine.py")
    scanner = machine.scanner()
    for second in range(6):
        assert scanner.look(second * S, ()) == []
    assert machine.asked.count(10) == 6
    assert machine.asked.count(11) == 3  # after 0, 1 and 3 s
    machine.rings.add(10)
    assert scanner.look(6 * S, ()) == [Found(10, "rings")]


def test_it_says_when_it_is_worth_looking_again_soon(machine: Machine) -> None:
    scanner = machine.scanner()
    machine.start(10, "anything")
    scanner.look(0, ())
    assert not scanner.expects
    machine.start(11, "vllm serve some/model")
    machine.starting.add(11)
    scanner.look(S, ())
    assert scanner.expects
    machine.rings.add(11)
    assert scanner.look(2 * S, ()) == [Found(11, "rings")]
    assert not scanner.expects


def test_a_reused_pid_is_a_new_process(machine: Machine) -> None:
    machine.start(10, "bash")
    scanner = machine.scanner()
    for second in range(20):
        scanner.look(second * S, ())
    machine.end(10)
    scanner.look(20 * S, ())
    machine.start(10, "engine", ticks=6)
    machine.rings.add(10)
    assert scanner.look(21 * S, ()) == [Found(10, "rings")]


def test_who_may_not_be_looked_into_is_counted_and_tried_again(machine: Machine) -> None:
    machine.start(10, "vllm serve model")
    machine.rings.add(10)
    machine.barred.add(10)
    scanner = machine.scanner()
    assert scanner.look(0, ()) == []
    assert scanner.status.not_permitted == 1
    machine.barred.clear()
    assert scanner.look(2 * S, ()) == [Found(10, "rings")]
    assert scanner.status.not_permitted == 0


def test_other_settings_look_at_everything_anew(machine: Machine) -> None:
    machine.start(10, "mine")
    machine.listening.add(10)
    scanner = machine.scanner()
    for second in range(10):
        assert scanner.look(second * S, ()) == []
    scanner.match = re.compile("mine")
    scanner.forget()
    assert scanner.look(10 * S, ()) == [Found(10, "outside")]


@pytest.mark.parametrize(
    ("command", "is_known"),
    [
        ("vllm serve some/model --port 8000", True),
        ("/opt/venv/bin/python3 /opt/venv/bin/vllm serve x", True),
        ("python3 -m vllm.entrypoints.openai.api_server --model x", True),
        ("python -m sglang.launch_server --model x", True),
        ("/app/llama-server -m x.gguf", True),
        ("ollama serve", True),
        ("tritonserver --model-repository=/models", True),
        ("python -m dsagent.instrumentation.reference --model x", True),
        ("vim vllm-serve.md", False),
        ("nginx: master process", False),
        ("grep llama-servers", False),
    ],
)
def test_servers_known_by_name(command: str, is_known: bool) -> None:
    assert (KNOWN.search(command) is not None) is is_known


@pytest.mark.parametrize("shape", ["beside each other", "each below the one before"])
def test_a_look_costs_the_same_for_each_process_however_many_look_like_servers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """The whole of /proc was read for each: hundreds of `vllm serve` took a CPU for themselves."""
    monkeypatch.setattr("dsagent.agent.sidecar.scanner.MOST_BELOW", 4)
    many = 60
    just_now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e9 / procfs.CLOCK_TICK_NS)
    for pid in range(1000, 1000 + many):
        parent = 1 if shape == "beside each other" else pid - 1
        command = "python3 vllm serve some/model " + "x " * 100_000
        machine.start(pid, command, parent, ticks=just_now)
    read_bytes: list[int] = []
    really = procfs.read_bytes

    def read(path: Path, *most_bytes: int) -> bytes:
        data = really(path, *most_bytes)
        read_bytes.append(len(data))
        return data

    monkeypatch.setattr(procfs, "read_bytes", read)
    scanner = Scanner(proc=machine.proc, rings_of=machine.rings_of, own_pid=OWN)
    scanner.look(0, ())
    assert scanner.expects
    assert len(read_bytes) < 16 * many
    assert max(read_bytes) < 100_000  # nor is a long command line read to its end


def test_what_comes_from_outside_the_namespace_belongs_to_nobody(machine: Machine) -> None:
    """The parent of other containers' first processes, and of our own, is 0 here."""
    machine.start(10, "anything", parent=0)
    machine.start(OWN, "dsagent sidecar", parent=0)
    machine.rings.add(10)
    assert machine.scanner().look(0, ()) == [Found(10, "rings")]
    scanner = Scanner(proc=machine.proc, rings_of=machine.rings_of, own_pid=0)
    assert scanner.look(0, ()) == [Found(10, "rings")]
