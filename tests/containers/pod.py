"""A pod of real containers, as Kubernetes would make it: one that holds the namespaces of processes
and of the network, an engine, and the sidecar with no more rights than it is given."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podman_lab import ROOT, Container, Lab

BASE = "localhost/dsagent-test-base"
IMAGE = "localhost/dsagent-test"
RIGHTS = ("BPF", "PERFMON", "SYS_PTRACE")
PORT = 8000
MODEL = "tiny-llama"
HAPPENS_S = 120.0  # what must happen on a busy machine; only a failure ever waits so long

# Run inside the engine's container. Prints the ids of the requests that it has sent, one at a time
# and two together, streamed and not.
_CLIENT = """
import json, sys, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
url, model, count, patience_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
deadline = time.monotonic() + patience_s
while True:
    try:
        urllib.request.urlopen(url + "/health", timeout=5).close()
        break
    except (urllib.error.URLError, OSError):
        if time.monotonic() > deadline:
            sys.exit("the engine does not answer")
        time.sleep(0.1)
def send(number):
    body = {"model": model, "prompt": f"request {number}", "max_tokens": 8 + number,
            "stream": number % 2 == 1}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=patience_s) as answer:
        text = answer.read().decode()
    first = text.removeprefix("data: ").split("\\n", 1)[0] if body["stream"] else text
    return json.loads(first)["id"]
with ThreadPoolExecutor(2) as pool:
    print(json.dumps([send(0), *pool.map(send, range(1, count))]))
"""


def until(
    what: str,
    found: Callable[[], Any],
    more: Callable[[], str] = str,
    patience_s: float = HAPPENS_S,
) -> Any:
    """What `found` returns, once it is neither None nor False. If that is too late, `what` was
    waited for, and `more` tells why."""
    deadline = time.monotonic() + patience_s
    while True:
        answer = found()
        if answer is not None and answer is not False:
            return answer
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what}: {more()}"
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Built:
    """That there is an image, and its sizes as scripts/image.py prints them."""

    sizes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rights:
    """What a process of the agent may do: a user, capabilities, and whether it may gain more."""

    user: str = "0:0"
    capabilities: Sequence[str] = RIGHTS
    no_new_privileges: bool = True

    def options(self, lab: Lab) -> list[str]:
        """As Kubernetes gives them; the root file system is read-only, without a tmpfs."""
        options = [
            f"--user={self.user}",
            "--cap-drop=ALL",
            "--read-only",
            "--read-only-tmpfs=false",
            f"--security-opt=seccomp={lab.seccomp}",
        ]
        options += [f"--cap-add={name}" for name in self.capabilities]
        if self.no_new_privileges:
            options.append("--security-opt=no-new-privileges")
        return options


_pods = itertools.count(1)


class Pod:
    """The containers pause, engine and sidecar; they share pids and a loopback network."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._name = f"pod{next(_pods)}"
        pause = lab.start(
            f"{self._name}-pause", BASE, "sleep", "infinity", options=["--network=none"]
        )
        self._containers = [pause]
        self.shared = [f"--pid=container:{pause.name}", f"--network=container:{pause.name}"]

    def engine(self, *options: str) -> Container:
        """The reference engine out of this very environment, mounted read-only; as uid 0 with a
        runtime's usual capabilities, unless `options` say otherwise."""
        engine = self._lab.start(
            f"{self._name}-engine",
            BASE,
            *(f"{ROOT}/.venv/bin/dsagent", "serve", "--model", MODEL),
            *("--threads", "1", "--port", str(PORT)),
            options=[*self.shared, *_mounts(), "--env=PYTHONDONTWRITEBYTECODE=1", *options],
        )
        self._containers.append(engine)
        return engine

    def sidecar(self, rights: Rights, image: str = IMAGE) -> Container:
        """The image as it is meant to be started."""
        sidecar = self._lab.start(
            f"{self._name}-sidecar", image, options=[*self.shared, *rights.options(self._lab)]
        )
        self._containers.append(sidecar)
        return sidecar

    def run(self, rights: Rights, *command: str, image: str = IMAGE) -> tuple[int, str]:
        """`dsagent COMMAND` in a container of its own: (exit code, all that it said)."""
        done = self._lab.podman(
            *("run", "--rm", *self.shared, *rights.options(self._lab), image, *command),
            check=False,
            timeout_s=HAPPENS_S,
        )
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        for container in reversed(self._containers):
            container.remove()


@contextmanager
def pod(lab: Lab) -> Iterator[Pod]:
    made = Pod(lab)
    try:
        yield made
    finally:
        made.close()


def send(engine: Container, count: int) -> list[str]:
    """Sends requests, as soon as the engine answers; their ids."""
    python = f"{ROOT}/.venv/bin/python"
    arguments = (f"http://127.0.0.1:{PORT}", MODEL, str(count), str(HAPPENS_S))
    done = engine.exec(python, "-c", _CLIENT, *arguments, timeout_s=2 * HAPPENS_S)
    return list(json.loads(done.stdout))


def explained(sidecar: Container, request_id: str) -> dict[str, Any]:
    """The account of one request, asked of the sidecar in its container, checked."""

    def ask() -> dict[str, Any] | None:
        done = sidecar.exec("dsagent", "explain", request_id, "--json", check=False)
        if done.returncode != 0:
            said.append(done.stderr)
            return None
        return dict(json.loads(done.stdout))

    said: list[str] = []
    account: dict[str, Any] = until(
        f"an account of {request_id}", ask, lambda: said[-1] + sidecar.logs()
    )
    assert account["request_id"] == request_id
    assert account["output_tokens"] > 0
    assert (
        sum(part["ns"] for part in account["parts"]) + account["unattributed_ns"]
        == (account["e2e_ns"])
    )
    return account


def watched(sidecar: Container, other_than: int = 0) -> dict[str, Any]:
    """What `dsagent status` says of the engine, once it is watched; `other_than`: not the one
    with this start time (as `start_ticks` says), which was watched before."""

    def ask() -> dict[str, Any] | None:
        for engine in status_of(sidecar).get("engines", ()):
            if engine["state"] == "watching" and engine["start_ticks"] != other_than:
                return dict(engine)
        return None

    return dict(until("the sidecar to watch the engine", ask, sidecar.logs))


def status_of(sidecar: Container) -> dict[str, Any]:
    done = sidecar.exec("dsagent", "status", "--json", check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def _mounts() -> list[str]:
    """This environment and its interpreter, at their own places."""
    mounted = [ROOT, Path("/usr")]
    interpreter = Path(sys.base_prefix)
    if not interpreter.is_relative_to("/usr"):
        mounted.append(interpreter)
    options = [f"--volume={path}:{path}:ro" for path in mounted]
    if any(path.is_relative_to("/root") for path in mounted):
        options.append("--tmpfs=/root:mode=755")  # in the base it is closed to others
    return options
