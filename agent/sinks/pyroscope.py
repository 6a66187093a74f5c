"""Pushes profiles to Pyroscope: `POST /push.v1.PusherService/Push`, as its own clients do.

Items are profiles: one run of the sampler over one process. A run is held until the steps that ran
during it are known, so that each sample has its phase.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsagent.agent.facts import ClockAnchor
from dsagent.agent.profiles.phases import Steps, Weighed, weigh
from dsagent.agent.profiles.pprof import CPU, SAMPLES, Row, encode
from dsagent.agent.profiles.stacks import Recorded
from dsagent.agent.resource import resource_attributes
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.sinks.otlp_config import Endpoint
from dsagent.agent.sinks.otlp_delivery import Delivery
from dsagent.agent.sinks.otlp_wire import clean_text, field
from dsagent.agent.sinks.outbox import Body, BodyBox
from dsagent.instrumentation import names

PATH = "/push.v1.PusherService/Push"
HEADERS = {"Content-Type": "application/proto"}
# With the sample type cpu, python's is what the boards ask for. Both tell of the same CPU time:
# they are not to be summed.
PROFILE_NAMES = {"python": "process_cpu", "native": "native_cpu"}
HOLD_NS = 3_000_000_000  # for the steps that ran at a run's end
MAX_HELD = 64
MAX_THREAD_NAMES = 32  # a label's values, of one profile
OTHER = "~other"


class PyroscopeSink:
    """See Sink."""

    name = "pyroscope"

    def __init__(self, endpoint: Endpoint, *, resource: Mapping[str, str] | None = None) -> None:
        """`endpoint`: pyroscope_endpoint()'s. `resource`: wins over what the target says."""
        self._overrides = dict(resource or {})
        self._steps = Steps()
        self._held: deque[Recorded] = deque()
        self._bodies = BodyBox()
        self._way = Delivery("metrics", endpoint, self._bodies, name=self.name)
        self._whose: Sequence[tuple[str, str]] = ()
        self._anchor: ClockAnchor | None = None

    def start(self) -> None:
        self._way.start()

    def take(self, batch: Explained) -> None:
        if not self._whose:
            resource = resource_attributes(batch.target, self._overrides)
            self._whose = (
                ("service_name", str(resource[names.SERVICE_NAME])),
                ("service_instance_id", str(resource[names.SERVICE_INSTANCE_ID])),
                ("engine", batch.target.engine),
            )
        self._anchor = batch.anchor
        self._steps.add(batch.steps, batch.rank_steps)
        ledger = self._way.ledger
        for run in batch.profiles:
            ledger.made(1)
            if len(self._held) >= MAX_HELD:
                ledger.dropped(1, "queue_full", "more profiles than are looked through")
            else:
                self._held.append(run)
        while self._held and batch.now_ns >= self._held[0].ended_ns + HOLD_NS:
            self._let_go(self._held.popleft())

    def _let_go(self, run: Recorded) -> None:
        assert self._anchor is not None
        spans = self._steps.of(run.pid, run.began_ns, run.ended_ns)
        weighed = weigh(run, spans, self._steps.latest_end_ns(run.pid), self._steps.role(run.pid))
        profile = encode(
            rows(weighed, run.interval_ns),
            (SAMPLES, CPU),
            period_type=CPU,
            period=run.interval_ns,
            start_unix_ns=self._anchor.unix(run.began_ns),
            duration_ns=run.ended_ns - run.began_ns,
        )
        labels = (("__name__", PROFILE_NAMES[run.kind]), *self._whose)
        if not self._bodies.put(Body(push_request(labels, profile), 1)):
            self._way.ledger.dropped(1, "queue_full", "more profiles than the back end takes")

    def status(self) -> SinkStatus:
        return self._way.ledger.status()

    def stop(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while self._held:
            self._let_go(self._held.popleft())
        self._way.begin_to_end(deadline)
        self._way.end(deadline)


def rows(weighed: Sequence[Weighed], interval_ns: int) -> list[Row]:
    """Equal stacks with equal labels are one row. Repeats are shares of a sample until summed up,
    and only their sum is rounded."""
    counted = Counter(each.thread for each in weighed).most_common(MAX_THREAD_NAMES)
    threads = {name for name, _ in counted}
    sums: dict[Weighed, float] = {}
    for each in weighed:
        thread = each.thread if each.thread in threads else OTHER
        stack = replace(each, thread=thread, samples=0.0)
        sums[stack] = sums.get(stack, 0.0) + each.samples
    made = []
    for stack, samples in sums.items():
        labels = {"thread": stack.thread, "role": stack.role, "phase": stack.phase}
        values = (max(1, round(samples)), round(samples * interval_ns))
        made.append(Row(stack.frames, values, {k: v for k, v in labels.items() if v}))
    return made


def push_request(labels: Sequence[tuple[str, str]], profile: bytes) -> bytes:
    """A PushRequest of one series with one profile."""
    pairs = [
        field(1, field(1, name.encode()) + field(2, clean_text(value))) for name, value in labels
    ]
    sample = field(1, profile) + field(2, str(uuid.uuid4()).encode())
    return field(1, b"".join(pairs) + field(2, sample))
