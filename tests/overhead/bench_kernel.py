"""The kernel source: attaching, memory, what it slows down, what its programs take on an engine.

python tests/overhead/bench_kernel.py [--json] [--blocks N]

The ping-pong does nothing but switch, the worst that a target can do; a step of
an engine switches some tens of times. Blocks with and without the source
alternate within one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_cost import of_engine

from dsagent.agent.facts import Target
from dsagent.agent.sources.kernel import KernelSource

BLOCK_S = 0.5
MODELS = ("tiny-llama", "smollm2")
STATS = Path("/proc/sys/kernel/bpf_stats_enabled")
PING_PONG = r"""
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
struct shared { atomic_uint turn; };
static void pass(struct shared *s, unsigned next)
{
	atomic_store(&s->turn, next);
	syscall(SYS_futex, &s->turn, FUTEX_WAKE, 1, 0, 0, 0);
}
static void wait_for(struct shared *s, unsigned mine)
{
	unsigned now;
	while ((now = atomic_load(&s->turn)) != mine)
		syscall(SYS_futex, &s->turn, FUTEX_WAIT, now, 0, 0, 0);
}
int main(int argc, char **argv)
{
	struct shared *s = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	cpu_set_t one;
	CPU_ZERO(&one);
	CPU_SET(atoi(argv[1]), &one);
	sched_setaffinity(0, sizeof(one), &one);
	if (!fork()) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;) { wait_for(s, 1); pass(s, 0); }
	}
	puts("ready");
	fflush(stdout);
	for (double seconds; scanf("%lf", &seconds) == 1;) {
		struct timespec a, b;
		long trips = 0;
		double took;
		clock_gettime(CLOCK_MONOTONIC, &a);
		do {
			for (int i = 0; i < 100; i++) { pass(s, 1); wait_for(s, 0); trips++; }
			clock_gettime(CLOCK_MONOTONIC, &b);
			took = (b.tv_sec - a.tv_sec) + (b.tv_nsec - a.tv_nsec) / 1e9;
		} while (took < seconds);
		printf("%.1f\n", took * 1e9 / trips);
		fflush(stdout);
	}
	return 0;
}
"""


# Maps memory, touches it page by page, unmaps it: the worst for who pays for page faults.
FAULTS = """
import ctypes, mmap, sys, time
def turn():
    memory = mmap.mmap(-1, 256 * mmap.PAGESIZE)
    memory.madvise(15)  # MADV_NOHUGEPAGE
    view = ctypes.c_char.from_buffer(memory)
    ctypes.memset(ctypes.addressof(view), 1, 256 * mmap.PAGESIZE)
    del view
    memory.close()
print("ready", flush=True)
for line in sys.stdin:
    turns, began = 0, time.perf_counter_ns()
    while time.perf_counter_ns() - began < float(line) * 1e9:
        turn()
        turns += 1
    print((time.perf_counter_ns() - began) / turns / 256, flush=True)
"""


class Game:
    """A process that does one thing as long as it is told; `block` gives nanoseconds a turn."""

    def __init__(self, *command: str | Path) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def block(self, seconds: float) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def ping_pong(cpu: int = 0) -> Iterator[Game]:
    """Two processes on one CPU that wake each other: a round trip is two switches and two
    wake-ups."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "pingpong.c", Path(folder) / "pingpong"
        source.write_text(PING_PONG)
        subprocess.run(["cc", "-O2", "-o", program, source], check=True)
        game = Game(program, str(cpu))
        try:
            yield game
        finally:
            game.close()


@contextmanager
def attached(pid: int, **how: Any) -> Iterator[KernelSource]:
    source = KernelSource(Target(pid, 0, 0, "bench", (), "reference"), {}, **how)
    source.start()
    try:
        yield source
    finally:
        source.stop()


def start_ms(pid: int) -> dict[str, float]:
    """From nothing to attached, threads found."""
    took = []
    for _ in range(7):
        began = time.perf_counter()
        with attached(pid):
            took.append((time.perf_counter() - began) * 1000)
    return {"median": round(statistics.median(took), 1), "most": round(max(took), 1)}


def slowdown(game: Game, watched_pid: int, blocks: int) -> dict[str, float]:
    """Round trips without and with a source that watches `watched_pid`."""
    without, beside = [], []
    for _ in range(blocks):
        without.append(game.block(BLOCK_S))
        with attached(watched_pid) as source:
            beside.append(game.block(BLOCK_S))
            source.poll(time.monotonic_ns())
    off, on = statistics.median(without), statistics.median(beside)
    return {
        "without_ns": round(off),
        "with_ns": round(on),
        "ratio": round(on / off, 3),
        "added_ns_a_switch": round((on - off) / 2),
    }


def memory() -> dict[str, float]:
    """What a process grows by when the source runs in it, and what the kernel holds for it (its
    maps and programs), in bytes."""
    script = """
import json, os, pathlib, time
from dsagent.agent.host import procfs
from dsagent.agent.facts import Target
from dsagent.agent.sources.kernel import KernelSource
source = KernelSource(Target(os.getppid(), 0, 0, "bench", (), "reference"), {})
before = procfs.pss_bytes(os.getpid())
source.start()
for _ in range(20):
    time.sleep(0.05)
    source.poll(time.monotonic_ns())
after = procfs.pss_bytes(os.getpid())
held = {}
for info in pathlib.Path("/proc/self/fdinfo").iterdir():
    try:
        fields = dict(x.split(":", 1) for x in info.read_text().splitlines() if ":" in x)
    except FileNotFoundError:
        continue
    for kind in ("map_id", "prog_id"):
        if kind in fields and "memlock" in fields:
            held[kind, int(fields[kind])] = int(fields["memlock"])
print(json.dumps({"process_bytes": after - before, "kernel_bytes": sum(held.values())}))
"""
    said = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(said.stdout)
    return found


def per_run_ns(game: Game, watched_pid: int) -> dict[str, float]:
    """The kernel's own account (bpf_stats_enabled), and what the source says of itself."""
    before = STATS.read_text()
    STATS.write_text("1")
    try:
        with attached(watched_pid) as source:
            mine = programs_of_self()
            game.block(1.0)
            listed = subprocess.run(
                ["bpftool", "--json", "prog", "show"], check=True, capture_output=True, text=True
            )
            runs = {
                program["name"]: program["run_time_ns"] / program["run_cnt"]
                for program in json.loads(listed.stdout)
                if program["id"] in mine and program.get("run_cnt")
            }
    finally:
        STATS.write_text(before)
    with attached(watched_pid) as source:
        began = time.thread_time_ns()
        trip_ns = game.block(1.0)
        source.poll(time.monotonic_ns())
        poll_ns = time.thread_time_ns() - began
        said_ns = (source.status().cost_ns - poll_ns) * trip_ns / 1e9 / 4
    return {
        "on_switch": round(runs["on_switch"]),
        "on_waking": round(runs["on_waking"]),
        "self_timed_mean": round(said_ns),
    }


def programs_of_self() -> set[int]:
    found = set()
    for info in Path("/proc/self/fdinfo").iterdir():
        try:
            text = info.read_text()
        except FileNotFoundError:  # the folder's own descriptor
            continue
        found |= {int(x.split()[1]) for x in text.splitlines() if x.startswith("prog_id:")}
    return found


def consumer(game: Game) -> dict[str, float]:
    """Facts a second through poll(), from a full ring; and a poll that finds nothing long."""
    rates, empty = [], []
    for _ in range(5):
        with attached(game.process.pid, exact_ns=1, ring_bytes=1 << 22) as source:
            game.block(0.5)
            began = time.perf_counter()
            count = len(source.poll(time.monotonic_ns()).facts)
            rates.append(count / (time.perf_counter() - began))
        with attached(game.process.pid) as source:
            source.poll(time.monotonic_ns())
            began = time.perf_counter()
            source.poll(time.monotonic_ns())
            empty.append((time.perf_counter() - began) * 1e6)
    return {
        "facts_per_second": round(statistics.median(rates)),
        "empty_poll_us": round(statistics.median(empty)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=15, help="of each kind")
    options = parser.parse_args()
    with ping_pong() as game, subprocess.Popen(["sleep", "infinity"]) as other:
        faults = Game(sys.executable, "-S", "-c", FAULTS)
        try:
            pid = game.process.pid
            figures = {
                "start_ms": start_ms(pid),
                "memory": memory(),
                "target": slowdown(game, pid, options.blocks),
                "bystander": slowdown(game, other.pid, options.blocks),
                "faulting_bystander": slowdown(faults, other.pid, options.blocks),
                "run_ns_target": per_run_ns(game, pid),
                "run_ns_bystander": per_run_ns(game, other.pid),
                "consumer": consumer(game),
            }
        finally:
            other.kill()
            faults.close()
    engines = {model: of_engine(model) for model in MODELS}
    if options.json:
        print(json.dumps({"kernel": figures, "engines": engines}))
        return
    print(told(figures))
    for model, found in engines.items():
        print(told_of_engine(model, found))


def told(figures: dict[str, dict[str, float]]) -> str:
    start, held, rate = figures["start_ms"], figures["memory"], figures["consumer"]
    lines = [
        f"load and attach all programs: {start['median']} ms (most {start['most']}); "
        "the bar is 300 ms",
        f"memory: {held['process_bytes'] / 1e6:.1f} MB in the process and "
        f"{held['kernel_bytes'] / 1e6:.1f} MB in the kernel; the bar is 30 MB",
        f"facts read: {rate['facts_per_second'] / 1e6:.1f} million/s and core; the bar is 2; "
        f"an empty poll takes {rate['empty_poll_us']} us",
    ]
    for name, what, bar in (
        ("target", "futex ping-pong that is watched", 1.5),
        ("bystander", "futex ping-pong that is not", 1.05),
        ("faulting_bystander", "page faults of a process that is not", 1.05),
    ):
        each = figures[name]
        lines.append(
            f"{what}: {each['with_ns']} ns instead of {each['without_ns']}, "
            f"{each['ratio']:.3f} times; the bar is {bar}"
        )
    for name, whose in (("run_ns_target", "watched"), ("run_ns_bystander", "not watched")):
        each = figures[name]
        lines.append(
            f"a run there, {whose}: on_switch {each['on_switch']} ns, on_waking "
            f"{each['on_waking']} ns as the kernel times them, {each['self_timed_mean']} ns "
            "by our own account"
        )
    return "\n".join(lines)


def told_of_engine(model: str, found: dict[str, Any]) -> str:
    lines = []
    for tier in ("core", "default"):
        each = found[tier]
        lines.append(
            f"{model}, {each['steps_per_s']:.0f} steps/s, tier {tier}: {each['own_ratio']:.2%} of "
            f"its CPUs by our own account, {each['timed_ratio']:.2%} as the kernel times them"
        )
    for name, program in found["default"]["programs"].items():
        lines.append(f"  {name:18}{program['runs_per_s']:10.1f}/s{program['ns_a_run']:6} ns")
    said = found["attach"]
    became = f"{said['kernel']}{': ' if said['reason'] else ''}{said['reason']}"
    lines.append(
        f"{model}, dsagent attach: overhead {said['overhead_ratio']:.2%}, the bar is 1 %; "
        f"kernel source {became}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
