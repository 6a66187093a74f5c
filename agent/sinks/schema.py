"""The tables of a recording: one place for the writer, the reader and docs/schemas.md.

pyarrow is imported only when a recording is written or read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 3
PART_SUFFIX = ".part"  # of a file not yet closed

EVIDENCE = "list<struct<source string, fact string, value double, unit string>>"
CULPRITS = (
    "list<struct<kind string, name string, ns int64, pid int64, "
    "request_id string, trace_id string>>"
)
DELAYED_BY = "list<struct<cause string, request_id string, trace_id string, ns int64>>"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str
    meaning: str
    optional: bool = False  # null where absent


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    meaning: str
    columns: tuple[Column, ...]

    def arrow(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema([(column.name, arrow_type(column.type)) for column in self.columns])


def _ns(name: str, meaning: str, optional: bool = False) -> Column:
    return Column(name, "int64", meaning, optional)


def _count(name: str, meaning: str, optional: bool = False) -> Column:
    return Column(name, "int64", meaning, optional)


_REQUEST_IDS = (
    Column("trace_id", "string", "32 hex digits"),
    Column("span_id", "string", "of the request's own span, 16 hex digits"),
    Column("request_id", "string", "the engine's own"),
)
_STEP_IDS = (
    Column("engine_id", "uint64", "which engine loop"),
    Column("step_id", "uint64", "counts from 1 in each loop"),
)
_READ_AT = (
    _ns("unix_ns", "when it was read"),
    _ns("mono_ns", "the same on CLOCK_MONOTONIC"),
)

REQUESTS = Table(
    "requests",
    "One row a request that has ended and is accounted for.",
    (
        *_REQUEST_IDS,
        Column("request_key", "uint64", "hash of request_id; joins with shares"),
        Column("parent_span_id", "string", "of the caller, 16 hex digits", True),
        Column("sampled", "bool", "the caller's flag; null without context", True),
        Column("operation", "string", "chat or text_completion"),
        Column("model", "string", "as the client asked for it"),
        Column("tenant", "string", "where known", True),
        Column("external_id", "string", "X-Request-Id", True),
        Column("pid", "int64", "of the front end"),
        Column("tid", "int64", "of the front end's thread"),
        _ns("received_unix_ns", "received_ns on the wall clock"),
        _ns("sent_unix_ns", "sent_ns on the wall clock"),
        _ns("received_ns", "the handler was entered"),
        _ns("tokenised_ns", "the prompt was tokenised", True),
        _ns("queued_ns", "handed to the scheduler", True),
        _ns("first_scheduled_ns", "first in a batch", True),
        _ns("first_token_ns", "output time of the step that made the first token", True),
        _ns("first_sent_ns", "first byte of the first token sent", True),
        _ns("finished_ns", "output time of the last step", True),
        _ns("sent_ns", "last byte sent, or the abort"),
        _count("prompt_tokens", "tokens of the prompt", True),
        _count("output_tokens", "tokens made"),
        _count("cached_tokens", "of the prompt, found in the prefix cache; null: not told", True),
        _count("max_tokens", "asked for", True),
        Column("temperature", "double", "asked for", True),
        Column("top_p", "double", "asked for", True),
        Column("finish_reason", "string", "stop, length or abort", True),
        Column("error", "string", "error.type", True),
        Column("self_exported", "bool", "the engine exports its spans itself"),
        Column("inferred", "bool", "seen from outside: its messages tell, not the engine"),
        Column("partial", "bool", "began before the agent attached: not in any score"),
        Column("finished", "bool", "true: only ended requests are recorded"),
        _ns("e2e_ns", "sent_ns - received_ns = sum of its parts of e2e + unattributed_ns"),
        _ns("unattributed_ns", "the honest rest of e2e"),
        _ns("ttft_ns", "first_sent_ns - received_ns", True),
        _ns("ttft_unattributed_ns", "the honest rest of ttft", True),
        Column("tpot_ns", "double", "(e2e - ttft) / (output_tokens - 1)", True),
        Column("engine_id", "uint64", "the engine loop that served it"),
        Column("step_ids", "list<uint64>", "the steps it took part in, in order"),
        Column("delayed_by", DELAYED_BY, "which requests are to blame, and for how much"),
    ),
)
PARTS = Table(
    "parts",
    "Nanoseconds of a request's life charged to one cause.",
    (
        *_REQUEST_IDS,
        Column("whole", "string", "what it is a part of: e2e or ttft"),
        Column("position", "int64", "its place among them, from 0"),
        Column("cause", "string", "e.g. cpu.runqueue; docs/design.md lists them"),
        _ns("ns", "how much"),
        Column("how", "string", "measured, modelled or assumed"),
        Column("evidence", EVIDENCE, "the facts it rests on"),
        Column("culprits", CULPRITS, "who is to blame, and for how much"),
    ),
)
STEPS = Table(
    "steps",
    "One iteration of the engine's loop.",
    (
        *_STEP_IDS,
        Column("pid", "int64", "of the loop"),
        Column("tid", "int64", "of the loop's thread"),
        _ns("start_unix_ns", "start_ns on the wall clock"),
        _ns("start_ns", "begin"),
        _ns("end_ns", "output time"),
        _ns("schedule_ns", "choosing the batch"),
        _ns("prepare_ns", "building its inputs"),
        _ns("forward_ns", "the model"),
        _ns("sample_ns", "choosing tokens"),
        _ns("output_ns", "handing them out"),
        _count("prefill_tokens", "computed"),
        _count("decode_tokens", "computed"),
        _count("waiting", "requests not admitted"),
        _count("running", "requests admitted"),
        _count("preempted", "requests taken out"),
        _count("kv_blocks_used", "KV cache blocks in use"),
        _count("kv_blocks_total", "KV cache blocks there are"),
        Column("admission", "string", "why the first waiting request was not admitted"),
        Column("graph", "bool", "whether a CUDA graph ran"),
        _count("batch_size", "requests served"),
        _count("shares_omitted", "of those, not in shares"),
        Column("inferred", "bool", "seen from outside: made from messages, not told by the engine"),
    ),
)
SHARES = Table(
    "shares",
    "One request's part of one step.",
    (
        *_STEP_IDS,
        Column("request_key", "uint64", "joins with requests"),
        Column("phase", "string", "prefill or decode"),
        _count("scheduled_tokens", "computed in this step"),
        _count("cached_tokens", "found in the prefix cache on admission"),
        _count("context_tokens", "in the KV cache before the step"),
        _count("output_tokens", "handed out"),
        Column("recompute", "bool", "computed before, then preempted"),
    ),
)
RANKS = Table(
    "ranks",
    "What one worker rank did for a step.",
    (
        *_STEP_IDS,
        Column("rank", "int64", "which one"),
        Column("pid", "int64", "of the rank"),
        Column("tid", "int64", "of its loop's thread"),
        _ns("start_ns", "begin"),
        _ns("end_ns", "end"),
        _ns("device_ns", "the device's part of it", True),
    ),
)
OPENS = Table(
    "opens",
    "One row a request that has begun, ended since or not.",
    (
        *_REQUEST_IDS,
        Column("request_key", "uint64", "joins with requests and shares"),
        Column("parent_span_id", "string", "of the caller, 16 hex digits", True),
        Column("sampled", "bool", "the caller's flag; null without context", True),
        _ns("received_ns", "the handler was entered"),
        Column("pid", "int64", "of the front end"),
        Column("tid", "int64", "of the front end's thread"),
        Column("inferred", "bool", "seen from outside: its messages tell, not the engine"),
    ),
)
POLLS = Table(
    "polls",
    "One row a time the agent looked: what came in together, and was accounted for then. With it "
    "a recording can be attributed anew, to the same accounts.",
    (
        *_READ_AT,
        _ns("due_ns", "the time by which requests were held to be due"),
        _ns("facts_complete_ns", "until when the kernel's facts are complete", True),
        Column("waits_for_kernel", "bool", "whether accounts waited for the kernel's facts"),
        Column("not_looked_at", "list<string>", "probes or sources left out for their cost"),
        _ns("not_looked_since_ns", "since when; null: since attaching", True),
        _count("opens", "rows of opens"),
        _count("ranks", "rows of ranks"),
        _count("steps", "rows of steps"),
        _count("kernel", "rows of kernel"),
        _count("requests", "rows of requests"),
    ),
)
KERNEL = Table(
    "kernel",
    "What the kernel did to a thread of the target.",
    (
        Column("kind", "string", "oncpu, runqueue, throttled, off_futex, off_disk, ..."),
        Column("exact", "bool", "one interval; else a sum within [start_ns, end_ns]"),
        Column("cpu", "int64", "-1 where it has none"),
        _count("count", "intervals summed"),
        Column("pid", "int64", "of the target's thread"),
        Column("tid", "int64", "the thread; 0 for foreign"),
        Column("thread", "string", "its name, where known", True),
        Column("culprit_pid", "int64", "who had the CPU, or woke it; 0: unknown"),
        Column("culprit_tid", "int64", "likewise"),
        Column("culprit", "string", "its name, where known", True),
        Column("culprit_thread", "string", "the name of culprit_tid, where known", True),
        Column("step_id", "uint64", "the step running when it ended; 0: none"),
        _ns("start_unix_ns", "start_ns on the wall clock"),
        _ns("start_ns", "begin"),
        _ns("end_ns", "end"),
        _ns("ns", "how long in all"),
    ),
)
SAMPLES = Table(
    "samples",
    "Readings of devices and processes.",
    (
        *_READ_AT,
        Column("name", "string", "of the metric, as in the catalogue"),
        Column("value", "double", "in the metric's unit"),
        Column("attributes", "map<string, string>", "of what"),
    ),
)
STATUSES = Table(
    "statuses",
    "How sources and sinks did (on each change of state and at each closing), and rare events.",
    (
        *_READ_AT,
        Column("kind", "string", "source, sink or event"),
        Column("name", "string", "of the source, sink or event"),
        Column("state", "string", "of a source: ok, unavailable, lagging, failed", True),
        Column("reason", "string", "or the event's message"),
        _count("dropped", "records lost so far", True),
        _ns("lag_ns", "how far a source is behind", True),
        _ns("cost_ns", "CPU a source used so far", True),
        _count("sent", "items of a sink", True),
        _count("acknowledged", "items of a sink", True),
        _count("failed", "items of a sink", True),
        Column("attributes", "map<string, string>", "of an event"),
    ),
)
# In the order in which a segment's files are closed: who sees its requests sees all of it.
TABLES = (STEPS, SHARES, RANKS, KERNEL, OPENS, SAMPLES, STATUSES, POLLS, PARTS, REQUESTS)


def arrow_type(text: str) -> pa.DataType:
    """`list<struct<name string, ...>>` and the like as pyarrow's type."""
    import pyarrow as pa

    if text.startswith("list<"):
        return pa.list_(arrow_type(text[5:-1]))
    if text.startswith("struct<"):
        fields = [field.strip().split(" ") for field in text[7:-1].split(",")]
        return pa.struct([(name, arrow_type(kind)) for name, kind in fields])
    if text.startswith("map<"):
        key, value = text[4:-1].split(",")
        return pa.map_(arrow_type(key.strip()), arrow_type(value.strip()))
    return {
        "string": pa.string(),
        "bool": pa.bool_(),
        "double": pa.float64(),
        "int64": pa.int64(),
        "uint64": pa.uint64(),
    }[text]


def document() -> str:
    """The tables as Markdown: docs/schemas.md ends with it."""
    lines = []
    for table in TABLES:
        lines += [f"### {table.name}", "", table.meaning, "", "| column | type | meaning |"]
        lines.append("|---|---|---|")
        for column in table.columns:
            meaning = f"{column.meaning} (may be null)" if column.optional else column.meaning
            lines.append(f"| {column.name} | `{column.type}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)
