"""The engine's own span and our account of the same request become one tree, and are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made import ANCHOR, MS, TARGET, S, account, batch, engine_span, step
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.engine_spans import (
    HOLD_NS,
    KEEP_SPAN_NS,
    MOST_ALIKE,
    MOST_SPANS,
    EngineSpans,
)
from dsagent.agent.facts import EngineSpan
from dsagent.agent.session.ledger import Ledger
from dsagent.agent.sinks.held_steps import HOLD_NS as STEPS_HOLD_NS
from dsagent.agent.sinks.otlp import OtlpSink
from dsagent.agent.sinks.otlp_config import otlp_config
from dsagent.agent.slo import Limits
from dsagent.instrumentation.spans import request_spans

TRACE, CALLER, OWN = 0xABC << 64 | 7, 77, 0xFEED
NOW_NS = 2001 * S


def queued(sink: OtlpSink) -> list[SpanMessage]:
    """The spans that wait to be posted."""
    sink._spans.end()
    body = sink._spans.next()
    if body is None:
        return []
    (of_resource,) = ExportTraceServiceRequest.FromString(body.data).resource_spans
    return list(of_resource.scope_spans[0].spans)


def ours(name: str = "req-1", **changes: Any) -> Account:
    given = {"trace_id": TRACE, "parent_span_id": CALLER, "sampled": True, **changes}
    return account(name, **given)


def passed(spans: EngineSpans, *brought: Account | EngineSpan, now_ns: int = NOW_NS) -> Any:
    accounts = [each for each in brought if isinstance(each, Account)]
    received = [each for each in brought if isinstance(each, EngineSpan)]
    return spans.pass_on(accounts, received, ANCHOR, now_ns)


@pytest.mark.parametrize("span_first", [True, False])
def test_our_span_goes_below_the_engines(span_first: bool) -> None:
    spans, mine = EngineSpans(), ours()
    first, second = (engine_span(mine), mine) if span_first else (mine, engine_span(mine))
    assert passed(spans, first) == []
    [joined] = passed(spans, second, now_ns=NOW_NS + S)
    [root, *_] = request_spans(joined.record, [], parts=None)
    assert (root.name, root.kind) == ("dsagent.account", "INTERNAL")
    assert (root.trace_id, root.parent_span_id) == (TRACE, OWN)
    assert root.span_id not in (OWN, mine.record.span_id)
    assert joined.engine_span.name == "llm_request"
    assert spans.outcomes == {"joined": 1}


def test_an_account_without_a_span_goes_its_own_way_when_its_time_is_over() -> None:
    spans, mine = EngineSpans(), ours()
    assert passed(spans, mine) == []
    assert passed(spans, now_ns=NOW_NS + HOLD_NS - 1) == []
    assert passed(spans, now_ns=NOW_NS + HOLD_NS) == [mine]
    # Its span comes too late to be joined: counted.
    assert passed(spans, engine_span(mine), now_ns=NOW_NS + HOLD_NS + 1) == []
    passed(spans, now_ns=NOW_NS + HOLD_NS + KEEP_SPAN_NS + 2)
    assert spans.outcomes == {"unmatched": 1}


def test_at_the_end_nothing_is_held() -> None:
    spans, mine = EngineSpans(), ours()
    passed(spans, mine)
    spans.let_go()
    assert passed(spans) == [mine]


def test_two_requests_of_one_trace_are_told_apart_by_the_engines_id() -> None:
    spans, one, two = EngineSpans(), ours("one"), ours("two")
    passed(spans, one, two)
    [joined] = passed(spans, engine_span(two))
    assert joined.record.request_id == "two"
    # Without an id that we know: it could be either, until only one is left.
    again = EngineSpans()
    passed(again, ours("one"), ours("two"))
    assert passed(again, engine_span(two, request_id="somebody's")) == []
    [joined] = passed(again, engine_span(one, span_id=OWN + 1))
    assert joined.record.request_id == "one"
    [joined] = passed(again)
    assert joined.record.request_id == "two"


def test_an_id_given_twice_is_told_apart_by_the_caller_and_by_time() -> None:
    spans = EngineSpans()
    earlier = ours("same", start_ns=1000 * S)
    later = ours("same", start_ns=2000 * S, parent_span_id=78)
    other = ours("same", start_ns=2000 * S, parent_span_id=79)
    passed(spans, earlier, later, other)
    [joined] = passed(spans, engine_span(later))
    assert joined.record.received_ns == 2000 * S
    assert spans.outcomes == {"joined": 1}


def test_vllms_own_suffix_of_an_id_is_no_hindrance() -> None:
    spans, mine = EngineSpans(), ours("cmpl-bench-1-0-9f8e7d6c")
    passed(spans, mine)
    [joined] = passed(spans, engine_span(mine, request_id="cmpl-bench-1-0"))
    assert joined.record.span_id == OWN


def test_without_context_the_trace_is_the_engines_and_both_ids_find_it() -> None:
    spans, ledger = EngineSpans(), Ledger()
    mine = ours("req-1", parent_span_id=None, sampled=None)
    ledger.add(mine)
    passed(spans, mine)
    span = engine_span(mine, trace_id=0xD00D, parent_span_id=None)
    [joined] = passed(spans, span)
    ledger.renew(joined)
    assert len(ledger) == 1
    assert joined.trace_id == f"{0xD00D:032x}"
    for wanted in (joined.trace_id, mine.trace_id):
        document = ledger.explain(wanted, now_ns=NOW_NS, last_ns=10 * S)
        assert document["engine_span"]["span_id"] == f"{OWN:016x}"


def test_another_trace_is_another_request() -> None:
    spans, mine = EngineSpans(), ours()
    passed(spans, mine)
    assert passed(spans, engine_span(mine, trace_id=0xD00D)) == []
    assert passed(spans, engine_span(mine, span_id=5, start_unix_ns=1, end_unix_ns=2)) == []


def test_figures_are_compared_and_counted() -> None:
    spans, mine = EngineSpans(), ours()
    figures = {
        "gen_ai.latency.e2e": 0.991,
        "gen_ai.latency.time_to_first_token": 0.290,
        "gen_ai.latency.time_in_queue": 0.060,  # ours: 40 ms
        "gen_ai.usage.prompt_tokens": 32,
        "gen_ai.usage.completion_tokens": 9,  # ours: 8
    }
    passed(spans, mine)
    [joined] = passed(spans, engine_span(mine, figures=figures))
    compared = {each.figure: each for each in joined.engine_span.figures}
    assert set(compared) == set(figures)  # what the engine does not say is not compared
    assert {name for name, each in compared.items() if not each.agrees} == {
        "gen_ai.latency.time_in_queue",
        "gen_ai.usage.completion_tokens",
    }
    assert compared["gen_ai.latency.time_in_queue"].ours == 40 * MS
    assert compared["gen_ai.latency.time_in_queue"].engine == 60 * MS
    samples = {
        (sample.attributes["figure"], sample.attributes["agrees"]): sample.value
        for sample in spans.samples(NOW_NS)
        if sample.name == "dsagent.engine_span.figures"
    }
    assert samples["gen_ai.latency.e2e", "true"] == 1
    assert samples["gen_ai.usage.completion_tokens", "false"] == 1


def test_a_flood_of_spans_that_match_nothing_is_bounded() -> None:
    spans, mine = EngineSpans(), ours()
    flood = [
        engine_span(mine, span_id=n + 1, request_id=f"x{n}", trace_id=n + 1) for n in range(5000)
    ]
    spans.pass_on([], flood, ANCHOR, NOW_NS)
    assert spans.outcomes["unmatched"] == 5000 - MOST_SPANS


def test_a_span_that_comes_twice_is_counted() -> None:
    spans, mine = EngineSpans(), ours()
    passed(spans, engine_span(mine), engine_span(mine))
    assert spans.outcomes == {"repeated": 1}
    passed(spans, mine)
    assert spans.outcomes == {"repeated": 1, "joined": 1}


def test_the_steps_are_exported_where_the_engine_knows_none() -> None:
    """vLLM exports its request and no step; our own SDK in an engine exports both."""
    config = otlp_config({}, "http://127.0.0.1:1")
    assert config is not None
    for scope, exported in (("vllm.tracing.otel", 1), ("dsagent", 0)):
        spans, mine = EngineSpans(), ours(step_ids=(1,))
        passed(spans, mine)
        [joined] = passed(spans, engine_span(mine, scope=scope))
        sink = OtlpSink(config, Limits())
        sink.take(batch(accounts=(joined,), steps=(step(1),)))
        sink.take(batch(now_ns=joined.record.sent_ns + STEPS_HOLD_NS))
        steps = [each for each in queued(sink) if each.name == "engine step"]
        assert len(steps) == exported, scope
        for each in steps:
            assert each.links[0].span_id == OWN.to_bytes(8, "big")
            assert each.links[0].trace_id == TRACE.to_bytes(16, "big")
    assert TARGET.engine == "reference"


def test_where_vllms_span_went_elsewhere_ours_hangs_beside_it() -> None:
    """The plug-in knows that vLLM exports its span, and nobody but vLLM knows that span's id."""
    config = otlp_config({}, "http://127.0.0.1:1")
    assert config is not None
    sink, mine = OtlpSink(config, Limits()), ours(step_ids=(1,), self_exported=True)
    vllm = replace(TARGET, engine="vllm")
    sink.take(replace(batch(accounts=(mine,), steps=(step(1),)), target=vllm))
    sink.take(replace(batch(now_ns=mine.record.sent_ns + STEPS_HOLD_NS), target=vllm))
    spans = {message.name: message for message in queued(sink)}
    root = spans["dsagent.account"]
    assert root.parent_span_id == CALLER.to_bytes(8, "big")
    assert spans["queue"].parent_span_id == root.span_id
    assert spans["engine step"].links[0].span_id == root.span_id


def test_a_flood_of_spans_of_nobodys_is_looked_at_once_not_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of them took a third of a CPU, of each engine's watch, for as long as they came."""
    looked = 0
    really = EngineSpans._request_of

    def counted(self: EngineSpans, *given: Any) -> Any:
        nonlocal looked
        looked += 1
        return really(self, *given)

    monkeypatch.setattr(EngineSpans, "_request_of", counted)
    spans, mine = EngineSpans(), ours()
    strange = engine_span(mine, trace_id=5, request_id="strange")
    passed(spans, *(replace(strange, span_id=n + 1) for n in range(1000)))
    for tick in range(20):
        passed(spans, ours(f"another-{tick}", trace_id=6), now_ns=NOW_NS + tick)
    passed(spans, engine_span(mine), now_ns=NOW_NS + 21)
    assert len(passed(spans, mine, now_ns=NOW_NS + 22)) == 1
    assert looked == 1000 + 2


def test_of_two_that_are_alike_the_other_is_clear_once_one_has_its_span() -> None:
    spans, one, two = EngineSpans(), ours("one"), ours("two")
    nameless = engine_span(two, request_id="unheard-of", span_id=OWN + 1)
    assert passed(spans, one, two, nameless) == []
    assert len(passed(spans, engine_span(one), now_ns=NOW_NS + 1)) == 1
    [joined] = passed(spans, now_ns=NOW_NS + 2)
    assert joined.record.request_id == "two"


def test_among_very_many_that_are_alike_only_names_are_looked_for() -> None:
    """A client gives all its requests one trace; each strange span would be held against all."""
    spans = EngineSpans()
    many = [ours(f"req-{n}") for n in range(MOST_ALIKE + 1)]
    passed(spans, *many)
    strange = engine_span(many[0], request_id="unheard-of", span_id=OWN + 1)
    [joined] = passed(spans, strange, engine_span(many[7]))
    assert joined.record.request_id == "req-7"
    passed(spans, now_ns=NOW_NS + KEEP_SPAN_NS + 1)
    assert spans.outcomes == {"joined": 1, "unmatched": 1}
