"""Real vLLM for the tests: environments on top of .venv-vllm, servers, and calls to them."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
VLLM = Path(os.environ.get("DSAGENT_VLLM_ENV", ROOT / ".venv-vllm"))
MODELS = ROOT / "build" / "vllm" / "models"
LOCK = Path("/tmp/vllm.lock")  # two servers at once would not get to work on two cores
START_S = 420.0
SERVED_AS = "tiny"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
}


_held: list[IO[str]] = []  # the lock, while this process has it


@contextlib.contextmanager
def one_server_at_a_time() -> Iterator[None]:
    """Whoever starts servers on this machine waits for his turn; who has it may start a second."""
    if not _held and not os.environ.get("DSAGENT_VLLM_LOCKED"):  # by who started us
        _held.append(LOCK.open("w"))
        fcntl.flock(_held[0], fcntl.LOCK_EX)
        try:
            yield
        finally:
            _held.pop().close()
        return
    yield


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def site_packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python3*/site-packages"))


@dataclass(frozen=True, slots=True)
class Overlay:
    """An environment of its own that sees all of .venv-vllm and leaves it as it is."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> Overlay:
        python = VLLM / "bin" / "python"
        subprocess.run([python, "-m", "venv", "--without-pip", path], check=True)
        below = site_packages(path) / "below.pth"
        below.write_text(f"{site_packages(VLLM)}\n")
        script = (VLLM / "bin" / "vllm").read_text().split("\n", 1)[1]
        command = path / "bin" / "vllm"
        command.write_text(f"#!{path}/bin/python\n{script}")
        command.chmod(0o755)
        return cls(path)

    def pip(self, *arguments: str) -> str:
        """The output of .venv-vllm's pip, at work here."""
        ran = subprocess.run(
            [self.path / "bin" / "python", "-m", "pip", "--no-input", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


def wheel_of_dsagent(folder: Path) -> Path:
    """dsagent as it would be published, built from a copy of the tree."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("engine", "instrumentation", "agent", "dashboards"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, capture_output=True)
    return next(folder.glob("dsagent-*.whl"))


class Server:
    """A `vllm serve` in a process group of its own."""

    def __init__(
        self,
        overlay: Path,
        model: str,
        folder: Path,
        *flags: str,
        port: int | None = None,
        under: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`port`: a free one without it. `under`: a command that starts it."""
        self.port = free_port() if port is None else port
        self.log = folder / "vllm.log"
        self._output: IO[bytes] = self.log.open("wb")
        self.process = subprocess.Popen(
            [
                *under,
                *(str(overlay / "bin" / "vllm"), "serve", str(MODELS / model)),
                *("--host", "127.0.0.1", "--port", str(self.port)),
                *("--served-model-name", SERVED_AS, "--enforce-eager"),
                *("--max-model-len", "1024", "--max-num-seqs", "16", *flags),
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # A group, to be stopped and ended at once, but in our session: Linux weighs a session
            # against another (autogroups), and one was seen to leave a hog of ours without its CPU.
            process_group=0,
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_up(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process.poll() is None, self.tail()
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200:
                    return
            time.sleep(0.25)
        raise AssertionError(f"not up after {START_S} s:\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def get(self, path: str) -> tuple[int, str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as reply:
            return reply.status, reply.read().decode()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """The reply's JSON document; with `status` in it where it is not 200."""
        connection = self.connect()
        try:
            given = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", path, json.dumps({"model": SERVED_AS, **body}), given)
            reply = connection.getresponse()
            document = json.loads(reply.read() or b"{}")
            return document if reply.status == 200 else {"status": reply.status, **document}
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """vLLM's own: name → sum over the labels."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            match = re.fullmatch(r"(vllm:\w+)(?:\{.*\})? (\S+)", line)
            if match:
                totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        return totals

    def stop(self) -> None:
        """SIGTERM, then what is left of its group by SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()
