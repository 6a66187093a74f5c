"""What the sidecar changes in a pod: nothing that stays. A real engine without it, with it, and
after it; then two engines through three rolling restarts, with the real Prometheus, Alertmanager
and the generated rules looking on.

    .venv/bin/python tests/soak/uninstall_check.py

Prints a table and ends with 1 where something differs. Takes root, Prometheus and Alertmanager.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for name in ("soak", "fixtures", "accuracy", "live", "live/shell", "../scripts/demo_stack"):
    folder = str((ROOT / "tests" / name).resolve())
    if folder not in sys.path:
        sys.path.append(folder)

import soak_gauges as gauges  # noqa: E402
import soak_page  # noqa: E402
from alert_hook import WebHook  # noqa: E402
from alert_servers import alert_servers, require_servers  # noqa: E402
from engine_state import State, state_of  # noqa: E402
from load import new_request, text  # noqa: E402
from sidecar_lab import until  # noqa: E402
from soak_crowd import Asked, Crowd, Manner, ask  # noqa: E402
from soak_pod import Pod, Server, alone, own_ports  # noqa: E402

from dsagent.agent.metrics.cardinality import MAX_SERIES, estimate  # noqa: E402

PORTS = own_ports()
ROLLING_RESTARTS = 3
REQUESTS_BETWEEN = 15  # answered by each engine between two restarts
SECONDS_LIMIT = 600.0  # for what must happen; only a failure ever waits so long
COMMAND = str(Path(sys.executable).with_name("dsagent"))

SLO = """
slo:
  - model: "*"
    ttft_ms: 20000
    e2e_ms: 60000
    objective: 99
    errors_objective: 99
webhook: "{hook}"
windows_divided_by: 10
"""
SETTINGS = """
match = '--port ({ports})( |$)'
listen = "127.0.0.1:0"
slo = "{folder}/slo.yaml"
record = "{folder}/record"
"""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    without: str
    with_it: str
    held: bool


def same(name: str, without: str, with_it: str) -> Check:
    return Check(name, without, with_it, without == with_it)


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen of an engine from outside while it serves: the lines that it says, its health as
    a probe of a pod asks for it, the names of its own metrics, and the fates of requests."""

    lines: tuple[str, ...]
    health: tuple[str, ...]
    metrics: tuple[str, ...]
    fates: tuple[str, ...]


def seen_under_load(server: Server, seed: int) -> Seen:
    """The same requests each time: some whole, some left, one wrong, one for what is not there."""
    dice = random.Random(seed)
    before = len(server.lines)
    fates: list[str] = []
    health: list[str] = []
    for number in range(12):
        manner = Manner(leaves_after=2) if number % 4 == 3 else Manner()
        sent = new_request(f"Tell me about {text(dice, 6)}.", 12, dice)
        fates.append(ask(server.target, sent, dice, manner).fate)
        health.append(_get(server.port, "GET", "/health"))
    fates.append(_get(server.port, "POST", "/v1/chat/completions", "no JSON"))
    fates.append(_get(server.port, "GET", "/no-such-page"))
    page = _fetch(f"http://127.0.0.1:{server.port}/metrics")
    names = sorted({re.split("[{ ]", line)[0] for line in page.splitlines() if line[:1] != "#"})
    return Seen(tuple(server.lines[before:]), tuple(health), tuple(names), tuple(fates))


def _get(port: int, method: str, path: str, body: str | None = None) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        reply.read()
        return str(reply.status)
    finally:
        connection.close()


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as page:
        text_of_page: str = page.read().decode()
        return text_of_page


@contextmanager
def sidecar(servers: list[Server], folder: Path, hook: str) -> Iterator[Pod]:
    (folder / "slo.yaml").write_text(SLO.format(hook=hook))
    settings = folder / "dsagent.toml"
    ports = "|".join(str(server.port) for server in servers)
    settings.write_text(SETTINGS.format(ports=ports, folder=folder))
    pod = Pod(servers, settings)
    try:
        pod.at_rest()
        yield pod
    finally:
        pod.close()


def quiet_state(server: Server, folder: Path) -> State:
    """Once no client is connected any more."""
    until(lambda: not _connections(server), "the engine's clients to be gone")
    packages = Path(sysconfig.get_paths()["purelib"])
    return state_of(server.pid, folder / "runs", folder / "temporary", packages)


def _connections(server: Server) -> int:
    port = f":{server.port:04X} "
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return sum(port in line[:30] and line.split()[3] == "01" for line in lines)


def check_one_engine(folder: Path, hook: WebHook) -> list[Check]:
    """Without the sidecar, with it, and after it."""
    runs, temporary = folder / "runs", folder / "temporary"
    for each in (runs, temporary):
        each.mkdir()
    server = Server(PORTS[0], {"TMPDIR": str(temporary)}, runs)
    try:
        seen_under_load(server, seed=1)  # what is made only once is made now
        without = seen_under_load(server, seed=2)
        before = quiet_state(server, folder)
        with sidecar([server], folder, hook.url("agent")) as pod:
            beside = seen_under_load(server, seed=2)
            watched_by = gauges.bpf_of(pod.sidecar.pid)
            page = pod.sidecar.page("/metrics")[1]
            pod.sidecar.process.terminate()
            ended = pod.sidecar.wait()
        until(lambda: not watched_by & gauges.bpf_in_kernel(), "the kernel to free the probes")
        after = quiet_state(server, folder)
        later = seen_under_load(server, seed=2)
    finally:
        server.close()
    series = len([line for line in page.splitlines() if line and line[0] != "#"])
    expected = estimate(0, has_slo=True)
    return [
        Check("series of one engine", f"<= {expected} expected", str(series), series <= expected),
        Check(
            "series over the budget",
            f"0 of {MAX_SERIES}",
            _number(page, "dsagent_series_overflowed_total"),
            _number(page, "dsagent_series_overflowed_total") in ("0", "none"),
        ),
        same("readiness: answers of /health", _short(without.health), _short(beside.health)),
        same("the engine's own metrics", *map(_short, (without.metrics, beside.metrics))),
        same("fates of the same requests", _short(without.fates), _short(beside.fates)),
        same("lines in the engine's log", _short(without.lines), _short(beside.lines)),
        same("the same after it", _short(without.lines), _short(later.lines)),
        Check("the sidecar ends with", "0", str(ended), ended == 0),
        Check(
            "its BPF objects in the kernel",
            "0",
            f"0 of {len(watched_by)}",
            bool(watched_by) or not _may_bpf(),
        ),
        *(same(f"afterwards: {name}", before[name], after[name]) for name in before),
    ]


def _may_bpf() -> bool:
    return Path("/sys/kernel/btf/vmlinux").exists()


def _number(page: str, name: str) -> str:
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)", page, re.MULTILINE)
    return f"{sum(map(float, found)):g}" if found else "none"


def _short(values: tuple[str, ...]) -> str:
    """What there is, and how often, where that is short."""
    kinds = sorted(set(values))
    if len(kinds) <= 5 and sum(map(len, kinds)) < 60:
        return ", ".join(f"{values.count(kind)} x {kind}" for kind in kinds) or "none"
    return f"{len(values)}, {hash_of(values)}"


def hash_of(values: tuple[str, ...]) -> str:
    from engine_state import digest

    return digest(repr(values).encode())


def check_rolling_restarts(folder: Path, hook: WebHook, times: int) -> list[Check]:
    """Two engines behind what gives requests only to those that serve, as a Service does. Each is
    taken out, ended by SIGTERM once its requests have ended, started anew, and used again."""
    require_servers()
    serving = set(PORTS)
    asked: list[Asked] = []
    with ExitStack() as stack:
        servers = []
        for port in PORTS:
            servers.append(Server(port))
            stack.callback(servers[-1].close)
        pod = stack.enter_context(sidecar(servers, folder, hook.url("agent")))
        generate = [COMMAND, "slo", "generate", str(folder / "slo.yaml"), "--out", str(folder)]
        subprocess.run(generate, check=True, capture_output=True)
        prometheus = stack.enter_context(
            alert_servers(
                folder,
                rules=folder / "rules" / "dsagent-slo.yaml",
                scraped=f"127.0.0.1:{pod.sidecar.status()['listener']['port']}",
                hook_url=hook.url("alertmanager"),
            )
        )
        targets = [server.target for server in servers]
        with Crowd(targets, 2, 7, asked.append, lambda port: port in serving) as crowd:
            for _ in range(times):
                for server in servers:
                    port = server.port
                    serving.discard(port)
                    until(lambda: crowd.is_idle(port), "its requests to have ended")  # noqa: B023
                    server.restart(signal.SIGTERM)
                    pod.at_rest()
                    serving.add(port)
                    _wait_for_more(asked, port)
        prometheus.let_rounds_pass(4, SECONDS_LIMIT)
        fired = prometheus.query(
            'count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[1h]))'
        )
        evaluated = prometheus.rounds()
        engines = pod.sidecar.status()["engines"]
        restarts = sum(engine["restarts"] for engine in engines)
        series = prometheus.query('count({job="dsagent"})')
    wanted = times * len(PORTS)
    expected = len(PORTS) * estimate(0, has_slo=True)
    bad = sum(each.fate != "completed" for each in asked)
    notices = [notice.name for notice in hook.notices]
    return [
        Check(
            f"{times} rolling restarts of {len(PORTS)} engines",
            str(wanted),
            str(restarts),
            restarts == wanted,
        ),
        Check("requests meanwhile, not completed", "0", f"{bad} of {len(asked)}", bad == 0),
        Check("alerts at the web hook", "none", ", ".join(notices) or "none", not hook.notices),
        Check(
            f"alerts firing in Prometheus, {evaluated} evaluations",
            "none",
            ", ".join(each["metric"]["alertname"] for each in fired) or "none",
            not fired and evaluated > 0,
        ),
        Check(
            "series in Prometheus",
            f"<= {expected} expected",
            str(series[0]["value"][1]) if series else "none",
            bool(series) and float(series[0]["value"][1]) <= expected,
        ),
    ]


def _wait_for_more(asked: list[Asked], port: int) -> None:
    def answered() -> int:
        return sum(each.port == port and each.fate == "completed" for each in tuple(asked))

    wanted = answered() + REQUESTS_BETWEEN
    end_s = time.monotonic() + SECONDS_LIMIT
    while answered() < wanted:
        if time.monotonic() > end_s:
            raise AssertionError(f"waited in vain for requests at port {port}")
        time.sleep(0.05)


def check(folder: Path, times: int) -> list[Check]:
    with WebHook() as hook:
        one, rolling = folder / "one", folder / "rolling"
        one.mkdir()
        rolling.mkdir()
        return check_one_engine(one, hook) + check_rolling_restarts(rolling, hook, times)


def table(checks: list[Check]) -> str:
    """In Markdown."""
    lines = ["| | without | with, or after | |", "|---|---|---|---|"]
    for each in checks:
        verdict = "ok" if each.held else "FAILED"
        lines.append(f"| {each.name} | {each.without} | {each.with_it} | {verdict} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--restarts", type=int, default=ROLLING_RESTARTS)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "uninstall.json")
    parser.add_argument("--write", action="store_true", help="the table, into docs/soak.md")
    arguments = parser.parse_args()
    alone()
    with tempfile.TemporaryDirectory(prefix="dsagent-uninstall-") as below:
        checks = check(Path(below), arguments.restarts)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"checks": [asdict(each) for each in checks]}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(checks))
    if arguments.write:
        soak_page.write("uninstall_check.py", "uninstall", table(checks))
    return int(not all(each.held for each in checks))


if __name__ == "__main__":
    sys.exit(main())
