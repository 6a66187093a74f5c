"""What to do about each cause: one text for `explain`, `why` and the runbooks."""

from __future__ import annotations

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
    "chunks, a pool of its own for long prompts, or prefill and decode on separate instances. "
    "Those to blame are named.",
    "batch.decode_sharing": "The batch is full: fewer sequences at once, or more replicas.",
    "rank.wait": "One rank is slower than the others: look at that worker's machine and device.",
    "engine.host": "Scheduling and Python take long: fewer sequences, a newer engine.",
    "engine.gap": "The engine idles between steps although it could run: look for what its loop "
    "waits for.",
    "engine.stalled": "The loop stands still: `dsagent explain` of a trace says where.",
    "cpu.runqueue": "Other tasks have the CPU, those named: move them away, or give the engine "
    "CPUs of its own.",
    "cpu.throttled": "The container's CPU quota is used up: raise it or take it off.",
    "cpu.steal": "The hypervisor gives the CPU to others: another machine.",
    "cpu.irq": "Interrupts on the engine's CPUs: steer them elsewhere.",
    "cpu.slowed": "A busy neighbour on the same core or memory: keep its sibling CPUs free.",
    "lock.wait": "A thread, the one named, holds the lock that the loop needs.",
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
