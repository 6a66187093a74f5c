"""llama.cpp's own server with a small real model, and a client that keeps its times."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.port = 4096, 2, 0
params.cpuparams.n_threads = 1  # two would wait for each other, spinning
params.endpoint_metrics = True
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.readline()
"""


@dataclass(slots=True)
class Asked:
    """One request as its client saw it; times are CLOCK_MONOTONIC."""

    trace_id: str
    begun_ns: int
    texts_ns: list[int] = field(default_factory=list)
    ended_ns: int = 0

    @property
    def ttft_ns(self) -> int:
        return self.texts_ns[0] - self.begun_ns

    @property
    def tpot_ns(self) -> float:
        return (self.texts_ns[-1] - self.texts_ns[0]) / (len(self.texts_ns) - 1)


class LlamaServer:
    """Runs from entering to leaving, with the model in this GGUF file."""

    def __init__(self, model: Path) -> None:
        self._model = model

    def __enter__(self) -> LlamaServer:
        pytest.importorskip("xllamacpp")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(self._model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "the server did not start"
        self.pid = self.process.pid
        self._count = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, tokens: int, prompt: str = "Once upon a time") -> Asked:
        """A streamed completion with a trace context of its own; the answer is not looked at."""
        self._count += 1
        trace_id = f"{0xABC0 + self._count:032x}"
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"traceparent": f"00-{trace_id}-00000000000000aa-01"},
        )
        asked = Asked(trace_id, time.monotonic_ns())
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                if line.startswith(b"data: {") and b'"text":""' not in line:
                    asked.texts_ns.append(time.monotonic_ns())
        asked.ended_ns = time.monotonic_ns()
        return asked

    def ask_together(self, count: int, tokens: int) -> list[Asked]:
        found: list[Asked] = []
        threads = [
            threading.Thread(target=lambda: found.append(self.ask(tokens))) for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        return next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " ")
        )
