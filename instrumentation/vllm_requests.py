"""vLLM's front end, watched: each request from its HTTP call to its last byte.

Three places meet: the ASGI application knows the call (headers, first and last
byte), AsyncLLM when the request was handed to the engine, the OutputProcessor
the engine's own request ids and what came back. A context variable carries the
call to the other two, so `traceparent` arrives even where vLLM drops it. One
call may make several engine requests (several prompts, n > 1): each has a
record of its own, all in one trace.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from time import monotonic_ns
from typing import Any

from dsagent.instrumentation.context import TraceContext, random_id
from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.records import RequestOpen, RequestRecord, request_key
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.ring_writer import RingWriter
from dsagent.instrumentation.vllm_calls import Call, Life, Message, note_events, note_sent, shown_id
from dsagent.instrumentation.vllm_patch import AnyFunction

_MOST_LIVES = 65_536  # requests remembered between opening and closing
_MOST_UNDERWAY_NS = 10_000_000_000  # an output, from the engine core to the front end

Send = Callable[[Message], Awaitable[None]]


class RequestWatch:
    """Of one process. Only the event loop's thread calls it (offline: whoever calls the engine)."""

    def __init__(self) -> None:
        self.ring = LazyRing(self._make_ring)
        self._call: ContextVar[Call | None] = ContextVar("dsagent_call", default=None)
        self._lives: dict[str, Life] = {}  # by the engine's own id
        self._exports_spans = False
        self._model = ""
        self._refused = 0
        # The agent reads it in this process's environment, and compares it with its SLO file.
        tenant_header = os.environ.get("DSAGENT_TENANT_HEADER", "X-Tenant-Id")
        self._tenant_header = tenant_header.lower().encode("utf-8", "replace")

    def _make_ring(self) -> RingWriter:
        return RingWriter(
            role=Role.FRONTEND,
            engine_id=random_id(64) >> 1 or 1,
            exports_spans=self._exports_spans,
            vllm=True,
        )

    # The wrappers: what vLLM raises goes through untouched, what we raise does not get out.

    def wrap_app(self, original: AnyFunction) -> AnyFunction:
        async def __call__(app: Any, scope: Any, receive: Any, send: Send) -> None:  # noqa: N807
            call = None
            try:
                call = self._call_begins(app, scope)
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
            if call is None:
                await original(app, scope, receive, send)
                return

            async def told_send(message: Message) -> None:
                await send(message)
                try:
                    note_sent(call, message)
                except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                    self.ring.count_failure()

            token = self._call.set(call)
            try:
                await original(app, scope, receive, told_send)
            finally:
                try:
                    self._call_ends(call)
                    self._call.reset(token)
                except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                    self.ring.count_failure()

        return __call__

    def wrap_add(self, original: AnyFunction) -> AnyFunction:
        """AsyncLLM.add_request: when it returns, the request is on its way to the engine."""

        async def add_request(client: Any, *args: Any, **kwargs: Any) -> Any:
            token = None
            call = self._current()
            if call is None:
                call = Call(None, self._model)
                token = self._call.set(call)
            try:
                return await original(client, *args, **kwargs)
            finally:
                try:
                    queued_ns = monotonic_ns()
                    for life in call.lives:
                        if life.queued_ns is None:
                            life.queued_ns = queued_ns
                    if token is not None:
                        self._call.reset(token)  # not in who closes it in another context
                except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                    self.ring.count_failure()

        return add_request

    def wrap_register(self, original: AnyFunction) -> AnyFunction:
        """OutputProcessor.add_request: the prompt is tokens, and the engine's id is known."""

        def add_request(processor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(processor, *args, **kwargs)
            try:
                self._opened(args[0] if args else kwargs["request"])
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
            return result

        return add_request

    def wrap_outputs(self, original: AnyFunction) -> AnyFunction:
        def process_outputs(processor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(processor, *args, **kwargs)
            try:
                outputs = args[0] if args else kwargs["engine_core_outputs"]
                seconds = args[1] if len(args) > 1 else kwargs.get("engine_core_timestamp")
                now_ns = monotonic_ns()
                moment_ns = round((seconds or 0) * 1e9)
                if not now_ns - _MOST_UNDERWAY_NS <= moment_ns <= now_ns:
                    moment_ns = now_ns  # not told, or by another machine's clock
                self._progress(processor.request_states, outputs, moment_ns)
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
            return result

        return process_outputs

    def wrap_abort(self, original: AnyFunction) -> AnyFunction:
        def abort_requests(processor: Any, *args: Any, **kwargs: Any) -> Any:
            aborted = original(processor, *args, **kwargs)
            try:
                for request_id in aborted or ():
                    life = self._lives.get(request_id)
                    if life is not None:
                        self._ended(request_id, life, "abort", monotonic_ns())
            except Exception:  # noqa: BLE001  vLLM must not see it; it is counted
                self.ring.count_failure()
            return aborted

        return abort_requests

    def open(self) -> None:
        """Makes the ring before the first request, so that who attaches now finds it."""
        writer = self.ring.get()
        if writer is not None:
            writer.heartbeat(monotonic_ns())

    def _call_begins(self, app: Any, scope: Any) -> Call | None:
        """The call to follow; None for one that cannot be a request, or is inside another."""
        kind = scope["type"]
        if kind == "lifespan":
            state = getattr(app, "state", None)
            arguments = getattr(state, "args", None)
            self._exports_spans = bool(getattr(arguments, "otlp_traces_endpoint", None))
            self._model = _served_name(arguments)
            self.open()
        if kind != "http" or scope.get("method") != "POST" or self._current() is not None:
            return None
        if not self._model:
            self._model = _served_name(getattr(getattr(app, "state", None), "args", None))
        return Call(scope, self._model)

    def _current(self) -> Call | None:
        """The call that this runs in. A pipelined call is begun where the one before it ends, and
        a task may outlive the call that made it: what has ended is not the call of what follows."""
        call = self._call.get()
        return None if call is None or call.ended or call.sent_ns is not None else call

    def _opened(self, request: Any) -> None:
        internal_id: str = request.request_id
        if internal_id in self._lives:
            return  # more input of a session
        writer = self.ring.get()
        if writer is None:
            self.ring.count_unwritten(2)  # its end is not looked for either
            return
        call = self._current() or Call(None, self._model)
        context = call.trace(getattr(request, "trace_headers", None))
        life = Life(call, request, context, shown_id(request))
        life.tokenised_ns = monotonic_ns()
        call.lives.append(life)
        if len(self._lives) >= _MOST_LIVES:
            del self._lives[next(iter(self._lives))]
            self.ring.count_failure()
        self._lives[internal_id] = life
        writer.write(
            RequestOpen(
                request_key=life.key,
                request_id=life.request_id,
                trace_id=context.trace_id,
                span_id=context.span_id,
                parent_span_id=context.parent_span_id,
                sampled=context.sampled,
                received_ns=call.received_ns,
                pid=os.getpid(),
                tid=threading.get_native_id(),
            )
        )

    def _progress(self, still_there: Any, outputs: Any, moment_ns: int) -> None:
        lives = self._lives
        for output in outputs:
            request_id = output.request_id
            life = lives.get(request_id)
            if life is None:
                continue
            count = len(output.new_token_ids)
            life.output_tokens += count
            if life.first_token_ns is None and count:
                life.first_token_ns = moment_ns
                stats = getattr(output, "prefill_stats", None) or output
                cached_tokens = getattr(stats, "num_cached_tokens", None)
                life.cached_tokens = None if cached_tokens is None else max(0, cached_tokens)
            if output.events and life.first_scheduled_ns is None:
                note_events(life, output.events)
            reason = output.finish_reason
            if reason is not None:
                self._ended(request_id, life, str(reason), moment_ns)
            elif request_id not in still_there:  # a stop string, found while detokenising
                self._ended(request_id, life, "stop", moment_ns)

    def _ended(self, internal_id: str, life: Life, reason: str, moment_ns: int) -> None:
        """The engine is done with it; the call is, too, where there is no HTTP."""
        self._lives.pop(internal_id, None)
        if life.finish_reason is None:
            life.finish_reason = reason
            life.finished_ns = moment_ns
        if not life.call.is_http:
            self._close(life, monotonic_ns(), None)

    def _call_ends(self, call: Call) -> None:
        call.ended = True
        sent_ns = call.sent_ns or monotonic_ns()
        error = None
        if call.status >= 500:
            error = "server_error"
        elif call.status >= 400:
            error = "invalid_request"
        elif call.sent_ns is None or any(life.finish_reason == "abort" for life in call.lives):
            error = "client_disconnect"
        elif any(life.finish_reason == "error" for life in call.lives):
            error = "server_error"
        if not call.lives and error is not None and call.operation is not None:
            self._refuse(call, sent_ns, error)
        for life in call.lives:
            if life.finish_reason is None:
                life.finish_reason = "abort"
            self._close(life, sent_ns, error)
            self._lives.pop(life.internal_id, None)

    def _close(self, life: Life, sent_ns: int, error: str | None) -> None:
        call = life.call
        first_sent_ns = call.first_sent_ns if call.is_http else life.first_token_ns
        if call.status >= 400 or life.first_token_ns is None:
            first_sent_ns = None
        self._write(
            life.key,
            life.request_id,
            life.context,
            call,
            model=life.lora or call.model,
            tokenised_ns=life.tokenised_ns,
            queued_ns=life.queued_ns or life.tokenised_ns,
            first_scheduled_ns=life.first_scheduled_ns,
            first_token_ns=life.first_token_ns,
            first_sent_ns=first_sent_ns,
            finished_ns=life.finished_ns,
            sent_ns=max(sent_ns, call.received_ns),
            prompt_tokens=life.prompt_tokens,
            output_tokens=life.output_tokens,
            cached_tokens=life.cached_tokens,
            max_tokens=life.max_tokens,
            temperature=life.temperature,
            top_p=life.top_p,
            finish_reason=life.finish_reason,
            error=error,
        )

    def _refuse(self, call: Call, sent_ns: int, error: str) -> None:
        """A call that never became a request of the engine."""
        self._refused += 1
        request_id = call.header(b"x-request-id") or f"refused-{os.getpid()}-{self._refused}"
        nothing = dict.fromkeys(
            ("tokenised_ns", "queued_ns", "first_scheduled_ns", "first_token_ns", "first_sent_ns",
             "finished_ns", "prompt_tokens", "max_tokens", "temperature", "top_p", "finish_reason")
        )  # fmt: skip
        key = request_key(f"refused-{os.getpid()}-{self._refused}")
        self._write(
            key, request_id, call.trace(None), call, model=call.model, sent_ns=sent_ns,
            output_tokens=0, cached_tokens=None, error=error, **nothing,
        )  # fmt: skip

    def _write(
        self, key: int, request_id: str, context: TraceContext, call: Call, **rest: Any
    ) -> None:
        writer = self.ring.get()
        if writer is None:
            self.ring.count_unwritten()
            return
        writer.write(
            RequestRecord(
                request_key=key,
                request_id=request_id,
                trace_id=context.trace_id,
                span_id=context.span_id,
                parent_span_id=context.parent_span_id,
                sampled=context.sampled,
                operation=call.operation or "text_completion",
                tenant=call.header(self._tenant_header),
                external_id=call.header(b"x-request-id"),
                pid=os.getpid(),
                tid=threading.get_native_id(),
                received_ns=call.received_ns,
                self_exported=self._exports_spans,
                **rest,
            )
        )

    def close(self) -> None:
        self._lives.clear()
        self.ring.close()


def _served_name(arguments: Any) -> str:
    """The model's name in the API, as the server's arguments have it."""
    served = getattr(arguments, "served_model_name", None)
    if isinstance(served, (list, tuple)):
        served = served[0] if served else None
    return str(served or getattr(arguments, "model", None) or "")
