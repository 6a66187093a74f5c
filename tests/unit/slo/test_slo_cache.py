"""Circuits of caches: the two presets, and what does not move them."""

from __future__ import annotations

from made import S
from slo_watch import Watch, request

from dsagent.agent.slo.cache import CACHE_PRESETS, CacheAlert, Circuit
from dsagent.agent.slo.file import SloFile
from dsagent.agent.slo.limits import Limits

BYPASS = CacheAlert("prefix", "bypass", 0.60, 180.0)


class Lookups:
    def __init__(self, alert: CacheAlert = BYPASS) -> None:
        self.circuit = Circuit(alert)
        self.now_ns = 100 * S
        self.changed: list[tuple[bool, float]] = []

    def run(self, seconds: int, hits: int | None) -> None:
        """A lookup of 100 tokens a second; None: nobody asks."""
        for _ in range(seconds):
            self.now_ns += S
            if hits is not None:
                self.circuit.add(hits, 100, self.now_ns)
            change = self.circuit.judge(self.now_ns)
            if change is not None:
                self.changed.append((change.is_open, self.now_ns / S))


def test_presets() -> None:
    assert {n: (p.below_ratio, p.for_s) for n, p in CACHE_PRESETS.items()} == {
        "bypass": (0.60, 180.0),
        "local_fallback": (0.45, 300.0),
    }


def test_it_opens_after_the_time_and_closes_likewise() -> None:
    lookups = Lookups()
    lookups.run(300, 80)
    lookups.run(150, 50)
    assert lookups.changed == []
    lookups.run(120, 50)
    ((is_open, at_s),) = lookups.changed
    assert is_open
    assert 180 <= at_s - 400 <= 250  # the ratio over a minute has to fall first
    lookups.run(170, 70)
    assert len(lookups.changed) == 1
    lookups.run(120, 70)
    assert [is_open for is_open, _ in lookups.changed] == [True, False]


def test_a_dip_is_too_short() -> None:
    lookups = Lookups()
    for _ in range(10):
        lookups.run(100, 10)
        lookups.run(150, 95)
    assert lookups.changed == []


def test_no_lookups_change_nothing() -> None:
    lookups = Lookups()
    lookups.run(400, 10)
    assert lookups.circuit.is_open
    lookups.run(4000, None)
    assert lookups.circuit.is_open
    assert lookups.circuit.hit_ratio is None
    few = Lookups()
    few.run(5, 0)
    few.run(1000, None)
    assert not few.circuit.is_open


def test_more_hits_than_lookups_are_no_more_than_all() -> None:
    lookups = Lookups()
    lookups.run(60, 10**9)
    assert lookups.circuit.hit_ratio == 1.0


def test_the_evaluator_asks_the_prefix_cache_by_tokens() -> None:
    watch = Watch(SloFile(Limits(), cache=(BYPASS, CacheAlert("other", "x", 0.9, 10.0))))
    for _ in range(300):
        watch.now_ns += S
        watch.tick(request(prompt_tokens=100, cached_tokens=20))
    (alert,) = watch.alerts
    assert alert.status == "firing"
    assert alert.labels["action"] == "bypass"
    assert "hit ratio 20%, below 60% for 180 s: bypass on" in alert.summary
    assert [c.alert.action for c in watch.changes] == ["bypass"]
    for _ in range(300):
        watch.now_ns += S
        watch.tick(request(prompt_tokens=100, cached_tokens=90))
    assert [(a.status, a.state) for a in watch.alerts[1:]] == [("resolved", "recovered")]


def test_where_nobody_tells_what_was_cached_nothing_is_bypassed() -> None:
    """From outside, and of old versions, it is not known: that is no miss."""
    watch = Watch(SloFile(Limits(), cache=(BYPASS,)))
    for _ in range(300):
        watch.now_ns += S
        watch.tick(request(prompt_tokens=100, cached_tokens=None))
    assert watch.alerts == watch.changes == []
