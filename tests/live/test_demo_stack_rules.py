"""The generated rules in a real Prometheus; it tells a real Alertmanager, which tells a web hook.
What is scraped is a page of ours, whose counters move on with each scrape: no clock decides."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from alert_hook import Notice, Wanted, WebHook
from alert_servers import Servers, alert_servers

from dsagent.agent.metrics.slo_metrics import SLO_BAD, SLO_BLIND, SLO_BURNT, SLO_EVENTS
from dsagent.agent.slo.alert import BLIND, BURN
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limit, Limits
from dsagent.dashboards import rules
from dsagent.dashboards.rules_prometheus import NO_DATA

PATIENCE_S = 90.0  # only a failure ever waits so long
ROUNDS = 8
FILE = SloFile(
    Limits((Limit("*", tpot_ns=80_000_000, name="chat", objective_ratio=0.99),)),
    windows_divided_by=60.0,
)
SERIES = 'slo="chat",objective="tpot",gen_ai_request_model="m",tenant="t"'

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("prometheus", "prometheus-alertmanager"))),
    reason="no prometheus or no alertmanager here (as root: bash scripts/setup.sh)",
)


@dataclass
class Page:
    """What an agent would show: each scrape is so many requests later, of which so many bad."""

    requests: int = 10
    bad: int = 0
    totals: dict[str, int] = field(default_factory=lambda: {"requests": 0, "bad": 0})

    def text(self) -> str:
        self.totals["requests"] += self.requests
        self.totals["bad"] += self.bad
        lines = [
            f"{SLO_EVENTS.prometheus}{{{SERIES}}} {self.totals['requests']}",
            f"{SLO_BAD.prometheus}{{{SERIES}}} {self.totals['bad']}",
            f"{SLO_BLIND.prometheus} 0",
        ]
        if self.totals["bad"]:  # a cause is a series only once it has cost something
            for cause, share in (("batch.prefill_interference", 3), ("cpu.runqueue", 1)):
                value = share * self.totals["bad"]
                lines.append(f'{SLO_BURNT.prometheus}{{{SERIES},cause="{cause}"}} {value}')
        return "".join(f"{line}\n" for line in lines)


@dataclass
class Stand:
    hook: WebHook
    servers: Servers
    page: Page
    listener: ThreadingHTTPServer

    def wait(self, wanted: Wanted, what: str, since: int = 0) -> Notice:
        return self.hook.wait(wanted, what, since=since, timeout_s=PATIENCE_S)

    def burn(self) -> Notice:
        self.page.requests = self.page.bad = 10
        return self.wait(fires, "a page", len(self.hook.notices))


def is_page(notice: Notice) -> bool:
    labels = notice.labels
    return notice.name == BURN and (labels["severity"], labels["window"]) == ("page", "1m")


def fires(notice: Notice) -> bool:
    return is_page(notice) and notice.status == "firing"


def is_resolved(notice: Notice) -> bool:
    return is_page(notice) and notice.status == "resolved"


@contextmanager
def stand(folder: Path, texts: dict[str, str]) -> Iterator[Stand]:
    page = Page()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not on the terminal."""

    rules.write(texts, folder)
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,))
    thread.start()
    try:
        with (
            WebHook() as hook,
            alert_servers(
                folder,
                rules=folder / rules.RULES,
                scraped=f"127.0.0.1:{listener.server_port}",
                hook_url=hook.url("alertmanager"),
            ) as servers,
        ):
            yield Stand(hook, servers, page, listener)
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def test_the_alert_names_the_cause_and_gone_is_not_recovered(tmp_path: Path) -> None:
    with stand(tmp_path, rules.files(FILE)) as it:
        it.servers.let_rounds_pass(ROUNDS)
        assert it.hook.notices == []

        told = it.burn()
        assert told.labels["objective"] == "tpot"
        causes = "75 % batch.prefill_interference, 25 % cpu.runqueue"
        assert told.annotations["causes"] == causes
        said = re.fullmatch(r"(.*) burning [0-9.]+×: (.*)", told.annotations["summary"])
        assert said is not None
        assert said.groups() == ("time per output token of m", causes)

        it.page.bad = 0  # the culprit stops, the load goes on
        it.wait(is_resolved, "the page resolved")

        it.burn()
        it.page.requests = it.page.bad = 0  # all load stops
        stopped = len(it.hook.notices)
        it.wait(lambda n: n.name == NO_DATA and n.status == "firing", "not enough data", stopped)
        it.servers.let_rounds_pass(ROUNDS)
        assert not [n for n in it.hook.notices[stopped:] if is_resolved(n)]

        it.listener.shutdown()  # the agent is gone
        it.listener.server_close()
        it.wait(lambda n: n.name == BLIND and n.status == "firing", "blind")
        it.servers.let_rounds_pass(ROUNDS)
        assert not [n for n in it.hook.notices[stopped:] if is_resolved(n)]
        held = [labels for labels in it.servers.active_alerts() if labels["alertname"] == BURN]
        assert "1m" in [labels["window"] for labels in held if labels["severity"] == "page"]


def test_rules_without_a_memory_would_say_that_it_is_over(tmp_path: Path) -> None:
    """So what the test above looks for can be seen."""
    texts = rules.files(FILE)
    broken = texts[rules.RULES].replace("unless on", "and on")
    assert broken != texts[rules.RULES]
    with stand(tmp_path, {**texts, rules.RULES: broken}) as it:
        it.burn()
        it.page.requests = it.page.bad = 0
        it.wait(is_resolved, "the page resolved")
