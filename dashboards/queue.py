"""Who waits, and whether for a place or for memory."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dsagent.agent.metrics import catalog
from dsagent.dashboards.board import AGENTS, MODELS, start
from dsagent.dashboards.panels import figure, last, lines, query
from dsagent.dashboards.queries import (
    OF_REQUESTS,
    by,
    increase,
    per_request,
    rate,
    ratio,
    series,
)

HOW_TO_READ = """\
**Waiting above 0 for long** means more load than the engine takes in. Then see why: **KV cache \
near 100 %** and preemptions: memory (fewer or shorter requests, a smaller model, more memory); \
KV cache low and *running* flat: the limit of the batch. In *Time spent waiting* queue.wait is \
waiting for a place, queue.kv_blocks for memory, and batch.not_scheduled is admitted but left \
out of a step. Where the engine tells figures of its own, its line should lie on ours."""

WAITING = 'cause=~"queue.*|batch.not_scheduled|preempted"'


def board() -> dashboard.Dashboard:
    made = start(
        "queue and KV cache",
        "Waiting requests, the KV cache, and what waiting cost.",
        HOW_TO_READ,
        [AGENTS, MODELS],
    )
    _now(made)
    _queue(made)
    _memory(made)
    return made


def _used(labels: str = "") -> str:
    """Blocks in use over blocks there are."""
    above, below = (series(each) for each in (catalog.KV_BLOCKS_USED, catalog.KV_BLOCKS_LIMIT))
    if not labels:
        return ratio(f"sum({above})", f"sum({below})")
    return ratio(by(labels, above), by(labels, below))


def _now(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Now"))
    for panel in (
        figure(
            "Waiting",
            "short",
            catalog.REQUESTS_WAITING.description,
            last(f"sum({series(catalog.REQUESTS_WAITING)})", "waiting"),
            red_from=1,
        ),
        figure(
            "Running",
            "short",
            catalog.REQUESTS_RUNNING.description,
            last(f"sum({series(catalog.REQUESTS_RUNNING)})", "running"),
        ),
        figure(
            "KV cache in use",
            "percentunit",
            "Blocks in use over the blocks there are, in the last step.",
            last(_used(), "used"),
            red_from=0.95,
        ),
        figure(
            "Preemptions in the range",
            "short",
            f"{catalog.PREEMPTIONS.description} Each costs its whole prompt again.",
            last(f"sum({increase(catalog.PREEMPTIONS, over='$__range')})", "preempted"),
            red_from=1,
        ),
    ):
        made.with_panel(panel)


def _queue(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("Queue"))
    made.with_panel(
        lines(
            "Waiting and running",
            "short",
            "Requests after the last step, and by the engine's own word where it tells.",
            query(f"sum({series(catalog.REQUESTS_WAITING)})", "waiting"),
            query(f"sum({series(catalog.REQUESTS_RUNNING)})", "running"),
            query(f"sum({series(catalog.SERVED_WAITING)})", "waiting, as the engine says"),
            query(f"sum({series(catalog.SERVED_RUNNING)})", "running, as the engine says"),
        )
    )
    ended = rate(catalog.REQUESTS, f'{OF_REQUESTS},partial="false"')
    made.with_panel(
        lines(
            "Time spent waiting, mean request",
            "s",
            "What waiting of each kind took from the mean request.",
            query(
                per_request(catalog.REQUEST_CAUSE, ended, f"{OF_REQUESTS},{WAITING}"), "{{cause}}"
            ),
            stacked=True,
        )
    )


def _memory(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("KV cache"))
    made.with_panel(
        lines(
            "KV cache in use, by agent",
            "percentunit",
            "Blocks in use over the blocks there are.",
            query(_used("instance"), "{{instance}}"),
            query(by("instance", series(catalog.SERVED_KV_USAGE)), "{{instance}}, the engine says"),
            most=1,
        )
    )
    made.with_panel(
        lines(
            "Preemptions",
            "cps",
            f"{catalog.PREEMPTIONS.description} None is best.",
            query(by("instance", rate(catalog.PREEMPTIONS)), "{{instance}}"),
        )
    )
    made.with_panel(
        lines(
            "Requests ended",
            "reqps",
            "Falls while the queue grows: the engine got slower. Stays: it is at its limit.",
            query(f"sum({rate(catalog.REQUESTS, OF_REQUESTS)})", "ended"),
        )
    )
    made.with_panel(
        lines(
            "KV blocks per running request",
            "short",
            "Growing contexts fill the cache without any more requests.",
            query(
                ratio(
                    f"sum({series(catalog.KV_BLOCKS_USED)})",
                    f"sum({series(catalog.REQUESTS_RUNNING)} > 0)",
                ),
                "blocks per request",
            ),
        )
    )
