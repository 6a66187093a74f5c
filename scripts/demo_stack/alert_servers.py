"""Debian's Prometheus and Alertmanager, and whatever else is started as a process with a log:
on free ports, ended with the block, killed by the kernel should we be."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsagent.agent.host.children import dying_with_us

READY_S = 60.0
STOP_S = 10.0
LOOK_S = 0.05
ANSWER_S = 5.0
PROMETHEUS, ALERTMANAGER = "prometheus", "prometheus-alertmanager"
LISTENS = r'msg="Listening on" address=(\S+)'


class ServiceError(Exception):
    """A server that the demonstration needs is missing, or did not do what it should."""


def which(name: str) -> str:
    """Its path. Raises ServiceError where it is not there."""
    path = shutil.which(name)
    if path is None:
        raise ServiceError(f"no {name} here: as root, bash scripts/setup.sh installs it")
    return path


def require_servers() -> None:
    """Raises ServiceError where one of them is missing."""
    for name in (PROMETHEUS, ALERTMANAGER):
        which(name)


class Service:
    """One process; its output goes to a file."""

    def __init__(self, name: str, argv: Sequence[str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                dying_with_us(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C is for us, who then end it in order
            )
        self.pid = self._process.pid

    def wait_for(self, pattern: str, timeout_s: float = READY_S) -> re.Match[str]:
        """The first line of its output that matches. Raises ServiceError."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            text = self._log.read_text(errors="replace")
            if found := re.search(pattern, text):
                return found
            if self._process.poll() is not None:
                raise ServiceError(f"{self.name} ended by itself:\n{text[-2000:]}")
            if time.monotonic() > deadline_s:
                raise ServiceError(f"{self.name} never said {pattern!r}:\n{text[-2000:]}")
            time.sleep(LOOK_S)

    def kill(self) -> None:
        """At once, without a chance to say good-bye."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


class Servers:
    """A Prometheus with rules, and the Alertmanager that it tells."""

    def __init__(self, url: str, alertmanager_url: str) -> None:
        self.url = url
        self.alertmanager_url = alertmanager_url

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        found: list[dict[str, Any]] = _fetch_json(url)["data"]["result"]
        return found

    def wait_for(self, expr: str, what: str, timeout_s: float) -> None:
        """Until a query finds something. Raises ServiceError."""
        deadline_s = time.monotonic() + timeout_s
        while not self.query(expr):
            if time.monotonic() > deadline_s:
                raise ServiceError(f"{what}: not within {timeout_s:.0f} s")
            time.sleep(LOOK_S * 4)

    def active_alerts(self) -> list[dict[str, str]]:
        """The labels of what Alertmanager holds to be firing."""
        alerts = _fetch_json(f"{self.alertmanager_url}/api/v2/alerts?active=true")
        return [alert["labels"] for alert in alerts]

    def rounds(self) -> int:
        """How often the group of rules that was evaluated least often was evaluated."""
        text = _fetch(f"{self.url}/metrics").decode()
        found = re.findall(r"^prometheus_rule_group_iterations_total\{.*\} (\S+)$", text, re.M)
        return min((int(float(count)) for count in found), default=0)

    def let_rounds_pass(self, count: int, timeout_s: float = 120.0) -> None:
        """Until every rule has been evaluated so often again, by Prometheus' own count."""
        wanted = self.rounds() + count
        deadline_s = time.monotonic() + timeout_s
        while (now := self.rounds()) < wanted:
            if time.monotonic() > deadline_s:
                raise ServiceError(f"{now} of {wanted} evaluations after {timeout_s:.0f} s")
            time.sleep(LOOK_S * 4)


@contextlib.contextmanager
def alert_servers(
    folder: Path, *, rules: Path, scraped: str, hook_url: str, scrape_s: int = 1
) -> Iterator[Servers]:
    """Both, started from scratch: `scraped` (HOST:PORT) is looked at every `scrape_s` seconds,
    alerts go to `hook_url`."""
    with contextlib.ExitStack() as stack:
        alertmanager = _started(
            stack,
            folder,
            ALERTMANAGER,
            _alertmanager_config(hook_url),
            (f"--storage.path={folder}/alertmanager", "--cluster.listen-address="),
        )
        alertmanager_address = alertmanager.wait_for(LISTENS).group(1)
        prometheus = _started(
            stack,
            folder,
            PROMETHEUS,
            _prometheus_config(rules, scraped, alertmanager_address, scrape_s),
            (f"--storage.tsdb.path={folder}/prometheus",),
        )
        address = prometheus.wait_for(LISTENS).group(1)
        prometheus.wait_for("Server is ready")
        yield Servers(f"http://{address}", f"http://{alertmanager_address}")


def _started(
    stack: contextlib.ExitStack,
    folder: Path,
    program: str,
    config: Mapping[str, Any],
    flags: Sequence[str],
) -> Service:
    path = folder / f"{program}.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    argv = [which(program), f"--config.file={path}", "--web.listen-address=127.0.0.1:0", *flags]
    service = Service(program, argv, folder)
    stack.callback(service.stop)
    return service


def _alertmanager_config(hook_url: str) -> dict[str, Any]:
    """Every alert for itself, at once, and its end too; repeated, since a new cause among its
    annotations alone is no reason to tell it again."""
    route = {
        "receiver": "hook",
        "group_by": ["..."],
        "group_wait": "0s",
        "group_interval": "1s",
        "repeat_interval": "15s",
    }
    hook = {"url": hook_url, "send_resolved": True}
    return {"route": route, "receivers": [{"name": "hook", "webhook_configs": [hook]}]}


def _prometheus_config(
    rules: Path, scraped: str, alertmanager: str, scrape_s: int
) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": f"{scrape_s}s", "evaluation_interval": f"{scrape_s}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "dsagent", "static_configs": [{"targets": [scraped]}]}],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as response:
            body: bytes = response.read()
            return body
    except OSError as error:
        raise ServiceError(f"{url}: {error}") from error


def _fetch_json(url: str) -> Any:
    return json.loads(_fetch(url))
