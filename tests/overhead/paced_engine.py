"""A load for benchmarks: real records through the real observer at 50 steps a second, batch 16,
without a model behind them. Every second two requests end and two begin.

    python tests/overhead/paced_engine.py
"""

from __future__ import annotations

import sys
import time

from dsagent.engine.observe import ADMITTED, RequestLife, StepReport, StepShare
from dsagent.instrumentation.reference import ReferenceObserver

STEPS_A_SECOND = 50
BATCH = 16
PERIOD_NS = 1_000_000_000 // STEPS_A_SECOND


def main() -> None:
    observer = ReferenceObserver(engine_id=1)
    observer.idle()
    made = 0
    open_: list[RequestLife] = []
    print("pacing", file=sys.stderr, flush=True)
    step_id = 0
    next_ns = time.monotonic_ns()
    while True:
        while len(open_) < BATCH:
            made += 1
            life = RequestLife(f"chatcmpl-{made:032x}", "chat", "paced", time.monotonic_ns())
            life.tokenised_ns = life.queued_ns = life.received_ns
            observer.request_opened(life)
            open_.append(life)
        step_id += 1
        start_ns = time.monotonic_ns()
        observer.step_started(step_id, start_ns)
        next_ns += PERIOD_NS
        time.sleep(max(0, next_ns - time.monotonic_ns()) / 1e9)
        end_ns = time.monotonic_ns()
        forward_ns = end_ns - start_ns - 300_000
        observer.step_finished(
            StepReport(
                step_id, start_ns, end_ns, 100_000, 50_000, forward_ns, 100_000, 50_000,
                0, BATCH, 0, BATCH, 0, 500, 4096, ADMITTED, False,
                [StepShare(life.request_id, False, 1, 0, 300, 1, False) for life in open_],
            )
        )  # fmt: skip
        for life in open_:
            life.output_tokens += 1
            if life.first_scheduled_ns is None:
                life.first_scheduled_ns = start_ns
                life.first_token_ns = life.first_sent_ns = end_ns
        if step_id % (STEPS_A_SECOND // 2) == 0:
            life = open_.pop(0)
            life.finished_ns, life.sent_ns = end_ns, time.monotonic_ns()
            life.prompt_tokens, life.finish_reason = 100, "length"
            observer.request_closed(life)


if __name__ == "__main__":
    main()
