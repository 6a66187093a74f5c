"""What the session hands out, added up into metrics. Pure: no I/O, no clock, no thread.

Partial requests count in `dsagent.requests` and nowhere else. So Σ
`dsagent.request.cause` equals the summed duration of the other requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from dsagent.agent.attribution.account import Account, Part
from dsagent.agent.facts import Sample, SourceStatus, Target
from dsagent.agent.metrics import catalog
from dsagent.agent.metrics.catalog import MAX_LABEL_VALUES, OTHER
from dsagent.agent.metrics.kernel_delays import KernelDelays
from dsagent.agent.metrics.metric import Metric
from dsagent.agent.metrics.series import Exemplar, Family, Store
from dsagent.agent.metrics.slo_metrics import SloFigures
from dsagent.agent.resource import resource_attributes
from dsagent.agent.session.sampling import Sampler
from dsagent.agent.sinks.base import Explained, SinkStatus
from dsagent.agent.slo import Limits
from dsagent.instrumentation import names
from dsagent.instrumentation.records import RequestRecord, Step

UNATTRIBUTED = "unattributed"  # shown beside the causes; it has no `how`
SAMPLE_LIFE_NS = 30_000_000_000  # a sample not renewed for so long is absent, not its last value
MAX_SAMPLES = 4096  # series made of samples


class Aggregate:
    """The state of every metric since the agent attached. One caller at a time."""

    def __init__(
        self,
        limits: Limits,
        sampler: Sampler,
        resource: Mapping[str, str],
        slo: SloFigures | None = None,
        *,
        exponential: bool = False,
    ) -> None:
        """`limits` become bounds of the histograms; only what `sampler` keeps is an exemplar.
        `resource`: attributes that people set, see resource.py. `slo`: of objectives, if any.
        `exponential`: histograms are kept as exponential ones too."""
        self._slo = slo
        self._limits = limits
        self._resource = resource
        self._sampler = sampler
        self._store = Store(
            {
                catalog.TIME_TO_FIRST_TOKEN.name: limits.bounds_s("ttft"),
                catalog.TIME_PER_OUTPUT_TOKEN.name: limits.bounds_s("tpot"),
                catalog.REQUEST_DURATION.name: limits.bounds_s("e2e"),
            },
            exponential=exponential,
        )
        self._target: Target | None = None
        self._models: set[str] = set()
        self._kernel_delays = KernelDelays()
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
        self.start_unix_ns: int | None = None  # of the first batch

    def add(self, batch: Explained) -> None:
        if self.start_unix_ns is None:
            self.start_unix_ns = batch.anchor.unix(batch.now_ns)
        if batch.target != self._target:
            self._target = batch.target
            self._show_target(batch.target)
        for account in batch.accounts:
            self._add_account(account, batch)
        for step in batch.steps:
            self._add_step(step)
        self._show_last_step(batch.steps)
        for kind, delay_ns in self._kernel_delays.add(batch.facts):
            self._store.observe(catalog.KERNEL_DELAY, delay_ns / 1e9, {"kind": kind})
        self._store.set(catalog.KERNEL_DELAYS_DROPPED, self._kernel_delays.dropped, {})
        for event in batch.events:
            self._store.increase(catalog.EVENTS, 1, {"event": event.name})
        self._add_samples(batch.samples, batch.now_ns)
        self._set_sources(batch.sources)
        set_sinks(self._store, batch.sinks)
        if self._slo is not None:
            self._slo.show(self._store)
        self._store.set(catalog.UNCOUNTED_LOSSES, batch.uncounted_losses, {})
        self._store.set(catalog.CLOCK_ERROR, batch.anchor.error_ns / 1e9, {})

    def collect(self) -> list[Family]:
        return self._store.collect()

    def _add_account(self, account: Account, batch: Explained) -> None:
        record = account.record
        model = self._model(record)
        outcome = record.error or record.finish_reason or "unknown"
        self._store.increase(
            catalog.REQUESTS,
            1,
            {
                catalog.MODEL: model,
                "outcome": outcome,
                "partial": "true" if account.partial else "false",
            },
        )
        if account.partial:
            return
        self._add_causes(catalog.REQUEST_CAUSE, model, account.parts, account.unattributed_ns)
        if account.ttft_unattributed_ns is not None:
            self._add_causes(
                catalog.TTFT_CAUSE, model, account.ttft_parts, account.ttft_unattributed_ns
            )
        if not record.self_exported:
            self._observe_request(account, model, batch)

    def _show_target(self, target: Target) -> None:
        attributes = resource_attributes(target, self._resource)
        labels = {k: str(v) for k, v in attributes.items() if k in catalog.TARGET_INFO.attributes}
        self._store.clear(catalog.TARGET_INFO)
        self._store.set(catalog.TARGET_INFO, 1, labels)

    def _add_causes(
        self, metric: Metric, model: str, parts: Iterable[Part], unattributed_ns: int
    ) -> None:
        for part in parts:
            labels = {catalog.MODEL: model, "cause": part.cause, "how": part.how}
            self._store.increase(metric, part.ns / 1e9, labels)
        labels = {catalog.MODEL: model, "cause": UNATTRIBUTED}
        self._store.increase(metric, unattributed_ns / 1e9, labels)

    def _observe_request(self, account: Account, model: str, batch: Explained) -> None:
        """The standard metrics, which an engine that has its own shows itself."""
        record = account.record
        labels = {
            names.OPERATION_NAME: record.operation,
            names.PROVIDER_NAME: provider(batch.target),
            catalog.MODEL: model,
        }
        keep = self._sampler.decide(account, self._limits.violated(account)).keep

        def exemplar(value: float) -> Exemplar | None:
            unix_ns = batch.anchor.unix(record.sent_ns)
            return Exemplar(value, unix_ns, record.trace_id, record.span_id) if keep else None

        observed = (
            (catalog.TIME_TO_FIRST_TOKEN, record.ttft_ns, labels),
            # 0: the whole reply went out in one piece, so there is nothing to measure.
            (catalog.TIME_PER_OUTPUT_TOKEN, record.tpot_ns or None, labels),
            (
                catalog.REQUEST_DURATION,
                account.e2e_ns,
                labels if record.error is None else {**labels, names.ERROR_TYPE: record.error},
            ),
        )
        for metric, value_ns, its_labels in observed:
            if value_ns is not None:
                value = value_ns / 1e9
                self._store.observe(metric, value, its_labels, exemplar(value))
        for kind, tokens in (("input", record.prompt_tokens), ("output", record.output_tokens)):
            if tokens:
                self._store.observe(
                    catalog.TOKEN_USAGE, tokens, {**labels, catalog.TOKEN_TYPE: kind}
                )

    def _model(self, record: RequestRecord) -> str:
        """A client may ask for any model: only a request that was served makes a new label."""
        if record.model in self._models:
            return record.model
        if record.first_scheduled_ns is None or len(self._models) >= MAX_LABEL_VALUES:
            return OTHER
        self._models.add(record.model)
        return record.model

    def _add_step(self, step: Step) -> None:
        store = self._store
        duration_s, requests = (step.end_ns - step.start_ns) / 1e9, len(step.shares)
        requests += step.shares_omitted
        store.observe(catalog.STEP_DURATION, duration_s, {"phase": step_phase(step)})
        store.observe(catalog.STEP_BATCH, requests, {})
        batch = size_class(requests, catalog.BATCH_CLASSES)
        store.observe(catalog.STEP_DURATION_BY_BATCH, duration_s, {"batch": batch})
        if not step.shares_omitted:  # else their context is not known
            tokens = sum(share.context_tokens for share in step.shares)
            context = size_class(tokens, catalog.CONTEXT_CLASSES)
            store.observe(catalog.STEP_DURATION_BY_CONTEXT, duration_s, {"context": context})
        for phase, tokens in (("prefill", step.prefill_tokens), ("decode", step.decode_tokens)):
            if tokens:
                store.increase(catalog.STEP_TOKENS, tokens, {"phase": phase})
        for part, part_ns in step_parts(step):
            if part_ns:  # what an engine does not tell apart is absent
                store.increase(catalog.STEP_PART, part_ns / 1e9, {"part": part})
        if step.preempted:
            store.increase(catalog.PREEMPTIONS, step.preempted, {})

    def _show_last_step(self, steps: Iterable[Step]) -> None:
        step = max(steps, key=lambda step: step.end_ns, default=None)
        if step is None:
            return
        self._store.set(catalog.REQUESTS_WAITING, step.waiting, {})
        self._store.set(catalog.REQUESTS_RUNNING, step.running, {})
        if step.kv_blocks_total:  # else nobody has told
            self._store.set(catalog.KV_BLOCKS_USED, step.kv_blocks_used, {})
            self._store.set(catalog.KV_BLOCKS_LIMIT, step.kv_blocks_total, {})

    def _add_samples(self, samples: Iterable[Sample], now_ns: int) -> None:
        for sample in samples:
            metric = catalog.SAMPLE_METRICS.get(sample.name)
            if metric is None or sample.attributes.keys() - set(metric.attributes):
                self._store.increase(catalog.SAMPLES_UNKNOWN, 1, {})
                continue
            key = (sample.name, frozenset(sample.attributes.items()))
            if key in self._samples or len(self._samples) < MAX_SAMPLES:
                self._samples[key] = sample
        for metric in catalog.SAMPLE_METRICS.values():
            self._store.clear(metric)
        for key, sample in list(self._samples.items()):
            if now_ns - sample.mono_ns > SAMPLE_LIFE_NS:
                del self._samples[key]
                continue
            metric = catalog.SAMPLE_METRICS[sample.name]
            self._store.set(metric, sample.value, sample.attributes)

    def _set_sources(self, sources: Iterable[SourceStatus]) -> None:
        for status in sources:
            source = {"source": status.name}
            for state in ("ok", "unavailable", "lagging", "failed"):
                is_in_it = float(status.state == state)
                self._store.set(catalog.SOURCE_STATE, is_in_it, {**source, "state": state})
            self._store.set(catalog.SOURCE_DROPPED, status.dropped, source)
            self._store.set(catalog.SOURCE_LAG, status.lag_ns / 1e9, source)
            self._store.set(catalog.SOURCE_COST, status.cost_ns / 1e9, source)


def set_sinks(store: Store, sinks: Iterable[SinkStatus]) -> None:
    """How the sinks stand, by the catalogue's names."""
    for status in sinks:
        sink = {"sink": status.name}
        store.set(catalog.SINK_SENT, status.sent, sink)
        store.set(catalog.SINK_ACKNOWLEDGED, status.acknowledged, sink)
        store.set(catalog.SINK_FAILED, status.failed, sink)
        store.set(catalog.SINK_DROPPED, status.dropped, sink)
        for part in (status.parts or (status,)) if status.made is not None else ():
            kind = {**sink, "kind": part.name}
            store.set(catalog.SINK_MADE, (part.made or 0) + part.recovered, kind)
            store.set(catalog.SINK_QUEUED, part.queued, kind)
            for why, items in part.lost.items():
                store.set(catalog.SINK_LOST, items, {**kind, "reason": why})


def size_class(size: int, bounds: Sequence[int]) -> str:
    """The upper bound of the class that a size falls into; +Inf above the last."""
    at = bisect_left(bounds, size)
    return str(bounds[at]) if at < len(bounds) else "+Inf"


def step_phase(step: Step) -> str:
    """prefill, decode, or mixed where a step did both."""
    if not step.prefill_tokens:
        return "decode"
    return "mixed" if step.decode_tokens else "prefill"


def step_parts(step: Step) -> tuple[tuple[str, int], ...]:
    """A step's time by part, in ns; `other` is what the loop spent between and after them."""
    parts = (
        ("schedule", step.schedule_ns),
        ("prepare", step.prepare_ns),
        ("forward", step.forward_ns),
        ("sample", step.sample_ns),
        ("output", step.output_ns),
    )
    rest_ns = step.end_ns - step.start_ns - sum(part_ns for _, part_ns in parts)
    return (*parts, ("other", max(rest_ns, 0)))


def provider(target: Target) -> str:
    """gen_ai.provider.name: the engine that serves, as no well-known provider does."""
    return target.engine
