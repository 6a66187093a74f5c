"""How much of the prompts the cache held, by instance."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.dashboards.board import label_variable, start
from dsagent.dashboards.panels import buckets, figure, last, lines, query, shares
from dsagent.dashboards.queries import by, heat, increase, rate, ratio

HOW_TO_READ = """\
A row is an instance, a cell is five minutes, and its colour is the share of lookups that the \
cache answered: **green is 100 %, red is 0 %**, no colour means that nothing was looked up. One \
red row among green ones: a cold or badly routed instance. All red from one moment on: a new \
release, another prompt template (its beginning must stay the same), or the cache was too small. \
The share is the sum of hits over the sum of lookups, never a mean of shares."""

CELL = "5m"
OF_CACHE = 'instance=~"$engine",cache_name=~"$cache"'
# The engine shows these itself: its instance is not the agent's.
VARIABLES = (
    label_variable("engine", "Engine", "instance", catalog.CACHE_REQUEST),
    label_variable("cache", "Cache", "cache_name", catalog.CACHE_REQUEST),
)


def board() -> dashboard.Dashboard:
    made = start("cache", "Hit rate of the caches, by instance.", HOW_TO_READ, VARIABLES)
    hits, lookups = (
        f"sum({increase(metric, OF_CACHE, over='$__range')})"
        for metric in (catalog.CACHE_HIT, catalog.CACHE_REQUEST)
    )
    made.with_row(dashboard.Row("Hit rate"))
    made.with_panel(
        shares(
            "Hit rate by instance",
            "Share of lookups that the cache answered, in cells of five minutes.",
            query(_share("$__interval", "instance"), "{{instance}}"),
            cell=CELL,
            good_is_high=True,
        )
    )
    made.with_panel(
        figure(
            "Hit rate over the range",
            "percentunit",
            "Of all instances chosen, summed.",
            last(ratio(hits, lookups), "hit rate"),
            width=12,
        )
    )
    made.with_panel(
        figure(
            "Lookups over the range",
            "short",
            "Few lookups make a hit rate that says little.",
            last(lookups, "lookups"),
            width=12,
        )
    )
    made.with_panel(
        lines(
            "Hit rate by cache",
            "percentunit",
            "Each cache over all its instances.",
            query(_share("$__rate_interval", "cache_name"), "{{cache_name}}"),
            most=1,
        )
    )
    made.with_panel(
        lines(
            "Lookups and hits",
            "ops",
            "What the cache was asked for, per second.",
            query(f"sum({rate(catalog.CACHE_REQUEST, OF_CACHE)})", "lookups"),
            query(f"sum({rate(catalog.CACHE_HIT, OF_CACHE)})", "hits"),
        )
    )
    made.with_row(dashboard.Row("Time of a lookup"))
    for title, result in (("Hits", "hit"), ("Misses", "miss")):
        made.with_panel(
            buckets(
                f"{title}: time of a lookup",
                "s",
                catalog.CACHE_LATENCY.description,
                heat(catalog.CACHE_LATENCY, f'{OF_CACHE},result="{result}"'),
            )
        )
    return made


def _share(over: str, label: str) -> str:
    return ratio(
        *(
            by(label, increase(metric, OF_CACHE, over=over))
            for metric in (catalog.CACHE_HIT, catalog.CACHE_REQUEST)
        )
    )
