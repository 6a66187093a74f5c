"""What the hooks cost vLLM: a step of its own scheduler at a batch of 16, and the steps of a real
server with the hooks out and in by turns.

The scheduler is driven without a model, the server runs SmolLM2 with 16 streams; both switch the
hooks every 8 steps within one run, for two runs differ by more than the hooks cost. Needs
.venv-vllm (`make setup-vllm`).

    python tests/overhead/bench_vllm_hooks.py [--seconds S] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))

from vllm_lab import (  # noqa: E402
    ENVIRONMENT,
    MODELS,
    VLLM,
    Overlay,
    Server,
    one_server_at_a_time,
    site_packages,
    wheel_of_dsagent,
)  # fmt: skip

HOOKS_BAR_US = 25.0
SLOWDOWN_BAR = 0.01
STREAMS = 16
TOKENS = 160


def environment(folder: Path) -> Overlay:
    """vLLM with the plug-in, and with the one that switches it."""
    overlay = Overlay.make(folder / "env")
    overlay.pip("install", "--quiet", str(wheel_of_dsagent(folder / "wheel")))
    site = site_packages(overlay.path)
    (site / "vllm_toggle.py").write_text((Path(__file__).with_name("vllm_toggle.py")).read_text())
    info = site / "dsagent_toggle-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsagent-toggle\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndsagent_toggle = vllm_toggle:register\n"
    )
    return overlay


def hooks_alone(overlay: Overlay, steps: int) -> dict[str, Any]:
    driver = ROOT / "tests" / "vllm" / "drive_scheduler.py"
    command = [str(overlay.path / "bin" / "python"), str(driver), str(MODELS / "smollm2"), "bench"]
    ran = subprocess.run(
        [*command, "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **ENVIRONMENT},
    )
    result = json.loads(ran.stdout.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def in_a_server(overlay: Overlay, folder: Path, seconds: float) -> dict[str, Any]:
    times = folder / "steps.jsonl"
    os.environ["DSAGENT_TOGGLE_FILE"] = str(times)
    with one_server_at_a_time():
        server = Server(overlay.path, "smollm2", folder, "--dtype", "float32")
        try:
            server.wait_until_up()
            until = time.monotonic() + seconds

            def stream(number: int) -> None:
                body = {"max_tokens": TOKENS, "ignore_eos": True}
                while time.monotonic() < until:
                    server.post("/v1/completions", {**body, "prompt": f"Number {number}"})

            threads = [threading.Thread(target=stream, args=(n,)) for n in range(STREAMS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            server.stop()
    steps = [json.loads(line) for line in times.read_text().splitlines()]
    return compare([(on, ns) for on, ns, running in steps if running == STREAMS])


def compare(steps: list[tuple[bool, int]]) -> dict[str, Any]:
    """Pairs of neighbouring blocks of 8, out and in: the median of their ratios, and its 95 %
    interval from 2,000 resamplings."""
    blocks: list[tuple[bool, list[int]]] = []
    for on, ns in steps:
        if not blocks or blocks[-1][0] != on:
            blocks.append((on, []))
        blocks[-1][1].append(ns)
    medians = [(on, statistics.median(block)) for on, block in blocks if len(block) >= 4]
    ratios = []
    for (on, one), (_, other) in itertools.pairwise(medians):
        ratios.append(one / other - 1 if on else other / one - 1)
    if not ratios:
        raise SystemExit("bench: no steps at the full batch; give it more --seconds")
    generator = random.Random(1)
    means = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "steps": len(steps),
        "step_ms": round(statistics.median(ns for _, ns in steps) / 1e6, 2),
        "slowdown": round(statistics.median(ratios), 5),
        "low": round(means[50], 5),
        "high": round(means[1949], 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=800, help="of the driven scheduler")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="of load on the server; 0: none"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    if not (VLLM / "bin" / "vllm").exists():
        print(f"no vLLM in {VLLM}: make setup-vllm", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overlay = environment(folder)
        alone = hooks_alone(overlay, arguments.steps)
        served = in_a_server(overlay, folder, arguments.seconds) if arguments.seconds else None
    if arguments.json:
        bars = {"hooks_bar_us": HOOKS_BAR_US, "slowdown_bar": SLOWDOWN_BAR}
        print(json.dumps({"alone": alone, "server": served, **bars}))
        return 0
    print(
        f"scheduler's hooks, batch {alone['batch']}: {alone['hooks_us']} µs a step"
        f" ({alone['without_us']} µs without, {alone['with_us']} with; medians of"
        f" {alone['steps']} steps); bar {HOOKS_BAR_US:.0f} µs"
    )
    if served is not None:
        print(
            f"in a server, {STREAMS} streams, steps of {served['step_ms']} ms:"
            f" {served['slowdown']:+.2%} (95 %: {served['low']:+.2%} to {served['high']:+.2%},"
            f" {served['steps']} steps); bar {SLOWDOWN_BAR:.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
