"""The engine against its peers: tokens a second on SmolLM2 in float32, with 1, 4 and 8 streams.

python tests/overhead/bench_engine.py [--json] [--rounds N]

Each contender is a process of its own, stopped (SIGSTOP) while another one is measured; they take
turns, so that whatever else the machine does falls on all of them. vLLM takes part where
.venv-vllm/bin/python (or $DSAGENT_VLLM_PYTHON) has it. The ceiling is what bare matrix products of
the same shapes reach on plain weights; the engine packs its weights once, and can exceed it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))

from make_models import smollm2_weights

PROMPT_TOKENS = 8  # short, so that the figures are of decoding
NEW_TOKENS = 32
STREAMS = (1, 4, 8)
BARS = {("vllm", 1): 1.1, ("vllm", 4): 1.3, ("vllm", 8): 1.3}
BARS |= {("transformers", streams): 1.0 for streams in STREAMS}
ROOT = Path(__file__).resolve().parent.parent.parent
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Contender:
    """A process group that runs only while it is asked something."""

    def __init__(self, name: str, python: str, folder: str) -> None:
        self.name = name
        environment = os.environ | (VLLM_ENVIRONMENT if name == "vllm" else {})
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("engine_contender.py")), name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=environment,
        )
        self.load_s = self._answer("ready")
        self.resident_bytes = self._resident_bytes()
        self._signal(signal.SIGSTOP)

    def seconds(self, streams: int, seed: int) -> float:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{streams} {PROMPT_TOKENS} {NEW_TOKENS} {seed}\n")
        self._process.stdin.flush()
        took = self._answer("took")
        self._signal(signal.SIGSTOP)
        return took

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self, word: str) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # libraries print there too
            if line.startswith(word + " "):
                return float(line.split()[1])
        raise SystemExit(f"bench: {self.name} ended before it said {word!r}")

    def _resident_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def pythons() -> dict[str, str]:
    found = dict.fromkeys(("ceiling", "engine", "transformers"), sys.executable)
    vllm = Path(os.environ.get("DSAGENT_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    return found | ({"vllm": str(vllm)} if vllm.exists() else {})


def measure(rounds: int) -> dict[str, Any]:
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        smollm2_weights(Path(folder))
        contenders: list[Contender] = []
        try:
            for name, python in pythons().items():
                print(f"bench: loading {name}", file=sys.stderr, flush=True)
                contenders.append(Contender(name, python, folder))
            for turn in range(rounds):
                for streams in STREAMS:
                    # Whoever is measured first differs from round to round.
                    order = contenders[turn % len(contenders) :] + contenders
                    for contender in order[: len(contenders)]:
                        took_s = contender.seconds(streams, seed=1000 * turn + streams)
                        rates[contender.name, streams].append(streams * NEW_TOKENS / took_s)
                print(f"bench: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            engine = next(it for it in contenders if it.name == "engine")
            return {
                "load_s": round(engine.load_s, 1),
                "resident_bytes": engine.resident_bytes,
                "rows": [row(name, streams, rates) for name, streams in rates],
            }
        finally:
            for contender in contenders:
                contender.close()


def row(name: str, streams: int, rates: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    own = rates[name, streams]
    ratios = [engine / other for engine, other in zip(rates["engine", streams], own, strict=True)]
    return {
        "contender": name,
        "streams": streams,
        "tokens_per_second": round(statistics.median(own), 1),
        "least": round(min(own), 1),
        "most": round(max(own), 1),
        "engine_ratio": round(statistics.median(ratios), 2),
        "bar": BARS.get((name, streams)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = measure(options.rounds)
    if options.json:
        print(json.dumps({"engine": result}))
        return
    print(f"{PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new; median of {options.rounds} rounds")
    for row in sorted(result["rows"], key=lambda row: row["streams"]):
        line = (
            f"  {row['streams']} streams  {row['contender']:<13}{row['tokens_per_second']:>7.1f} "
            f"tokens/s ({row['least']:.1f} to {row['most']:.1f})"
        )
        if row["contender"] != "engine":
            line += f"   engine / {row['contender']} = {row['engine_ratio']:.2f}"
        if row["bar"]:
            line += f", bar {row['bar']}"
        print(line)
    print(
        f"engine ready after {result['load_s']} s (bar 15), "
        f"{result['resident_bytes'] / 2**20:.0f} MiB resident (bar 2048)"
    )


if __name__ == "__main__":
    main()
