"""One HTTP call to vLLM's front end, and the requests of the engine that it makes: what is noted of
each while it goes on."""

from __future__ import annotations

import re
from time import monotonic_ns
from typing import Any

from dsagent.instrumentation.context import TraceContext, random_id, request_context
from dsagent.instrumentation.records import request_key

_OPERATIONS = (
    (re.compile(r"/(chat/completions|messages|responses)\b"), "chat"),
    (re.compile(r"/(completions|generate)\b"), "text_completion"),
    (re.compile(r"/(embeddings|pooling|classify|score|rerank)\b"), "embeddings"),
)
_TRACE_IN_ID = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")  # X-Request-Id, as a last resort
_QUEUED, _SCHEDULED = 1, 2  # EngineCoreEventType

Message = dict[str, Any]


class Call:
    """One HTTP call, or one use of the engine without HTTP."""

    def __init__(self, scope: dict[str, Any] | None, model: str) -> None:
        self.received_ns = monotonic_ns()
        self.first_sent_ns: int | None = None
        self.sent_ns: int | None = None  # the last byte
        self.status = 0
        self.model = model
        self.path = "" if scope is None else str(scope.get("path", ""))
        self.headers: dict[bytes, bytes] = {} if scope is None else dict(scope["headers"])
        self.is_http = scope is not None
        self.context: TraceContext | None = None
        self.lives: list[Life] = []
        self.ended = False

    def header(self, name: bytes) -> str | None:
        raw = self.headers.get(name)
        return None if raw is None else raw.decode("latin-1")

    @property
    def operation(self) -> str | None:
        return next((what for where, what in _OPERATIONS if where.search(self.path)), None)

    def trace(self, headers: Any) -> TraceContext:
        """The first request's context; those that follow have spans of their own in its trace."""
        if self.context is not None:
            return TraceContext(
                self.context.trace_id,
                random_id(64),
                self.context.parent_span_id,
                self.context.sampled,
            )
        given = self.header(b"traceparent") or (headers or {}).get("traceparent")
        context = request_context(given)
        hidden = _TRACE_IN_ID.fullmatch(self.header(b"x-request-id") or "")
        if context.parent_span_id is None and hidden is not None:
            trace_id, span_id = (int(part, 16) for part in hidden.groups())
            if trace_id and span_id:
                context = TraceContext(trace_id, context.span_id, span_id, None)
        self.context = context
        return context


class Life:
    """One request of the engine."""

    def __init__(self, call: Call, request: Any, context: TraceContext, request_id: str) -> None:
        self.call = call
        self.internal_id: str = request.request_id
        self.key = request_key(self.internal_id)
        self.request_id = request_id
        self.context = context
        params = getattr(request, "sampling_params", None)
        self.max_tokens = getattr(params, "max_tokens", None)
        self.temperature = getattr(params, "temperature", None)
        self.top_p = getattr(params, "top_p", None)
        tokens = getattr(request, "prompt_token_ids", None)
        self.prompt_tokens = None if tokens is None else len(tokens)
        self.lora = getattr(getattr(request, "lora_request", None), "lora_name", None)
        self.tokenised_ns: int | None = None
        self.queued_ns: int | None = None
        self.first_scheduled_ns: int | None = None
        self.first_token_ns: int | None = None
        self.finished_ns: int | None = None
        self.output_tokens = 0
        self.cached_tokens: int | None = None  # until it is told, where a version tells it
        self.finish_reason: str | None = None


def note_sent(call: Call, message: Message) -> None:
    """The server has accepted a part of the reply."""
    kind = message["type"]
    if kind == "http.response.start":
        call.status = message["status"]
    elif kind == "http.response.body":
        now_ns = monotonic_ns()
        if call.first_sent_ns is None and message.get("body"):
            call.first_sent_ns = now_ns
        if not message.get("more_body", False):
            call.sent_ns = now_ns


def note_events(life: Life, events: Any) -> None:
    """The engine core's own times; it may have the request before whoever sent it goes on."""
    now_ns = monotonic_ns()
    for event in events:
        moment_ns, kind = round(event.timestamp * 1e9), int(event.type)
        if not (life.tokenised_ns or 0) <= moment_ns <= now_ns:
            continue  # an engine core on another machine has another clock
        if kind == _QUEUED and life.queued_ns is not None:
            life.queued_ns = min(life.queued_ns, moment_ns)
        elif kind == _SCHEDULED:
            life.first_scheduled_ns = moment_ns
            break


def shown_id(request: Any) -> str:
    """The id as the client sees it, where it can be had: newer versions add a random end to it,
    a completion's prompts are numbered, and so are the n samples of one prompt."""
    internal_id: str = request.request_id
    external_id: str | None = getattr(request, "external_req_id", None)
    if external_id is None:
        shown = internal_id
    elif internal_id.startswith(external_id):
        shown = external_id
    else:  # a sample: its number comes first
        shown = internal_id.partition("_")[0] + "_" + external_id
    return shown[:-2] if shown.startswith("cmpl-") and shown.endswith("-0") else shown
