"""Runbook pages: one for each alert, and for each cause what to do about it."""

from __future__ import annotations

from dsagent.agent.screens.remedies import REMEDIES
from dsagent.agent.slo.limits import Objective

_MEANING: dict[Objective, str] = {
    "ttft": "The first token comes too late for too many requests. Users wait before anything "
    "happens.",
    "tpot": "Tokens come too slowly for too many requests. Users see text that drips.",
    "e2e": "Whole requests take too long.",
    "errors": "Too many requests fail in the service. What clients break themselves (they left, "
    "their request was wrong) is not counted.",
    "goodput": "Too few requests meet every limit at once.",
}

_FIRST = """\
1. Read the alert: `causes` are the shares of the burnt budget, `culprits` those to blame most,
   `trace_ids` the worst requests. `dsagent explain TRACE_ID` says where the time of one went.
2. `dsagent why --last 10m` shows whether it is one cause or many, and whose.
3. Do what the table says for the largest cause. An alert from Prometheus has the same causes among
   its annotations; the agent's own web hook has the culprits too.
"""


def pages() -> dict[str, str]:
    """The text of each page by its file's name."""
    objectives = {f"slo-{name}.md": _objective(name, text) for name, text in _MEANING.items()}
    return {**objectives, **_OTHERS}


def _objective(objective: Objective, meaning: str) -> str:
    rows = [f"| {cause} | {remedy} |" for cause, remedy in REMEDIES.items()]
    table = (
        ""
        if objective == "errors"
        else "\n".join(
            ["\n## What to do about a cause\n", "| cause | remedy |", "|---|---|", *rows, ""]
        )
    )
    errors = (
        "\nThe causes are the kinds of errors, `error overloaded` and so on: the server's log has "
        "the requests.\n"
        if objective == "errors"
        else ""
    )
    return (
        f"# The budget of {objective} burns\n\n{meaning}\n\n"
        "A *page* burns 14.4 or 6 times as fast as the budget allows: at that rate a month's "
        "budget is gone in two or five days. A *ticket* burns 3 times as fast, or just faster.\n\n"
        f"## What to look at\n\n{_FIRST}{errors}{table}"
    )


_OTHERS = {
    "not-enough-data.md": """\
# Not enough data

Requests stopped, or nearly so, while a budget was burning. So nobody can say whether it is over:
the alert of the burn stays, and this one says why.

1. Is it meant? A server taken out of traffic has no requests. Silence the burn's alert.
2. If not: clients may have given up. Look at the load balancer and at the server.

It ends when enough requests have come: in the burn's alert again, or in its being resolved. Rules
forget a server that has shown nothing for 6 hours.
""",
    "blind.md": """\
# Blind

The agent cannot see requests, or it was there and is not any more. Nothing is known of the
objectives meanwhile; alerts that were firing are not resolved by it.

1. Is the agent running? Started again, it attaches to the same server: `dsagent attach PID`.
2. It runs: `dsagent doctor --pid PID` says what it cannot read and how to change that.
3. The server is gone: then this alert is the least of it. Where both were taken away on purpose and
   Prometheus still looks for them, it ends by itself after 6 hours; silence it until then.

A restarted engine beside a sidecar that answers, and a pod that is replaced, are no reason for it.
""",
    "cache-hit-ratio.md": """\
# A cache hits too rarely

The hit ratio was below the threshold for the time set, so the circuit is open and the declared
action has been triggered: *bypass* (below 60 % for 3 minutes: go to the source, set a circuit mark)
or *local_fallback* (below 45 % for 5 minutes: serve from the local cache, refresh in the
background).

1. What changed? A new release empties caches, a new prompt template begins differently, a client
   sends prompts that are never alike.
2. Is the cache too small? Look at evictions, and at KV blocks in use.
3. The circuit closes by itself when the ratio has been high enough for the same time; the action
   is told so (`"circuit": "closed"`).
""",
}
