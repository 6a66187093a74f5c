"""Runbook pages: one for each alert, and for each cause what to do about it."""

from __future__ import annotations

from dsagent.agent.slo.limits import Objective

# What to do about each cause; a test holds it complete.
REMEDIES: dict[str, str] = {
    "frontend.in": "Long bodies or a slow tokeniser: more front-end processes; limit prompts.",
    "frontend.out": "The front end is behind in sending: more front-end processes.",
    "queue.wait": "Too many requests for the places there are: more replicas, or more sequences "
    "at once if the time per output token has room.",
    "queue.kv_blocks": "KV memory is full: more of it, fewer sequences at once, or shorter "
    "contexts.",
    "batch.not_scheduled": "The token budget of a step went to others: a larger budget, or smaller "
    "chunks.",
    "preempted": "KV memory ran out under way: more of it, or fewer sequences at once.",
    "prefill.compute": "Its own prompt is long, or was not found in the prefix cache: look at the "
    "hit ratio and at who sends such prompts.",
    "decode.compute": "The work itself: nothing held it up. A faster model, or a looser limit.",
    "batch.prefill_interference": "Others' prompts are computed in the same steps. Smaller prefill "
    "chunks, a pool of its own for long prompts, or prefill and decode on separate instances. The "
    "alert names the requests.",
    "batch.decode_sharing": "The batch is full: fewer sequences at once, or more replicas.",
    "rank.wait": "One rank is slower than the others: look at that worker's machine and device.",
    "engine.host": "Scheduling and Python take long: fewer sequences, a newer engine.",
    "engine.gap": "The engine idles between steps although it could run: look for what its loop "
    "waits for.",
    "engine.stalled": "The loop stands still: `dsagent explain` of a trace says where.",
    "cpu.runqueue": "Other tasks have the CPU. The alert names them: move them away, or give the "
    "engine CPUs of its own.",
    "cpu.throttled": "The container's CPU quota is used up: raise it or take it off.",
    "cpu.steal": "The hypervisor gives the CPU to others: another machine.",
    "cpu.irq": "Interrupts on the engine's CPUs: steer them elsewhere.",
    "cpu.slowed": "A busy neighbour on the same core or memory: keep its sibling CPUs free.",
    "lock.wait": "A thread holds the lock that the loop needs; the alert names it.",
    "memory.major_fault": "Pages come back from disk: more memory, or lock the engine's.",
    "memory.minor_fault": "Fresh memory is touched: pre-allocate, huge pages.",
    "memory.reclaim": "Memory is short: a higher limit, or less beside the engine.",
    "io.block": "The engine waits for a disk: look at what it reads while serving.",
    "net.retransmit": "Segments get lost on the way to clients: look at the network.",
    "net.backpressure": "A client reads slowly: not the server's fault; exclude it or buffer.",
    "process.stopped": "Somebody stops the process: a debugger, a freezer, a snapshot.",
    "gpu.launch_gap": "The device waits for launches: CUDA graphs, less work on the host.",
    "gpu.throttled": "The device holds its clocks back: power limit, temperature.",
    "unobserved": "A source was off: `dsagent doctor` says why.",
    "unattributed": "No evidence names a cause. `dsagent probes` and `dsagent doctor` say what "
    "cannot be seen here.",
    "unfinished": "They have not ended yet: `dsagent explain TRACE_ID` says where their time has "
    "gone so far.",
    "own work": "Nothing was unusual: the limit is tighter than what such requests take. Change "
    "the limit, or the capacity.",
}

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
