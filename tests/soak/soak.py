"""The sidecar beside real engines under load, with restarts and faults all the time and everything
on: whether anything grows, is lost, or does not add up.

    .venv/bin/python tests/soak/soak.py --minutes 60

Prints a table, writes build/soak.json, and ends with 1 where a bound is not kept. Runs in a network
namespace of its own, so that no other sidecar is met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import random
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [
    str(ROOT / "tests" / name)
    for name in ("soak", "fixtures", "accuracy", "live", "live/shell")
    if str(ROOT / "tests" / name) not in sys.path
]

import soak_gauges as gauges  # noqa: E402
import soak_page  # noqa: E402
from sidecar_lab import until  # noqa: E402
from soak_back_ends import HangingHook, OtlpReceiver  # noqa: E402
from soak_crowd import Asked, Crowd  # noqa: E402
from soak_faults import Deck, Scene  # noqa: E402
from soak_pod import Laps, Pod, Server, alone, own_ports  # noqa: E402
from soak_sums import Books, Bound, Found, Row, at_most, flat, reconcile  # noqa: E402

from dsagent.agent.errors import USAGE, DsagentError  # noqa: E402
from dsagent.agent.listening import control  # noqa: E402

PORTS = own_ports()
CLIENTS = 2  # of each engine
FAULTS_A_ROUND = 3
LEAST_ROUNDS = 5  # however long they take: every fault once, and samples enough to judge
RECORD_BYTES = 4 << 20
RECORDED_BYTES = RECORD_BYTES * 5 // 4  # with the files that are being written, see docs/sidecar.md
QUEUE_BYTES = 4 << 20  # of each of traces, metrics, logs
REST_S = 3.0  # after a round, before the sample
ASK_AFTER_NS = 2_000_000_000  # a request's account takes a second at most
ASK_AGAIN_NS = 10_000_000_000
ASK_FOR_NS = 120_000_000_000
MOST_LAST_ROUNDS = 60
ASK_TIMES = 6  # at least: the machine may have stood still all the while
KEPT_NS = 500_000_000_000
SLACK_NS = 1_000_000_000  # how exactly the log tells when a watch began and ended
MIB = 1 << 20

SLO = """
slo:
  - model: "*"
    ttft_ms: 20
    tpot_ms: 5
webhook: "{hook}"
windows_divided_by: 600
"""
SETTINGS = """
match = '--port ({ports})( |$)'
listen = "127.0.0.1:0"
record = "{folder}/record"
record_max_bytes = {record}
otlp_endpoint = "http://127.0.0.1:{port}"
otlp_queue = "{folder}/queue"
otlp_queue_max_bytes = {queue}
slo = "{folder}/slo.yaml"
max_engines = {engines}
max_overhead = "{overhead}"
"""


class Auditor:
    """Asks the sidecar about every request after its end, by its trace id, and keeps the answers.
    What it does not know after two minutes, it does not know; where it is too busy to say, it is
    asked again for as long as it keeps accounts."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answers: dict[str, Found] = {}
        self.busy = 0
        self._times: Counter[str] = Counter()
        self._waiting: queue.Queue[Asked | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def told(self, asked: Asked) -> None:
        self.asked.append(asked)
        if asked.fate != "refused":
            self._waiting.put(asked)

    def _run(self) -> None:
        again: list[Asked] = []
        asked_again_ns = 0
        while (each := self._waiting.get()) is not None:
            time.sleep(max(0, each.end_ns + ASK_AFTER_NS - time.monotonic_ns()) / 1e9)
            if not self._settled(each):
                again.append(each)
            if time.monotonic_ns() > asked_again_ns + ASK_AGAIN_NS:
                again = [one for one in again if not self._settled(one)]
                asked_again_ns = time.monotonic_ns()
        # Those that nobody has seen will not be known later either.
        rounds_in_vain = 0
        for _ in range(MOST_LAST_ROUNDS):
            if not again or rounds_in_vain >= ASK_TIMES:
                break
            time.sleep(2)
            known, busy = len(self.answers), self.busy
            again = [one for one in again if not self._settled(one)]
            news = len(self.answers) > known or self.busy > busy
            rounds_in_vain = 0 if news else rounds_in_vain + 1

    def _settled(self, asked: Asked) -> bool:
        try:
            question = {"op": "explain", "id": asked.trace_id, "pid": None}
            document = control.ask(control.SIDECAR, question)
        except DsagentError as error:
            if error.exit_code == USAGE:
                self._times[asked.trace_id] += 1
                is_long_ago = time.monotonic_ns() > asked.end_ns + ASK_FOR_NS
                return is_long_ago and self._times[asked.trace_id] >= ASK_TIMES
            self.busy += 1
            return time.monotonic_ns() > asked.end_ns + KEPT_NS
        if document["finished"]:
            self.answers[asked.trace_id] = Found(bool(document["partial"]))
        return bool(document["finished"])

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()


@dataclass(slots=True)
class Scrapes:
    """What Prometheus would see: how many series, how often, and what must be 0."""

    times: int = 0
    missed: int = 0  # no answer within a minute: a machine that stands still
    series: int = 0
    most_series: int = 0
    overflowed: float = 0.0
    uncounted: float = 0.0
    dropped: dict[str, float] = field(default_factory=dict)

    def take(self, page: str) -> None:
        lines = [line for line in page.splitlines() if line and line[0] != "#"]
        self.times += 1
        self.series = len(lines)
        self.most_series = max(self.most_series, self.series)
        for line in lines:
            name = re.split("[{ ]", line, maxsplit=1)[0]
            value = float(line.split(" # ")[0].split()[-1])
            if name == "dsagent_uncounted_losses":
                self.uncounted = max(self.uncounted, value)
            elif name == "dsagent_series_overflowed_total":
                self.overflowed = max(self.overflowed, value)


@dataclass(slots=True)
class Soak:
    """Samples in states that can be compared: all engines watched, the load as usual, no fault."""

    begun_s: float
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    bpf_seen: set[tuple[str, int]] = field(default_factory=set)
    uneven: list[str] = field(default_factory=list)  # deliveries that did not add up
    rounds: int = 0

    def sample(self, pod: Pod, folder: Path) -> None:
        pid = pod.sidecar.pid
        status = pod.at_rest()
        memory = gauges.memory_bytes(pid)
        kinds = gauges.descriptors(pid)
        bpf = gauges.bpf_of(pid)
        self.bpf_seen |= bpf
        figures = {
            "memory (PSS), MiB": memory["pss"] / MIB,
            "memory of its own less accounts kept, MiB": (memory["own"] - status["recent"]["bytes"])
            / MIB,
            "memory (RSS), MiB": memory["rss"] / MIB,
            "mappings": gauges.mappings(pid),
            "threads": gauges.threads(pid),
            "sockets": kinds["sockets"],
            "memory files": kinds["memory files"],
            "other files": kinds["other files"],
            **{f"BPF {kind}s": sum(k == kind for k, _ in bpf) for kind in gauges.BPF_KINDS},
            "recording, MiB": gauges.disk_bytes(folder / "record") / MIB,
            "queue, MiB": gauges.disk_bytes(folder / "queue") / MIB,
            "uncounted losses": sum(e.get("uncounted_losses", 0) for e in status["engines"]),
            "faults of its own": status["failures"]
            + sum(e.get("accounting_failures", 0) for e in status["engines"]),
        }
        hours = (time.monotonic() - self.begun_s) / 3600
        for name, value in figures.items():
            self.samples.setdefault(name, []).append((hours, float(value)))
        for engine in status["engines"]:
            for sink in engine["sinks"]:
                if "made" in sink and not _adds_up(sink):
                    self.uneven.append(json.dumps(sink))

    def rows(self) -> list[Row]:
        """What may come and go within a moment (a call of the web hook, a scrape, the probes of one
        engine, which it lets go of where watching costs too much) is no growth. One left behind by
        every attachment would be some forty even in a run of four minutes."""
        of = self.samples
        rows = [
            flat(name, "", of[name], Bound(step, an_hour))
            for name, step, an_hour in (
                ("memory of its own less accounts kept, MiB", 16.0, 6.0),
                ("mappings", 40.0, 0.0),
                ("threads", 4.0, 0.0),
                ("sockets", 8.0, 0.0),
                ("memory files", 1.0, 0.0),
                ("other files", 8.0, 0.0),
                *((f"BPF {kind}s", 32.0, 0.0) for kind in gauges.BPF_KINDS),
            )
        ]
        rows += [
            at_most("memory (PSS), MiB", "", of["memory (PSS), MiB"], 200.0),
            at_most("recording, MiB", "", of["recording, MiB"], RECORDED_BYTES / MIB),
            at_most("queue, MiB", "", of["queue, MiB"], 3 * QUEUE_BYTES / MIB),
            at_most("uncounted losses", "", of["uncounted losses"], 0),
            at_most("faults of its own", "", of["faults of its own"], 0),
        ]
        return rows


def _adds_up(sink: dict[str, Any]) -> bool:
    total = sink["queued"] + sink["sent"] + sink["dropped"]
    return bool(
        sink["made"] + sink["recovered"] == total
        and sink["sent"] == sink["acknowledged"] + sink["failed"]
        and sum(sink["lost"].values()) == sink["failed"] + sink["dropped"]
    )


def soak(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    """Runs it all; returns the document."""
    dice = random.Random(seed)
    with ExitStack() as stack:
        receiver = OtlpReceiver()
        stack.callback(receiver.close)
        hook = HangingHook()
        stack.callback(hook.close)
        (folder / "slo.yaml").write_text(SLO.format(hook=hook.url))
        settings = folder / "dsagent.toml"

        def write_settings(overhead: str) -> None:
            settings.write_text(
                SETTINGS.format(
                    ports="|".join(map(str, PORTS)),
                    folder=folder,
                    record=RECORD_BYTES,
                    queue=QUEUE_BYTES,
                    port=receiver.port,
                    engines=len(PORTS),
                    overhead=overhead,
                )
            )

        write_settings("50%")
        servers = []
        for port in PORTS:
            servers.append(Server(port))
            stack.callback(servers[-1].close)
        pod = Pod(servers, settings)
        stack.callback(pod.close)
        listener = pod.at_rest()["listener"]["port"]
        scrapes = Scrapes()

        def scrape() -> None:
            try:
                url = f"http://127.0.0.1:{listener}/metrics"
                with urllib.request.urlopen(url, timeout=60) as page:
                    scrapes.take(page.read().decode())
            except OSError:
                scrapes.missed += 1

        auditor = Auditor()
        stack.callback(auditor.close)
        prometheus = Laps(5.0, scrape)
        run = Soak(time.monotonic())
        deck = Deck(dice)
        targets = [server.target for server in servers]
        with Crowd(targets, CLIENTS, seed, auditor.told) as crowd:
            scene = Scene(pod, crowd, receiver, settings, write_settings, dice)
            while time.monotonic() < run.begun_s + minutes * 60 or run.rounds < LEAST_ROUNDS:
                for _ in range(FAULTS_A_ROUND):
                    deck.draw()(scene)
                pod.at_rest()
                time.sleep(REST_S)
                run.sample(pod, folder)
                run.rounds += 1
                _progress(run, auditor, minutes)
        prometheus.close()
        auditor.close()
        scrape()
        pod.sidecar.process.terminate()
        code = pod.sidecar.wait()
        books = reconcile(auditor.asked, auditor.answers, pod.watches(), pod.kills, SLACK_NS)
        until(lambda: not run.bpf_seen & gauges.bpf_in_kernel(), "the kernel to free the probes")
        return _document(run, auditor, books, scrapes, deck, receiver, hook, pod, code, minutes)


def _progress(run: Soak, auditor: Auditor, minutes: float) -> None:
    passed = (time.monotonic() - run.begun_s) / 60
    pss = run.samples["memory (PSS), MiB"][-1][1]
    print(
        f"{passed:5.1f} of {minutes:g} min: {run.rounds} rounds, {len(auditor.asked)} requests, "
        f"{pss:.1f} MiB",
        file=sys.stderr,
        flush=True,
    )


def _document(
    run: Soak,
    auditor: Auditor,
    books: Books,
    scrapes: Scrapes,
    deck: Deck,
    receiver: OtlpReceiver,
    hook: HangingHook,
    pod: Pod,
    code: int,
    minutes: float,
) -> dict[str, Any]:
    rows = run.rows()
    faults = [f"{row.name}: {row.start:g} to {row.end:g}" for row in rows if row.verdict != "ok"]
    faults += books.faults
    if run.uneven:
        faults.append(f"{len(run.uneven)} deliveries do not add up: {run.uneven[0]}")
    if code != 0:
        faults.append(f"the sidecar ended with {code}")
    lost = sum(watch.uncounted_losses for watch in pod.watches())
    if lost or scrapes.uncounted:
        faults.append(f"uncounted losses: {lost}, {scrapes.uncounted:g} on the page")
    if scrapes.missed > scrapes.times:
        faults.append(f"{scrapes.missed} scrapes without an answer, {scrapes.times} with one")
    if not receiver.trace_ids:
        faults.append("the back end has got nothing")
    traceback = [
        line for line in pod.sidecar.err if "Traceback" in line or "sidecar.failed" in line
    ]
    if traceback:
        faults.append(f"the sidecar failed: {traceback[0]}")
    delivered = sum(trace_id in receiver.trace_ids for trace_id in auditor.answers)
    return {
        "minutes": minutes,
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "rounds": run.rounds,
        "done": deck.done,
        "table": [asdict(row) for row in rows],
        "requests": books.to_json(),
        "scrapes": asdict(scrapes),
        "delivered": delivered,
        "otlp": {"items": dict(receiver.items), "outages": receiver.outages},
        "web_hook_calls": hook.calls,
        "faults": faults,
        "samples": run.samples,
    }


def text(document: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    lines = [
        f"{document['minutes']:g} minutes, {document['rounds']} rounds; {document['machine']}",
        "",
        "| | start | end | most | slope an hour | bound | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["table"]:
        slope = "-" if row["slope_an_hour"] is None else f"{row['slope_an_hour']:+.2f}"
        figures = (f"{row[key]:.4g}" for key in ("start", "end", "most"))
        cells = (row["name"], *figures, slope, row["bound"], row["verdict"])
        lines.append(f"| {' | '.join(cells)} |")
    requests = document["requests"]
    fates = requests["by_fate"]
    lines += [
        "",
        "| requests | |",
        "|---|---|",
        *(
            f"| {what} | {number} |"
            for what, number in (
                ("completed, as their clients saw it", requests["completed"]),
                ("of these explained by the sidecar", requests["explained"]),
                (
                    "among them partial: they began before it attached",
                    requests["explained_partial"],
                ),
                ("ended while nobody was attached to their engine", requests["before_attached"]),
                ("their engine killed before it had written their end", requests["at_a_kill"]),
                ("missing", len(requests["missing"])),
                ("refused with an error by the engine", fates.get("answered", 0)),
                ("left by their client", fates.get("left", 0)),
                ("no connection: the engine was away", fates.get("refused", 0)),
                ("broken off by the engine's death", fates.get("broken", 0)),
                ("without an account among these", requests["broken_off"]),
                ("told by name by the sidecar as cut off", requests["broken_told"]),
                ("cut off while nobody was attached", requests["broken_unseen"]),
                ("cut off before any byte of an answer", requests["broken_unheard"]),
                ("cut off, as the sidecar counts", requests["cut_off"]),
                ("named so, and not cut off", len(requests["cut_off_strange"])),
                ("accounted for, as the sidecar counts", requests["accounted"]),
                ("explained, of all", requests["explained_of_all"]),
                ("explained, and their trace is at the back end", document["delivered"]),
            )
        ),
        "",
        "Done to it: "
        + ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in document["done"].items())
        + f"; {document['scrapes']['times']} scrapes"
        + (f" ({document['scrapes']['missed']} missed)" if document["scrapes"]["missed"] else "")
        + f" of {document['scrapes']['most_series']} series"
        f" at most, {document['web_hook_calls']} calls of a web hook that hangs.",
    ]
    lines += (
        ["", *(f"FAILED: {fault}" for fault in document["faults"])] if document["faults"] else []
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = float(os.environ.get("DSAGENT_SOAK_MINUTES", "60"))
    parser.add_argument("--minutes", type=float, default=default)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak.json")
    parser.add_argument("--write", action="store_true", help="the tables, into docs/soak.md")
    arguments = parser.parse_args()
    alone()
    with tempfile.TemporaryDirectory(prefix="dsagent-soak-") as folder:
        document = soak(arguments.minutes, arguments.seed, Path(folder))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(text(document))
    if arguments.write:
        soak_page.write("soak.py", "soak", text(document))
    return int(bool(document["faults"]))


if __name__ == "__main__":
    sys.exit(main())
