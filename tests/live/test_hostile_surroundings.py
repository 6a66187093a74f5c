"""What is around the agent is broken, or somebody breaks the agent: it says so in a line, goes on
with what is left, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from kernel_lab import require_kernel_source
from otlp_back_ends import free_port
from shell_lab import COMMAND, PATIENCE_S, Agent, Engine, asked, dsagent

from dsagent.agent.listening import control

SLO = """
slo:
  - model: "*"
    ttft_ms: 0.001
webhook: "URL"
windows_divided_by: 3600
"""


def wait_until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


# Descriptors


def test_too_few_descriptors_are_one_line_and_too_low_a_soft_limit_is_raised() -> None:
    with Engine() as engine:
        attach = f"exec {COMMAND} attach {engine.pid} --duration 0.2 --json"
        hard = subprocess.run(
            ["sh", "-c", f"ulimit -n 20; {attach}"], capture_output=True, text=True, check=False
        )
        assert (hard.returncode, hard.stdout) == (3, "")
        assert hard.stderr == (
            "dsagent: cannot attach: only 20 files may be open at once here, and 256 are needed; "
            "allow more with `ulimit -n 1024`, or LimitNOFILE=1024 of its service\n"
        )
        soft = subprocess.run(
            ["sh", "-c", f"ulimit -Sn 20; {attach}"], capture_output=True, text=True, check=False
        )
        assert soft.returncode == 0
        assert "Too many open files" not in soft.stdout + soft.stderr


# Disks


READ_ONLY = """
set -e
mount -t tmpfs none "$1"
mkdir "$1/rec"
mount -o remount,ro "$1"
shift
exec "$@"
"""


def can_mount() -> bool:
    tried = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="no mount namespace can be had here")
@pytest.mark.parametrize("flag", ["--record", "--otlp-queue"])
def test_a_disk_that_cannot_be_written_to_is_one_line(flag: str, tmp_path: Path) -> None:
    with Engine() as engine:
        attach = [COMMAND, "attach", str(engine.pid), flag, str(tmp_path / "rec"), "--json"]
        attach += ["--otlp-endpoint", "http://127.0.0.1:1", "--duration", "1"]
        ran = subprocess.run(
            ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", str(tmp_path), *attach],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert ran.returncode in (1, 2), ran.stderr
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert "Read-only file system" in ran.stderr
    assert str(tmp_path) in ran.stderr


# Back ends


def drip(connection: socket.socket) -> None:
    for _ in range(2000):
        connection.sendall(b"H")
        time.sleep(0.05)


def silence(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


NONSENSE: dict[str, Callable[[socket.socket], None]] = {
    "silence": silence,
    "bytes": lambda connection: connection.sendall(os.urandom(4096)),
    "drip": drip,
    "endless body": endless,
    "endless head": lambda connection: connection.sendall(
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000
    ),
    "redirect": lambda connection: connection.sendall(
        b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    ),
    "length": lambda connection: connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\nx"
    ),
}


@contextmanager
def back_end(behave: Callable[[socket.socket], None]) -> Iterator[tuple[int, list[int]]]:
    """Its port, and one entry for each connection it has had."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    came: list[int] = []

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(30)
            connection.recv(65536)
            behave(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, address = server.accept()
                came.append(address[1])
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1], came
    finally:
        server.close()


def flags_for(url: str, folder: Path) -> tuple[str, ...]:
    slo = folder / "slo.yaml"
    slo.write_text(SLO.replace("URL", f"{url}/hook"))
    return (
        *("--otlp-endpoint", url, "--remote-write", f"{url}/write", "--pyroscope", url),
        *("--slo", str(slo), "--sample-rate", "100%", "--without", "kernel", "--json"),
    )


@pytest.mark.parametrize("how", sorted(NONSENSE))
def test_back_ends_that_answer_nonsense_cost_nothing_but_what_is_counted(
    how: str, tmp_path: Path
) -> None:
    with (
        back_end(NONSENSE[how]) as (port, came),
        Engine() as engine,
        Agent(engine.pid, *flags_for(f"http://127.0.0.1:{port}", tmp_path)) as agent,
    ):
        agent.attached()
        for number in range(10):
            engine.do(f"request r{number}")
        wait_until(lambda: len(came) >= 2, "connections to the back end")
        assert asked("why", "--pid", str(engine.pid))["requests"] > 0
        agent.process.terminate()
        assert agent.wait() == 0
        summary = agent.document()
    assert summary["requests"] == 10
    assert summary["uncounted_losses"] == 0
    assert summary["overhead"]["agent_pss_bytes"] < 200_000_000
    assert not [line for line in agent.err if "Traceback" in line]
    for sink in summary["sinks"]:
        if sink["name"] in ("otlp", "remote_write"):
            assert sink["failed"] + sink["dropped"] > 0, sink


def test_a_name_service_that_fails_is_a_reason_and_no_end(tmp_path: Path) -> None:
    with (
        Engine() as engine,
        Agent(engine.pid, *flags_for("http://no-such-host.invalid:4318", tmp_path)) as agent,
    ):
        agent.attached()
        engine.do("request r1")
        agent.process.terminate()
        assert agent.wait() == 0
        summary = agent.document()
    assert summary["requests"] == 1
    (otlp,) = [sink for sink in summary["sinks"] if sink["name"] == "otlp"]
    assert otlp["acknowledged"] == 0
    assert "no-such-host.invalid" in otlp["reason"]


# A neighbour


def test_a_neighbours_forged_line_is_no_agent() -> None:
    """An abstract socket's name may hold anything: its line in /proc/net/unix, too."""
    forged = "\0x\n0000000000000000: 00000002 00000000 {} 0001 01 77 @dsagent/{}"
    with Engine() as engine, Agent(engine.pid, "--without", "kernel") as agent:
        agent.attached()
        with (
            socket.socket(socket.AF_UNIX) as nonsense,
            socket.socket(socket.AF_UNIX) as plausible,
        ):
            nonsense.bind(forged.format("nonsense", 7))
            plausible.bind(forged.format("00010000", 8))
            assert {8, engine.pid} <= set(control.running())
            assert 7 not in control.running()
            assert control.owner(8) is None
            assert dsagent("explain", "--pid", "8", check=False).returncode == 2


# Killed


def programs() -> set[int]:
    listed = subprocess.run(
        ["bpftool", "--json", "prog", "show"], check=True, capture_output=True, text=True
    )
    return {program["id"] for program in json.loads(listed.stdout)}


def programs_of(pid: int) -> set[int]:
    found = set()
    for info in Path(f"/proc/{pid}/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            for line in info.read_text().splitlines():
                if line.startswith("prog_id:"):
                    found.add(int(line.split()[1]))
    return found


def below(pid: int) -> set[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in listed}


def test_a_helper_that_is_killed_ends_nothing(tmp_path: Path) -> None:
    """py-spy, which samples the engine's stacks: each time it is there, it is killed."""
    flags = flags_for("http://127.0.0.1:1", tmp_path)
    killed = 0
    with Engine() as engine, Agent(engine.pid, *flags) as agent:
        agent.attached()
        deadline = time.monotonic() + PATIENCE_S
        while killed < 3 and time.monotonic() < deadline:
            for child in below(agent.pid):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                    killed += 1
            time.sleep(0.05)
        assert killed >= 3, "no helper was there to be killed"
        engine.do("request after")
        assert asked("why", "--pid", str(engine.pid))["requests"] == 1
        agent.process.terminate()
        assert agent.wait() == 0
        summary = agent.document()
    states = {source["name"]: source["state"] for source in summary["sources"]}
    assert states["steps"] == "ok"
    assert not [line for line in agent.err if "Traceback" in line]


@pytest.mark.ebpf
def test_killed_with_everything_on_it_leaves_an_unfinished_part_and_nothing_else(
    tmp_path: Path,
) -> None:
    require_kernel_source()
    record = tmp_path / "rec"
    ports = [free_port() for _ in range(3)]
    flags = (
        *("--record", str(record), "--prometheus", f"127.0.0.1:{ports[0]}", "--tier", "full"),
        *("--otlp-receive", f"127.0.0.1:{ports[1]}"),
        *("--otlp-receive-grpc", f"127.0.0.1:{ports[2]}"),
        *("--otlp-queue", str(tmp_path / "queue"), *flags_for("http://127.0.0.1:1", tmp_path)[:-3]),
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    with Engine() as engine:
        for round_ in range(3):
            with Agent(engine.pid, *flags, env=env) as agent:
                agent.attached()
                engine.do(f"request killed{round_}")
                loaded, children = programs_of(agent.pid), below(agent.pid)
                assert loaded, "there is something to leave behind"
                agent.signal(signal.SIGKILL)
                agent.wait()
            wait_until(lambda: not loaded & programs(), "the kernel to free the programs")  # noqa: B023
            wait_until(
                lambda: not any(Path(f"/proc/{child}").exists() for child in children),  # noqa: B023
                "its helpers to end",
            )
            assert engine.pid not in control.running()
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
        assert not list(temporary.iterdir())
        kept = {path.suffix for path in record.iterdir()}
        assert kept <= {".json", ".parquet", ".part"}, kept
        # The next one counts and removes what the last ones left.
        with Agent(engine.pid, *flags, "--json", "--duration", "1") as agent:
            agent.attached()
            engine.do("request after")
            assert agent.wait() == 0
            summary = agent.document()
        assert not [path for path in record.iterdir() if path.suffix == ".part"]
        assert summary["requests"] == 1
        engine.do("request still-served")
