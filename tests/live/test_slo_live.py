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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from alert_hook import Notice, Wanted, WebHook

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "accuracy"))
from lab import DSAGENT, Engine, engine, wait_for_line
from load import Load, Sent, send, text

pytestmark = pytest.mark.ebpf

PATIENCE_S = 90.0  # for what must happen; only a failure ever waits so long
LONG_PROMPT_WORDS = 270  # of tiny-llama's 2,048 tokens, each a byte
CULPRITS = 3
HANGING: dict[str, Any] = {"clients": 16, "max_tokens": (24, 40), "seed": 2}


def is_page(state: str) -> Wanted:
    return lambda notice: (
        notice.name == "DsagentSloBurn"
        and notice.labels["severity"] == "page"
        and notice.annotations["state"] == state
    )


def page(hook: WebHook, state: str, since: int = 0) -> Notice:
    return hook.wait(is_page(state), f"the page {state!r}", since=since, timeout_s=PATIENCE_S)


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
    with WebHook() as hook, engine("tiny-llama") as target:
        watch(target, hook, tmp_path)


def attach(
    target: Engine, hook: WebHook, folder: Path, limits: dict[str, Any]
) -> subprocess.Popen[str]:
    file = {"slo": [limits], "webhook": hook.url("agent"), "windows_divided_by": 600}
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
    with WebHook() as hook, engine("tiny-llama") as target, Load(target, **HANGING) as load:
        limits = {"model": "tiny-*", "e2e_ms": 10_000, "objective": 99}
        agent = attach(target, hook, tmp_path, limits)
        try:
            load.wait_for(20)
            target.process.send_signal(signal.SIGSTOP)
            burning = page(hook, "burning")
            target.process.send_signal(signal.SIGCONT)
            load.wait_for(20)
            later = hook.wait(
                lambda each: each.status == "resolved", "its end", timeout_s=PATIENCE_S
            )
        finally:
            target.process.send_signal(signal.SIGCONT)
            agent.terminate()
            agent.communicate(timeout=60)
    assert burning.annotations["top_cause"] == "unfinished"
    assert set(burning.alert["dsagent"]["trace_ids"]) <= {sent.trace_id for sent in load.sent}
    assert later.alert["fingerprint"] == burning.alert["fingerprint"]


def watch(target: Engine, hook: WebHook, folder: Path) -> None:
    with Load(target, clients=2, max_tokens=(24, 40), seed=1) as load:
        limits = {"model": "tiny-*", "tpot_ms": limit_between(target, load), "objective": 95}
        agent = attach(target, hook, folder, limits)
        try:
            load.wait_for(100)
            with long_prefills(target):
                burning = page(hook, "burning")
                assert burning.status == "firing"
            told = burning.alert["dsagent"]
            causes = {each["cause"]: each["ratio"] for each in told["causes"]}
            assert causes.get("batch.prefill_interference", 0) > 0.05, burning
            assert "batch.prefill_interference" in burning.annotations["summary"]
            assert told["culprits"]
            assert burning.labels["objective"] == "tpot"
            assert 1 <= len(told["trace_ids"]) <= 3
            # The culprits are gone, the load goes on.
            resolved = page(hook, "recovered", hook.notices.index(burning))
            assert resolved.status == "resolved"
            assert resolved.alert["fingerprint"] == burning.alert["fingerprint"]
            # Once more, and then everybody leaves.
            with long_prefills(target):
                page(hook, "burning", len(hook.notices))
                load.set_clients(0)
            silent = page(hook, "not enough data", len(hook.notices))
            assert silent.status == "firing"
            place = hook.notices.index(silent)
            assert not any(is_page("recovered")(each) for each in hook.notices[place:])
        finally:
            agent.terminate()
            output, _ = agent.communicate(timeout=60)
    assert set(told["trace_ids"]) <= {sent.trace_id for sent in load.sent}
    summary = json.loads(output)
    (sink,) = [each for each in summary["sinks"] if each["name"] == "slo"]
    assert (sink["failed"], sink["dropped"]) == (0, 0)
    assert summary["accounting_failures"] == 0
    # It ended while it could not know: that is not the end of the alert.
    assert hook.notices[-1].status == "firing"
    assert hook.notices[-1].annotations["state"] == "blind"
