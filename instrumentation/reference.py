"""The observer for the bundled engine, and `python -m dsagent.instrumentation.reference`.

The one module that may import both the engine and what watches it.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from dsagent.engine.observe import RequestLife, StepObserver, StepReport
from dsagent.instrumentation import layout
from dsagent.instrumentation.context import TraceContext, random_id, request_context
from dsagent.instrumentation.records import RequestOpen, RequestRecord, request_key
from dsagent.instrumentation.ring import RingWriter, Role
from dsagent.instrumentation.ring_lazy import LazyRing
from dsagent.instrumentation.rows import ShareRow, StepHead

_MAX_OPEN = 65_536  # requests remembered between opening and closing
STOP_DEADLINE_S = 5.0  # for a profiler's last push
_RING_WAIT_S = 5.0  # for the loop's first sign of life

P = ParamSpec("P")
O = TypeVar("O", bound="ReferenceObserver")  # noqa: E741 - an observer


class PhaseTeller(Protocol):
    """Wants to know which phase the calling thread is in."""

    def enter(self, phase: str) -> None: ...

    def stop(self, deadline_s: float) -> None: ...


class Exporter(Protocol):
    """Emits spans from this very process; neither method blocks or raises."""

    def offer_step(self, head: StepHead, shares: tuple[ShareRow, ...], tid: int) -> None: ...

    def offer_request(self, record: RequestRecord) -> None: ...

    def stop(self, deadline_s: float) -> None: ...


def _kept_from_the_engine(
    role: Role,
) -> Callable[
    [Callable[Concatenate[O, P], None]],
    Callable[Concatenate[O, P], None],
]:
    """Whatever goes wrong in the method is counted in that role's ring, and goes no further."""

    def decorate(
        method: Callable[Concatenate[O, P], None],
    ) -> Callable[Concatenate[O, P], None]:
        @functools.wraps(method)
        def guarded(self: O, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                method(self, *args, **kwargs)
            except Exception:  # noqa: BLE001  telemetry must not fail into the engine
                self.failures += 1
                self.rings[role].count_failure()

        return guarded

    return decorate


class ReferenceObserver(StepObserver):
    """Writes what the engine does into two rings: one of the front end, one of the loop."""

    def __init__(
        self,
        *,
        engine_id: int,
        exporter: Exporter | None = None,
        capacity_bytes: int = layout.DEFAULT_CAPACITY_BYTES,
    ) -> None:
        self.engine_id = engine_id
        self.failures = 0
        self.rings = {
            role: LazyRing(
                functools.partial(
                    RingWriter,
                    role=role,
                    engine_id=engine_id,
                    exports_spans=exporter is not None,
                    capacity_bytes=capacity_bytes,
                )
            )
            for role in (Role.FRONTEND, Role.SCHEDULER)
        }
        self.watching = threading.Event()  # the loop has its ring: who attaches now finds it
        self._exporter = exporter
        self._contexts: dict[str, TraceContext] = {}  # of the open requests; front end only

    @_kept_from_the_engine(Role.FRONTEND)
    def request_opened(self, life: RequestLife) -> None:
        context = request_context(life.traceparent)
        if len(self._contexts) >= _MAX_OPEN:
            del self._contexts[next(iter(self._contexts))]
        self._contexts[life.request_id] = context
        writer = self.rings[Role.FRONTEND].get()
        if writer is not None:
            writer.write(
                RequestOpen(
                    request_key=request_key(life.request_id),
                    request_id=life.request_id,
                    trace_id=context.trace_id,
                    span_id=context.span_id,
                    parent_span_id=context.parent_span_id,
                    sampled=context.sampled,
                    received_ns=life.received_ns,
                    pid=os.getpid(),
                    tid=threading.get_native_id(),
                )
            )
        else:
            self.rings[Role.FRONTEND].count_unwritten()

    @_kept_from_the_engine(Role.FRONTEND)
    def request_closed(self, life: RequestLife) -> None:
        # One that was refused before its body was read was never opened.
        context = self._contexts.pop(life.request_id, None) or request_context(life.traceparent)
        record = closed_record(life, context, exported=self._exporter is not None)
        writer = self.rings[Role.FRONTEND].get()
        if writer is not None:
            writer.write(record)
        else:
            self.rings[Role.FRONTEND].count_unwritten()
        if self._exporter is not None:
            self._exporter.offer_request(record)

    @_kept_from_the_engine(Role.SCHEDULER)
    def step_started(self, step_id: int, start_ns: int) -> None:
        writer = self.rings[Role.SCHEDULER].get()
        if writer is not None:
            writer.step_started(step_id, start_ns)

    @_kept_from_the_engine(Role.SCHEDULER)
    def step_finished(self, step: StepReport) -> None:
        head = (
            step.step_id, step.start_ns, step.end_ns, step.schedule_ns, step.prepare_ns,
            step.forward_ns, step.sample_ns, step.output_ns, step.prefill_tokens,
            step.decode_tokens, step.waiting, step.running, step.preempted, step.kv_blocks_used,
            step.kv_blocks_total, step.admission, step.graph,
        )  # fmt: skip
        writer = self.rings[Role.SCHEDULER].get()
        if writer is not None:
            writer.write_step(head, step.shares)
            writer.heartbeat(step.end_ns)
        else:
            self.rings[Role.SCHEDULER].count_unwritten()
        if self._exporter is not None:
            self._exporter.offer_step(head, tuple(step.shares), threading.get_native_id())

    @_kept_from_the_engine(Role.SCHEDULER)
    def idle(self) -> None:
        writer = self.rings[Role.SCHEDULER].get()
        if writer is not None:
            writer.idle(time.monotonic_ns())
        self.watching.set()

    @_kept_from_the_engine(Role.SCHEDULER)
    def close(self) -> None:
        for ring in self.rings.values():
            ring.close()
        if self._exporter is not None:
            self._exporter.stop(deadline_s=5.0)


class ProfiledObserver(ReferenceObserver):
    """Also tells a profiler the phase of each step. Who is not profiled does not pay for it."""

    def __init__(
        self, profiler: PhaseTeller, *, engine_id: int, exporter: Exporter | None = None
    ) -> None:
        super().__init__(engine_id=engine_id, exporter=exporter)
        self._profiler = profiler

    def _enter(self, phase: str) -> None:
        try:
            self._profiler.enter(phase)
        except Exception:  # noqa: BLE001  telemetry must not fail into the engine
            self.failures += 1  # not in the ring, which lacks nothing for it

    def step_scheduled(self, prefill_tokens: int, decode_tokens: int) -> None:
        both = "mixed" if decode_tokens else "prefill"
        self._enter(both if prefill_tokens else "decode")

    def idle(self) -> None:
        self._enter("idle")
        super().idle()

    def close(self) -> None:
        super().close()
        self._profiler.stop(STOP_DEADLINE_S)


def closed_record(life: RequestLife, context: TraceContext, *, exported: bool) -> RequestRecord:
    """The whole of a request that has ended, as this thread, the front end's, knows it."""
    sent_ns = life.sent_ns or life.finished_ns or time.monotonic_ns()
    return RequestRecord(
        request_key=request_key(life.request_id),
        request_id=life.request_id,
        trace_id=context.trace_id,
        span_id=context.span_id,
        parent_span_id=context.parent_span_id,
        sampled=context.sampled,
        operation=life.operation,
        model=life.model,
        tenant=life.tenant,
        external_id=life.external_id,
        pid=os.getpid(),
        tid=threading.get_native_id(),
        received_ns=life.received_ns,
        tokenised_ns=life.tokenised_ns,
        queued_ns=life.queued_ns,
        first_scheduled_ns=life.first_scheduled_ns,
        first_token_ns=life.first_token_ns,
        first_sent_ns=life.first_sent_ns,
        finished_ns=life.finished_ns,
        sent_ns=max(sent_ns, life.received_ns),
        prompt_tokens=life.prompt_tokens,
        output_tokens=life.output_tokens,
        cached_tokens=life.cached_tokens,
        max_tokens=life.max_tokens,
        temperature=life.temperature,
        top_p=life.top_p,
        finish_reason=life.finish_reason,
        error=life.error,
        self_exported=exported,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dsagent.instrumentation.reference",
        description="Serve a model with the bundled engine, watched through step rings.",
    )
    parser.add_argument("--model", required=True, help="smollm2, tiny-llama, or a folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (8000)")
    parser.add_argument(
        "--spans",
        choices=("none", "sdk"),
        default="none",
        help="sdk: also export spans from this process, over OTLP; OTEL_* apply (none)",
    )
    parser.add_argument(
        "--pyroscope",
        metavar="URL",
        help="profile this process by phase, and push that to Pyroscope there",
    )
    limits = parser.add_argument_group("engine")
    limits.add_argument("--max-num-seqs", type=int, help="sequences running at once")
    limits.add_argument("--max-num-batched-tokens", type=int, help="tokens computed in one step")
    limits.add_argument("--num-kv-blocks", type=int, help="KV blocks of 16 tokens")
    limits.add_argument("--max-model-len", type=int, help="tokens of prompt and reply together")
    limits.add_argument("--threads", type=int, help="of torch")
    limits.add_argument(
        "--no-prefix-cache",
        dest="enable_prefix_cache",
        action="store_const",
        const=False,
        help="compute every prompt anew",
    )
    return parser.parse_args(argv)


_CONFIG_FLAGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_kv_blocks",
    "max_model_len",
    "threads",
    "enable_prefix_cache",
)


def _observer(
    pyroscope: str | None, engine_id: int, exporter: Exporter | None
) -> ReferenceObserver:
    """Raises ImportError or ValueError with a line for people."""
    if pyroscope is None:
        return ReferenceObserver(engine_id=engine_id, exporter=exporter)
    try:
        from dsagent.instrumentation.profiled import Profiler
    except ImportError as error:
        raise ImportError(
            f"--pyroscope needs Pyroscope's client ({error}): pip install 'dsagent[profile]'"
        ) from error
    return ProfiledObserver(Profiler(pyroscope), engine_id=engine_id, exporter=exporter)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    arguments = _arguments(argv)
    from dsagent.engine.config import EngineConfig
    from dsagent.engine.server import serve

    given = {name: getattr(arguments, name) for name in _CONFIG_FLAGS}
    try:
        config = EngineConfig(**{name: value for name, value in given.items() if value is not None})
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    engine_id = random_id(64) >> 1 or 1  # fits a signed column
    exporter: Exporter | None = None
    if arguments.spans == "sdk":
        try:
            from dsagent.instrumentation.sdk import sdk_emitter

            exporter = sdk_emitter(engine_id=engine_id)
        except ImportError as error:
            print(
                f"error: --spans sdk needs OpenTelemetry ({error}): pip install 'dsagent[engine]'",
                file=sys.stderr,
            )
            return 2
    try:
        observer = _observer(arguments.pyroscope, engine_id, exporter)
    except (ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    def announce(url: str) -> None:
        observer.watching.wait(_RING_WAIT_S)
        print(f"listening on {url}", file=sys.stderr, flush=True)

    return serve(
        arguments.model,
        host=arguments.host,
        port=arguments.port,
        config=config,
        observer=observer,
        announce=announce,
    )


if __name__ == "__main__":
    sys.exit(main())
