"""`explain` says whether the engine's own figures agree with ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from made import MS, account

from dsagent.agent.attribution.account import EngineSpanFigure, JoinedEngineSpan
from dsagent.agent.screens import render


def page(*figures: EngineSpanFigure) -> str:
    joined = JoinedEngineSpan("00000000000000ab", "llm_\x1brequest", "vllm.tracing.otel", figures)
    document: dict[str, Any] = replace(account(), engine_span=joined).to_json()
    return render.page_of(render.explain({**document, "others": []}))


def test_figures_that_agree_are_counted_and_those_that_differ_are_shown() -> None:
    e2e = EngineSpanFigure("gen_ai.latency.e2e", 990 * MS, 991 * MS, "ns", agrees=True)
    queue = EngineSpanFigure("gen_ai.latency.time_in_queue", 60 * MS, 40 * MS, "ns", agrees=False)
    tokens = EngineSpanFigure("gen_ai.usage.completion_tokens", 9, 8, "tokens", agrees=False)
    assert "its figures agree with ours (1 compared)" in page(e2e)
    shown = page(e2e, queue, tokens)
    assert "gen_ai.latency.time_in_queue is 60.0 ms there, 40.0 ms here" in shown
    assert "gen_ai.usage.completion_tokens is 9 tokens there, 8 tokens here" in shown
    assert "gen_ai.latency.e2e" not in shown
    assert "\x1b" not in shown
    assert "no figure" in page()


def test_without_such_a_span_nothing_is_said_of_it() -> None:
    shown = render.page_of(render.explain({**account().to_json(), "others": []}))
    assert "own span" not in shown
