"""What came of the spans that the engine itself exports (engine_spans.py, otlp_receiver/)."""

from __future__ import annotations

from dsagent.agent.metrics.metric import Metric

OTLP_RECEIVER_REQUESTS = Metric(
    "dsagent.otlp_receiver.requests",
    "counter",
    "{request}",
    "Requests to the OTLP receiver, by protocol (http, grpc) and the code answered.",
    ("protocol", "code"),
)
OTLP_RECEIVER_SPANS = Metric(
    "dsagent.otlp_receiver.spans",
    "counter",
    "{span}",
    "Spans received: the engine's own of a request, or others, which are only passed on.",
    ("of",),
)
ENGINE_SPANS = Metric(
    "dsagent.engine_span.spans",
    "counter",
    "{span}",
    "The engine's own spans of requests: joined to our account, unmatched, or repeated.",
    ("outcome",),
)
ENGINE_SPAN_FIGURES = Metric(
    "dsagent.engine_span.figures",
    "counter",
    "{figure}",
    "Figures of the engine's own spans compared with ours; times agree within 5 ms or 2 %.",
    ("figure", "agrees"),
)

ENGINE_SPAN_METRICS = (
    OTLP_RECEIVER_REQUESTS,
    OTLP_RECEIVER_SPANS,
    ENGINE_SPANS,
    ENGINE_SPAN_FIGURES,
)
