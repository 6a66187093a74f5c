"""A real engine, the real agent with an SLO file, and a web hook: long prefills burn the budget of
the time per output token, the alert names them; they stop, and it is over; all requests stop, and
nobody can know.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "accuracy"))
from lab import DSAGENT, Engine, engine, wait_for_line
from load import Load, Sent, send, text

pytestmark = pytest.mark.ebpf

PATIENCE_S = 90.0  # for what must happen; only a failure ever waits so long
LONG_PROMPT_WORDS = 270  # of tiny-llama's 2,048 tokens, each a byte
CULPRITS = 3
HANGING: dict[str, Any] = {"clients": 16, "max_tokens": (24, 40), "seed": 2}


class WebHook:
    """Every alert that came, in order."""

    def __init__(self) -> None:
        self.came: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()
                with hook._changed:
                    hook.came += body["alerts"]
                    hook._changed.notify_all()

            def log_message(self, *_: object) -> None:
                """Not on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/alerts"

    def wait(self, wanted: Callable[[dict[str, Any]], bool], since: int = 0) -> dict[str, Any]:
        """The first alert like that after the first `since`, come or still to come."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for alert in self.came[since:]:
                    if wanted(alert):
                        return alert
                shown = [(a["status"], a["labels"], a["annotations"]) for a in self.came]
                assert time.monotonic() < deadline, f"it did not come; only {shown}"
                self._changed.wait(1.0)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def is_page(state: str) -> Callable[[dict[str, Any]], bool]:
    return lambda alert: (
        alert["labels"]["alertname"] == "DsagentSloBurn"
        and alert["labels"]["severity"] == "page"
        and alert["annotations"]["state"] == state
    )


@contextmanager
def long_prefills(target: Engine) -> Iterator[None]:
    """Clients that send one long prompt after the other, for one token: the time per output token
    of theirs is nothing to be judged."""
    stop = threading.Event()

    def run(seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            sent = send(target, text(dice, LONG_PROMPT_WORDS), 1, dice)
            assert sent.error is None, sent.error

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(CULPRITS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def tpot_ms(sent: Sent) -> float:
    assert sent.first_ns is not None
    assert sent.end_ns is not None
    return (sent.end_ns - sent.first_ns) / max(1, len(sent.chunk_ns) - 1) / 1e6


def limit_between(target: Engine, load: Load) -> float:
    """A limit that requests keep to alone and miss beside long prefills, on this machine now."""
    load.wait_for(60)
    usual = statistics.median(tpot_ms(sent) for sent in load.sent[20:])
    begun = len(load.sent)
    with long_prefills(target):
        load.wait_for(20)
    beside = statistics.median(tpot_ms(sent) for sent in load.sent[begun:])
    assert beside > 1.5 * usual, (usual, beside)
    return (usual * beside) ** 0.5


def test_the_alert_names_the_cause_is_resolved_and_tells_silence_from_it(tmp_path: Path) -> None:
    hook = WebHook()
    try:
        with engine("tiny-llama") as target:
            watch(target, hook, tmp_path)
    finally:
        hook.close()


def attach(
    target: Engine, hook: WebHook, folder: Path, limits: dict[str, Any]
) -> subprocess.Popen[str]:
    file = {"slo": [limits], "webhook": hook.url, "windows_divided_by": 600}
    (folder / "slo.yaml").write_text(json.dumps(file))  # JSON is YAML
    agent = subprocess.Popen(
        [
            *(DSAGENT, "attach", str(target.pid), "--json", "--max-overhead", "50%"),
            *("--slo", str(folder / "slo.yaml"), "--prometheus", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_line(agent, "attached to")  # or ends it
    return agent


def test_a_server_that_hangs_is_told_while_it_hangs(tmp_path: Path) -> None:
    """Stopped, it ends no request and makes no step: only those under way can tell."""
    hook = WebHook()
    try:
        with engine("tiny-llama") as target, Load(target, **HANGING) as load:
            limits = {"model": "tiny-*", "e2e_ms": 10_000, "objective": 99}
            agent = attach(target, hook, tmp_path, limits)
            try:
                load.wait_for(20)
                target.process.send_signal(signal.SIGSTOP)
                alert = hook.wait(is_page("burning"))
                target.process.send_signal(signal.SIGCONT)
                load.wait_for(20)
                later = hook.wait(lambda each: each["status"] == "resolved")
            finally:
                target.process.send_signal(signal.SIGCONT)
                agent.terminate()
                agent.communicate(timeout=60)
    finally:
        hook.close()
    assert alert["annotations"]["top_cause"] == "unfinished"
    assert set(alert["dsagent"]["trace_ids"]) <= {sent.trace_id for sent in load.sent}
    assert later["fingerprint"] == alert["fingerprint"]


def watch(target: Engine, hook: WebHook, folder: Path) -> None:
    with Load(target, clients=2, max_tokens=(24, 40), seed=1) as load:
        limits = {"model": "tiny-*", "tpot_ms": limit_between(target, load), "objective": 95}
        agent = attach(target, hook, folder, limits)
        try:
            load.wait_for(100)
            with long_prefills(target):
                alert = hook.wait(is_page("burning"))
                assert alert["status"] == "firing"
            causes = {each["cause"]: each["ratio"] for each in alert["dsagent"]["causes"]}
            assert causes.get("batch.prefill_interference", 0) > 0.05, alert
            assert "batch.prefill_interference" in alert["annotations"]["summary"]
            blamed = [each["kind"] for each in alert["dsagent"]["culprits"]]
            assert blamed
            assert alert["labels"]["objective"] == "tpot"
            assert 1 <= len(alert["dsagent"]["trace_ids"]) <= 3
            # The culprits are gone, the load goes on.
            resolved = hook.wait(is_page("recovered"), hook.came.index(alert))
            assert resolved["status"] == "resolved"
            assert resolved["fingerprint"] == alert["fingerprint"]
            # Once more, and then everybody leaves.
            since = len(hook.came)
            with long_prefills(target):
                hook.wait(is_page("burning"), since)
                load.set_clients(0)
            since = len(hook.came)
            silent = hook.wait(is_page("not enough data"), since)
            assert silent["status"] == "firing"
            place = hook.came.index(silent)
            assert not any(is_page("recovered")(each) for each in hook.came[place:])
        finally:
            agent.terminate()
            output, _ = agent.communicate(timeout=60)
    assert set(alert["dsagent"]["trace_ids"]) <= {sent.trace_id for sent in load.sent}
    summary = json.loads(output)
    (sink,) = [each for each in summary["sinks"] if each["name"] == "slo"]
    assert (sink["failed"], sink["dropped"]) == (0, 0)
    assert summary["accounting_failures"] == 0
    # It ended while it could not know: that is not the end of the alert.
    assert hook.came[-1]["status"] == "firing"
    assert hook.came[-1]["annotations"]["state"] == "blind"
