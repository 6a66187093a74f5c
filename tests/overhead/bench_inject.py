"""How long a process pauses when hooks are put into it, and taken out: what the injector says, and
what the process itself sees as the longest gap in a busy loop.

In a Python process without vLLM all of the hooks' source is loaded, and given
up since there is nothing to hook; with vLLM's environment (make setup-vllm),
in each process of a server that answers three streams.

    python tests/overhead/bench_inject.py [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from dsagent.agent.inject import hooks, way_in
from dsagent.agent.inject.injection import run_inside

BAR_MS = 1000.0
VLLM_LAB = Path(__file__).resolve().parents[1] / "vllm"

# A side thread answers with the longest gap since it was last asked, in ns.
BUSY = """
import sys, threading, time
longest = 0
def answer():
    global longest
    for _ in sys.stdin:
        print(longest, flush=True)
        longest = 0
threading.Thread(target=answer, daemon=True).start()
print("ready", flush=True)
last = time.monotonic_ns()
while True:
    now = time.monotonic_ns()
    longest = max(longest, now - last)
    last = now
"""


def alone(rounds: int) -> dict[str, Any]:
    source = hooks.source_to_put(())
    said: list[float] = []
    seen: list[float] = []
    idle: list[float] = []
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            for _ in range(rounds):
                for gaps, inject in ((idle, False), (seen, True)):
                    _ask(process)
                    if inject:
                        outcome = run_inside(process.pid, source)
                        assert outcome.report is not None
                        assert hooks.NOTHING_HERE in outcome.report.message
                        said.append(outcome.pause_ns / 1e6)
                    gaps.append(_ask(process) / 1e6)
        finally:
            process.kill()
    return {"said_ms": said, "seen_ms": seen, "idle_ms": idle}


def _ask(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def in_vllm(rounds: int) -> dict[str, dict[str, list[float]]] | None:
    """By process: pauses of putting in and of taking out, ms. None without vLLM's environment."""
    sys.path.insert(0, str(VLLM_LAB))
    from vllm_lab import MODELS, VLLM, Server, one_server_at_a_time

    if not (VLLM / "bin" / "vllm").exists() or not (MODELS / "smollm2").exists():
        return None
    pauses: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"in": [], "out": []})
    stop = threading.Event()
    with one_server_at_a_time(), tempfile.TemporaryDirectory() as folder:
        server = Server(VLLM, "smollm2", Path(folder), "--dtype", "float32")

        def stream() -> None:
            while not stop.is_set():
                server.post("/v1/completions", {"prompt": "Once", "max_tokens": 64})

        streams = [threading.Thread(target=stream) for _ in range(3)]
        try:
            server.wait_until_up()
            found = way_in.processes(server.pid)
            for each in streams:
                each.start()
            for _ in range(rounds):
                for process in found:
                    outcome = run_inside(process.pid, hooks.source_to_put(process.roles))
                    pauses[process.comm]["in"].append(outcome.pause_ns / 1e6)
                for done in way_in.take(found):
                    assert done.outcome is not None
                    pauses[done.process.comm]["out"].append(done.outcome.pause_ns / 1e6)
        finally:
            stop.set()
            for each in streams:
                if each.ident is not None:
                    each.join(60)
            server.stop()
    return dict(pauses)


def _line(what: str, values: list[float]) -> str:
    return f"{what:<34} median {statistics.median(values):>6.1f} ms, most {max(values):>6.1f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    plain, vllm = alone(arguments.rounds), in_vllm(arguments.rounds)
    if arguments.json:
        print(json.dumps({"alone": plain, "vllm": vllm, "bar_ms": BAR_MS}))
        return 0
    print(_line("a busy Python: as told", plain["said_ms"]))
    print(_line("a busy Python: its longest gap", plain["seen_ms"]))
    print(_line("a busy Python: gap without", plain["idle_ms"]))
    if vllm is None:
        print("in vLLM: not measured, its environment is not there")
    for comm, pauses in (vllm or {}).items():
        print(_line(f"{comm}: hooks in", pauses["in"]))
        print(_line(f"{comm}: hooks out", pauses["out"]))
    print(f"the bar is {BAR_MS:.0f} ms a process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
