"""The step ring beside gRPC over loopback, for the same records: what the writer pays, how many
records come through, how long one is under way.

A record is a step of 64 shares in the ring's own encoding; another process takes it and makes a
Step of it. By gRPC it goes as a stream, or as a call each, of the bytes as they are: no protobuf is
made, which would cost more. The reader of the ring looks every millisecond, or every 200 ms, as the
agent does: nobody waits for the agent, and the ring keeps what it has not looked at.

    python tests/overhead/bench_ring_grpc.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))

from made import step

from dsagent.instrumentation.layout import RecordKind, Role
from dsagent.instrumentation.records import Step
from dsagent.instrumentation.ring import RingReader, find_rings
from dsagent.instrumentation.ring_writer import RingWriter
from dsagent.instrumentation.wire import Origin, decode, encode

SHARES = 64
MANY = 10_000  # as fast as they go
PACED, PERIOD_S = 500, 0.02  # 50 a second
CAPACITY_BYTES = 64 << 20  # holds MANY: nothing is to be lost
PATIENCE_S = 60.0
METHOD = "/bench/Steps"
ORIGIN = Origin(5, 4242, 4243, self_exported=False)
STEP = step(1, tuple(f"r{number}" for number in range(SHARES)))

Way = Callable[[Step], None]


# --- the process that takes them ---------------------------------------------------------------


class Taken:
    """Told on stdout when so many have come: when the last one did, how long each took."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._under_way_ns: list[int] = []
        self.done = threading.Event()

    def add(self, taken: Step) -> None:
        now_ns = time.monotonic_ns()
        self._under_way_ns.append(now_ns - taken.end_ns)
        if len(self._under_way_ns) == self._count:
            ordered = sorted(self._under_way_ns)
            answer = {
                "last_ns": now_ns,
                "p50_ms": statistics.median(ordered) / 1e6,
                "p99_ms": ordered[len(ordered) * 99 // 100] / 1e6,
            }
            print(json.dumps(answer), flush=True)
            self.done.set()


def take_from_ring(pid: int, count: int, every_s: float) -> None:
    (candidate,) = find_rings(pid)
    reader = RingReader.open(candidate)
    taken = Taken(count)
    print("ready", flush=True)
    while not taken.done.is_set():
        for record in reader.read():
            assert isinstance(record, Step)
            taken.add(record)
        time.sleep(every_s)
    assert reader.counters.uncounted_loss == reader.counters.lapped == 0
    reader.close()


def take_by_grpc(count: int) -> None:
    taken = Taken(count)

    def one(payload: bytes) -> None:
        made = decode(RecordKind.STEP, payload, ORIGIN)
        assert isinstance(made, Step)
        taken.add(made)

    def stream(payloads: Iterator[bytes], _context: Any) -> bytes:
        for payload in payloads:
            one(payload)
        return b""

    def call(payload: bytes, _context: Any) -> bytes:
        one(payload)
        return b""

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            if details.method == METHOD:
                return grpc.stream_unary_rpc_method_handler(stream)
            return grpc.unary_unary_rpc_method_handler(call)

    server = grpc.server(ThreadPoolExecutor(2), handlers=(Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"ready {port}", flush=True)
    taken.done.wait(PATIENCE_S)
    server.stop(1.0).wait(10)


@contextmanager
def taker(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, __file__, "--take", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
            process.wait(PATIENCE_S)
        finally:
            process.kill()


# --- the process that writes them --------------------------------------------------------------


@contextmanager
def by_ring(every_s: float, count: int) -> Iterator[tuple[Way, subprocess.Popen[str]]]:
    writer = RingWriter(role=Role.SCHEDULER, engine_id=5, capacity_bytes=CAPACITY_BYTES)
    try:
        with taker("ring", str(count), str(os.getpid()), str(every_s)) as (_, process):
            yield writer.write, process
    finally:
        writer.close()


@contextmanager
def by_stream(count: int) -> Iterator[tuple[Way, subprocess.Popen[str]]]:
    with taker("grpc", str(count)) as (ready, process):
        port = ready.split()[1]
        waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = channel.stream_unary(METHOD).future(iter(waiting.get, None))
            yield lambda record: waiting.put(encode(record)[1]), process
            waiting.put(None)
            answer.result(PATIENCE_S)


@contextmanager
def by_calls(count: int) -> Iterator[tuple[Way, subprocess.Popen[str]]]:
    with taker("grpc", str(count)) as (ready, process):
        port = ready.split()[1]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/bench/Step")
            yield lambda record: call(encode(record)[1], timeout=PATIENCE_S), process


WAYS: dict[str, Callable[[int], Any]] = {
    "ring, read every ms": lambda count: by_ring(0.001, count),
    "ring, read every 200 ms": lambda count: by_ring(0.2, count),
    "gRPC, a stream": by_stream,
    "gRPC, a call each": by_calls,
}


def measure(way: Callable[[int], Any]) -> dict[str, float]:
    ready = [replace(STEP, step_id=number + 1) for number in range(MANY)]
    with way(MANY) as (write, process):
        began_ns, cpu_s = time.monotonic_ns(), time.process_time()
        in_thread_ns = time.thread_time_ns()
        for record in ready:
            write(record)
        in_thread_ns = time.thread_time_ns() - in_thread_ns
        answer = json.loads(process.stdout.readline())
        cpu_s = time.process_time() - cpu_s
    seconds = (answer["last_ns"] - began_ns) / 1e9
    with way(PACED) as (write, process):
        for number in range(PACED):
            write(replace(STEP, step_id=number + 1, end_ns=time.monotonic_ns()))
            time.sleep(PERIOD_S)
        paced = json.loads(process.stdout.readline())
    return {
        "loop_us": in_thread_ns / MANY / 1e3,
        "process_us": cpu_s / MANY * 1e6,
        "records_per_second": MANY / seconds,
        "p50_ms": paced["p50_ms"],
        "p99_ms": paced["p99_ms"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--take", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.take:
        kind, count, *rest = arguments.take
        if kind == "ring":
            take_from_ring(int(rest[0]), int(count), float(rest[1]))
        else:
            take_by_grpc(int(count))
        return 0
    found = {name: measure(way) for name, way in WAYS.items()}
    if arguments.json:
        print(json.dumps({"ring_grpc": [{"way": name, **each} for name, each in found.items()]}))
        return 0
    print(f"{MANY:,} steps of {SHARES} shares; then 50 a second, for how long one is under way")
    print(f"{'':<25}{'loop µs':>9}{'process µs':>12}{'records/s':>11}{'p50 ms':>9}{'p99 ms':>9}")
    for name, each in found.items():
        print(
            f"{name:<25}{each['loop_us']:>9.1f}{each['process_us']:>12.1f}"
            f"{each['records_per_second']:>11,.0f}{each['p50_ms']:>9.2f}{each['p99_ms']:>9.2f}"
        )
    print("loop: CPU of the thread that writes; process: of its whole process, a record")
    return 0


if __name__ == "__main__":
    sys.exit(main())
