"""What happens, act by act, and what the web hook has to be told of it.

An act ends as soon as that has been told; what must *not* be told is looked for after the rules
have been evaluated some more times, by Prometheus' own count.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alert_hook import Notice, NotToldError, Route, Wanted, WebHook
from alert_servers import Servers, Service, ServiceError
from crowd import Crowd, LoadError, median_tpot_s

from dsagent.agent.load import Server, chat, long_text
from dsagent.agent.slo.alert import BLIND, BURN
from dsagent.agent.slo.policy import windows
from dsagent.dashboards.rules_names import recorded
from dsagent.dashboards.rules_prometheus import NO_DATA

CULPRIT_CAUSE = "batch.prefill_interference"
ALERT_BOUND_S = 180.0  # from the first long prompt to the alert that names it
PATIENCE_S = 240.0  # for whatever else must come: only a failure waits so long
CHATTERS = 6
WARM_UP, USUAL, BESIDE, CALM = 12, 30, 12, 60  # replies
LEAST_SLOWDOWN, MUCH_SLOWDOWN = 1.5, 3.0
DIVIDED_BY = 60.0
ROUNDS = 12  # evaluations after which what is not told will not be told

PAGES = [window for window in windows(DIVIDED_BY) if window.severity == "page"]
# Both for the last evaluations, and most requests are bad now.
STEADILY = (
    f'min_over_time(count(ALERTS{{alertname="{BURN}",severity="page",alertstate="firing"}})[5s:1s])'
    f" == {len(PAGES)} and on () max({recorded('ratio', PAGES[0].short_s)}) > 0.5"
)

Say = Callable[[str], None]


class StoryError(Exception):
    """An act did not go as it must; the message says how."""


@dataclass(frozen=True, slots=True)
class Act:
    """One of the four, for the table at the end."""

    name: str
    held: bool
    seen: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "act": self.name,
            "held": self.held,
            "seen": self.seen,
            "seconds": round(self.seconds, 1),
        }


def page(route: Route) -> Wanted:
    return lambda notice: (
        notice.route == route and notice.name == BURN and notice.labels.get("severity") == "page"
    )


def is_burning(route: Route) -> Wanted:
    """It fires because requests are bad, and says so."""
    return lambda n: page(route)(n) and n.status == "firing" and _state(n) == "burning"


def names_the_cause(route: Route) -> Wanted:
    return lambda n: is_burning(route)(n) and CULPRIT_CAUSE in n.causes


def _state(notice: Notice) -> str:
    return notice.annotations.get("state", "burning")  # Prometheus' rules are alerts of their own


@dataclass(frozen=True, slots=True)
class Culprits:
    """Clients that paste long texts, for one token each: the time per output token of their own
    is nothing to be judged."""

    clients: int
    sentences: int
    pause_s: float

    def body(self, dice: random.Random) -> dict[str, Any]:
        return {**long_text(dice, self.sentences), "max_tokens": 1}

    def at(self, server: Server) -> Crowd:
        return Crowd(server, self.body, self.clients, pause_s=self.pause_s, seed=1001)


# The first that is felt is taken: much more, and nobody gets an answer any more.
CULPRITS = (Culprits(2, 8, 0.2), Culprits(3, 16, 0.05), Culprits(4, 24, 0.0))


def normal_load(server: Server) -> Crowd:
    return Crowd(server, chat, CHATTERS, pause_s=0.8, seed=1)


@dataclass(frozen=True, slots=True)
class Measured:
    """How quick it is here, in the median: ms a token alone, and beside these culprits."""

    culprits: Culprits
    usual_ms: float
    beside_ms: float

    @property
    def limit_ms(self) -> float:
        """Nearer to the slow ones: most of them are beyond it, and next to none of the others."""
        return float(self.usual_ms**0.4 * self.beside_ms**0.6)


def measure(server: Server) -> Measured:
    """Raises LoadError where nothing slows the chats."""
    with normal_load(server) as crowd:
        usual_ms = 1e3 * median_tpot_s(crowd.wait_for(WARM_UP + USUAL)[WARM_UP:])
        for culprits in CULPRITS:
            with culprits.at(server):
                beside_ms = 1e3 * median_tpot_s(crowd.wait_for(BESIDE, since_s=time.monotonic()))
            if beside_ms > MUCH_SLOWDOWN * usual_ms:
                break
    if beside_ms < LEAST_SLOWDOWN * usual_ms:
        raise LoadError(
            f"long prompts do not slow chats here: {usual_ms:.1f} ms a token alone, "
            f"{beside_ms:.1f} ms beside them"
        )
    return Measured(culprits, usual_ms, beside_ms)


def slo_file(limit: float, hook: WebHook, folder: Path) -> Path:
    path = folder / "slo.yaml"
    entry = {"name": "chat", "model": "*", "tpot_ms": round(limit, 3), "objective": 99}
    document = {"slo": [entry], "webhook": hook.url("agent"), "windows_divided_by": DIVIDED_BY}
    path.write_text(json.dumps(document))  # JSON is YAML
    return path


class Story:
    """The acts, in their order: each begins where the one before has ended."""

    def __init__(
        self,
        server: Server,
        culprits: Culprits,
        hook: WebHook,
        servers: Servers,
        agent: Service,
        say: Say,
    ) -> None:
        self._server = server
        self._culprits = culprits
        self._hook = hook
        self._servers = servers
        self._agent = agent
        self._say = say
        self.judged = 0  # chats of the calm before, and the pages they have led to
        self.false_pages = 0
        self.alert_s: dict[Route, float] = {}  # from the first long prompt

    def run(self) -> Iterator[Act]:
        with normal_load(self._server) as crowd:
            self._calm(crowd)
            yield _played("long prefills", self._violate)
            yield _played("the culprit stops", self._recover)
            yield _played("all load stops", lambda: self._fall_silent(crowd))
        with normal_load(self._server):
            yield _played("the agent is killed", self._kill)

    def _calm(self, crowd: Crowd) -> None:
        self._say("normal load: chats only")
        since = len(self._hook.notices)
        self.judged = len(crowd.wait_for(CALM))
        self._servers.let_rounds_pass(1)
        either = self._hook.notices[since:]
        self.false_pages = sum(n.status == "firing" and _is_page(n) for n in either)
        self._say(f"{self.judged} chats, {self.false_pages} false pages")
        for route in ("agent", "alertmanager"):
            self._until_quiet(route)

    def _violate(self) -> str:
        self._say("(a) clients begin to paste long prompts, one after the other")
        since, begun_s = len(self._hook.notices), time.monotonic()
        with self._culprits.at(self._server):
            for route in ("agent", "alertmanager"):
                left_s = begun_s + ALERT_BOUND_S - time.monotonic()
                told = self._hook.wait(
                    names_the_cause(route), f"a page of {route}", since=since, timeout_s=left_s
                )
                self.alert_s[route] = told.at_s - begun_s
        agent_s, alertmanager_s = self.alert_s["agent"], self.alert_s["alertmanager"]
        return (
            f"a page names {CULPRIT_CAUSE}: after {agent_s:.1f} s from the agent, "
            f"{alertmanager_s:.1f} s from Alertmanager"
        )

    def _recover(self) -> str:
        self._say("(b) they have stopped; the chats go on")
        for route in ("agent", "alertmanager"):
            self._until_quiet(route)
        return "every page is resolved"

    def _fall_silent(self, crowd: Crowd) -> str:
        self._say("(c) once more long prompts, and when it burns all clients leave")
        since = len(self._hook.notices)
        with self._culprits.at(self._server):
            self._burn_steadily(since)
            crowd.stop()
        left = len(self._hook.notices)
        self._say("    nobody is left")
        self._wait(
            lambda n: page("agent")(n) and n.annotations.get("state") == "not enough data",
            "not enough data, from the agent",
            left,
        )
        self._wait(
            lambda n: n.name == NO_DATA and n.status == "firing",
            "not enough data, from Alertmanager",
            since,
        )
        self._still_burns(left)
        return '"not enough data", from both; no page is resolved'

    def _kill(self) -> str:
        self._say("(d) chats and long prompts come back; then SIGKILL to the agent")
        since = len(self._hook.notices)
        with self._culprits.at(self._server):
            self._burn_steadily(since)
            killed = len(self._hook.notices)
            self._agent.kill()
            self._say("    the agent is gone")
            self._wait(
                lambda n: n.name == BLIND and n.status == "firing", "the alert blind", killed
            )
            self._still_burns(killed)
        return "blind fires; no page is resolved"

    def _burn_steadily(self, since: int) -> None:
        """The agent says that it burns; Prometheus has found so for some evaluations, by both
        pairs of windows, and Alertmanager has told of both: what is to be resolved, is."""
        self._wait(is_burning("agent"), "the agent: burning again", since)
        self._servers.wait_for(STEADILY, "burning by both pairs of windows", PATIENCE_S)
        self._hook.wait_until(
            lambda: len(self._hook.firing(page("alertmanager"))) == len(PAGES),
            "Alertmanager: both pages fire",
            timeout_s=PATIENCE_S,
        )

    def _wait(self, wanted: Wanted, what: str, since: int) -> Notice:
        return self._hook.wait(wanted, what, since=since, timeout_s=PATIENCE_S)

    def _until_quiet(self, route: Route) -> None:
        self._hook.wait_until(
            lambda: not self._hook.firing(page(route)),
            f"all pages of {route} resolved",
            timeout_s=PATIENCE_S,
        )

    def _still_burns(self, since: int) -> None:
        """Nothing that burnt has been said to be over since then; nor will it be: the rules are
        evaluated some more times, and Alertmanager still holds it. Raises StoryError."""
        self._servers.let_rounds_pass(ROUNDS)
        over = [
            notice
            for notice in self._hook.notices[since:]
            if _is_page(notice) and notice.status == "resolved"
        ]
        if over:
            raise StoryError(f"reported as resolved by {over[0].route}: {over[0].labels}")
        held = [
            labels["window"]
            for labels in self._servers.active_alerts()
            if labels["alertname"] == BURN and labels["severity"] == "page"
        ]
        if len(held) != len(PAGES):
            raise StoryError(f"Alertmanager holds pages of the windows {held} only")


def _played(name: str, play: Callable[[], str]) -> Act:
    begun_s = time.monotonic()
    try:
        seen, held = play(), True
    except (NotToldError, ServiceError, StoryError, LoadError) as error:
        seen, held = str(error), False
    return Act(name, held, seen, time.monotonic() - begun_s)


def _is_page(notice: Notice) -> bool:
    return notice.name == BURN and notice.labels.get("severity") == "page"
