"""An engine that lies: `python hostile_engine.py names|counts` writes rings of its own.

names: true times and counts; every text it may choose holds escape codes, line breaks and what
labels are written with. counts: every second step claims four billion tokens, every second request
2**62. It prints "ready", then writes a request and a step ten times a second until it is killed.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from dsagent.instrumentation.records import Admission, Phase, RequestRecord, Share, Step
from dsagent.instrumentation.ring import RingWriter, Role

# Clears the screen, sets the title, breaks the line, forges a label, and reads backwards.
NASTY = 'x\x1b[2J\x1b]0;owned\x07\r\nforged{a="b"} 1\t"\\\u202eend\x9b31m'


def rename(comm: bytes) -> None:
    ctypes.CDLL(None).prctl(15, comm, 0, 0, 0)  # PR_SET_NAME


def step(step_id: int, key: int, *, absurd: bool) -> Step:
    now_ns = time.monotonic_ns()
    return Step(
        engine_id=os.getpid(),
        step_id=step_id,
        pid=os.getpid(),
        tid=os.getpid(),
        start_ns=now_ns - 5_000_000,
        end_ns=now_ns - 1_000_000,
        schedule_ns=0,
        prepare_ns=0,
        forward_ns=4_000_000,
        sample_ns=0,
        output_ns=0,
        prefill_tokens=(1 << 32) - 1 if absurd else 40,
        decode_tokens=0,
        waiting=0,
        running=1,
        preempted=0,
        kv_blocks_used=1,
        kv_blocks_total=64,
        admission=Admission.NO_PLACE,
        graph=False,
        shares=(Share(key, Phase.PREFILL, 40, 0, 40, 1, False),),
    )


def request(key: int, text: str, *, absurd: bool) -> RequestRecord:
    now_ns = time.monotonic_ns()
    return RequestRecord(
        request_key=key,
        request_id=f"{key}-{text}",
        trace_id=key,
        span_id=key,
        parent_span_id=None,
        sampled=True,
        operation=text[:40],
        model=text,
        tenant=text,
        external_id=text,
        pid=os.getpid(),
        tid=os.getpid(),
        received_ns=now_ns - 9_000_000,
        tokenised_ns=now_ns - 8_000_000,
        queued_ns=now_ns - 7_000_000,
        first_scheduled_ns=now_ns - 6_000_000,
        first_token_ns=now_ns - 900_000,
        first_sent_ns=now_ns - 800_000,
        finished_ns=now_ns - 700_000,
        sent_ns=now_ns - 600_000,
        prompt_tokens=1 << 62 if absurd else 40,
        output_tokens=1,
        cached_tokens=0,
        max_tokens=1,
        temperature=None,
        top_p=None,
        finish_reason=text[:40],
        error=text[:40],
    )


def main() -> None:
    text = NASTY if sys.argv[1] == "names" else "honest"
    rename(b"a\x1b[2J\nb\x07\xff")
    frontend = RingWriter(role=Role.FRONTEND, engine_id=os.getpid())
    scheduler = RingWriter(role=Role.SCHEDULER, engine_id=os.getpid())
    print("ready", flush=True)
    for number in range(1, 1 << 30):
        absurd = sys.argv[1] == "counts" and number % 2 == 0
        scheduler.write(step(number, number, absurd=absurd))
        frontend.write(request(number, text, absurd=absurd))
        time.sleep(0.1)


if __name__ == "__main__":
    main()
