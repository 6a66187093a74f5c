"""An engine without a model: the real observer and rings, steps of a few milliseconds.

`python shell_engine.py [STEP_MS]` prints "ready PID" and obeys lines on stdin:
`request ID [TRACEPARENT]` runs one request of six steps, `open ID` begins one
and runs no step for it, `step MS` begins a step that lasts MS, `exec` begins the
same program anew in the same process, `quit` ends. Further arguments are not looked at.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from dsagent.engine.observe import RequestLife, StepReport, StepShare
from dsagent.instrumentation.reference import ReferenceObserver


class FakeEngine:
    def __init__(self, step_ms: float) -> None:
        self.observer = ReferenceObserver(engine_id=os.getpid() << 20 | 7)
        self.step_ns = round(step_ms * 1e6)
        self.step_id = 0
        self.work: list[str] = []
        self.wake = threading.Condition()
        self.done: dict[str, int] = {}
        self.ready = threading.Event()

    def step(self, request_id: str, prefill: bool, ns: int, context: int) -> StepReport:
        self.step_id += 1
        start_ns = time.monotonic_ns()
        self.observer.step_started(self.step_id, start_ns)
        while time.monotonic_ns() - start_ns < ns:
            time.sleep(ns / 4e9)
        end_ns = time.monotonic_ns()
        forward_ns = end_ns - start_ns - 200_000
        share = StepShare(request_id, prefill, 40 if prefill else 1, 0, context, 1, False)
        report = StepReport(
            step_id=self.step_id,
            start_ns=start_ns,
            end_ns=end_ns,
            schedule_ns=50_000,
            prepare_ns=50_000,
            forward_ns=max(0, forward_ns),
            sample_ns=50_000,
            output_ns=50_000,
            prefill_tokens=40 if prefill else 0,
            decode_tokens=0 if prefill else 1,
            waiting=0,
            running=1,
            preempted=0,
            kv_blocks_used=3,
            kv_blocks_total=64,
            admission=0,
            graph=False,
            shares=(share,),
        )
        self.observer.step_finished(report)
        return report

    def loop(self) -> None:
        while True:
            with self.wake:
                while not self.work:
                    self.observer.idle()
                    self.ready.set()
                    self.wake.wait()
                word = self.work.pop(0)
            if word.startswith("step "):
                self.step("nobody", True, round(float(word.split()[1]) * 1e6), 0)
                continue
            ends = []
            for index in range(6):
                report = self.step(word, index == 0, self.step_ns, 40 + index if index else 0)
                ends.append((report.start_ns, report.end_ns))
            self.serve_end(word, ends)

    def serve_end(self, word: str, ends: list[tuple[int, int]]) -> None:
        with self.wake:
            self.ends = ends
            self.done[word] = ends[-1][1]
            self.wake.notify_all()

    def life(self, request_id: str, traceparent: str | None) -> RequestLife:
        life = RequestLife(
            request_id, "chat", "fake", time.monotonic_ns(), traceparent, f"ext-{request_id}"
        )
        self.observer.request_opened(life)
        return life

    def request(self, request_id: str, traceparent: str | None) -> None:
        life = self.life(request_id, traceparent)
        life.tokenised_ns = life.queued_ns = time.monotonic_ns()
        with self.wake:
            self.work.append(request_id)
            self.wake.notify_all()
            self.wake.wait_for(lambda: request_id in self.done)
            ends = self.ends
        life.first_scheduled_ns = ends[0][0]
        life.first_token_ns = ends[0][1]
        life.first_sent_ns = ends[0][1] + 100_000
        life.finished_ns = ends[-1][1]
        life.sent_ns = time.monotonic_ns()
        life.prompt_tokens, life.output_tokens, life.finish_reason = 40, 6, "length"
        self.observer.request_closed(life)


def main() -> None:
    engine = FakeEngine(float(sys.argv[1]) if len(sys.argv) > 1 else 3.0)
    threading.Thread(target=engine.loop, daemon=True).start()
    engine.ready.wait()
    print(f"ready {os.getpid()}", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "request":
            engine.request(words[1], words[2] if len(words) > 2 else None)
        elif words[0] == "open":
            engine.life(words[1], None)
        elif words[0] == "step":
            with engine.wake:
                engine.work.append(line.strip())
                engine.wake.notify_all()
        elif words[0] == "exec":
            os.execv(sys.executable, [sys.executable, *sys.argv])
        elif words[0] == "quit":
            return
        print(f"done {line.strip()}", flush=True)


if __name__ == "__main__":
    main()
