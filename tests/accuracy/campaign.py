"""One run of the laboratory: for each kind of engine one, with one agent, the faults by turns."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from baseline import learn, read_facts
from bench import Bench, Injector
from decoy import decoy
from judge import cases
from lab import Engine, Observed, agent, engine
from load import Load, send, text
from score import Case
from truth import Evidence, Injection, KernelAccounts, hurts

CPU_CONTROLLER = Path("/sys/fs/cgroup/cpu")
_SMOLLM2 = ("--max-num-batched-tokens", "256", "--max-model-len", "2048")
# One engine each: its model, flags, and how long the load's replies are.
ENGINES: dict[str, tuple[str, tuple[str, ...], tuple[int, int]]] = {
    "smollm2": ("smollm2", _SMOLLM2, (10, 24)),
    "smollm2, one thread": ("smollm2", (*_SMOLLM2, "--threads", "1"), (10, 24)),
    "tiny-llama": ("tiny-llama", ("--max-num-seqs", "8", "--num-kv-blocks", "160"), (30, 80)),
}
CLIENTS = 4
CLIENTS_NICENESS = 10
REDRAWS = 2  # of an injection that hurt nobody


@dataclass(slots=True)
class Outcome:
    """What a run brought."""

    cases: list[Case] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)
    summaries: list[dict[str, object]] = field(default_factory=list)


Say = Callable[[str], None]


def run(injectors: Sequence[Injector], *, seed: int, budget_s: float, say: Say) -> Outcome:
    """Each engine gets its part of the budget, by how many faults it serves."""
    outcome = Outcome()
    for name in dict.fromkeys(injector.engine for injector in injectors):
        mine = [injector for injector in injectors if injector.engine == name]
        share_s = budget_s * len(mine) / len(injectors)
        with tempfile.TemporaryDirectory(prefix="dsagent-lab-") as folder:
            evidence, observed = _one_engine(
                name, mine, Path(folder), seed, time.monotonic() + share_s, say, outcome
            )
            for source in observed.summary["sources"]:
                say(f"{name}: source {source['name']} {source['state']} {source['reason']}")
            facts = read_facts(observed.directory)
            learn(facts, list(evidence.unharmed()))
            outcome.cases += cases(evidence, facts)
            outcome.evidence.append(evidence)
            outcome.summaries.append(observed.summary)
    return outcome


def _one_engine(
    name: str,
    injectors: Sequence[Injector],
    folder: Path,
    seed: int,
    deadline_s: float,
    say: Say,
    outcome: Outcome,
) -> tuple[Evidence, Observed]:
    dice = random.Random(f"{seed} {name}")
    model, flags, max_tokens = ENGINES[name]
    injections: list[Injection] = []
    with (
        engine(model, *flags) as target,
        own_cgroup(target.pid) as cgroup,
        agent(target.pid, folder) as observed,
        KernelAccounts(target.pid) as kernel,
        Load(target, clients=CLIENTS, max_tokens=max_tokens, seed=seed) as load,
    ):
        # The clients step aside, or they would be a fault of their own on so few cores.
        os.setpriority(os.PRIO_PROCESS, 0, CLIENTS_NICENESS)
        bench = Bench(target, load, cgroup)
        warm(target, load, dice)
        todo = []
        for injector in injectors:
            reason = injector.refused(bench)
            if reason:
                outcome.not_run[injector.fault.name] = reason
            else:
                todo.append(injector)
        rounds = 0
        while todo and (not rounds or time.monotonic() < deadline_s):
            rounds += 1
            for injector in dice.sample(todo, len(todo)):
                _inject(injector, bench, dice, say, injections)
            say(f"{name}: round {rounds} done, {max(0, deadline_s - time.monotonic()):.0f} s left")
    sent = list(load.sent) + [one for burst in bench.bursts for one in burst.sent]
    evidence = Evidence(
        faults={injector.fault.name: injector.fault for injector in injectors},
        injections=injections,
        accounts=observed.accounts,
        sent=sent,
        waited_least=kernel.waited_least,
        waited_most=kernel.waited_most,
        stolen=kernel.stolen,
    )
    return evidence, observed


def warm(target: Engine, load: Load, dice: random.Random) -> None:
    """Enough clean steps of every kind for the model to know them."""
    for clients in range(1, CLIENTS + 1):
        load.set_clients(clients)
        load.wait_for(3 * clients + 3)
        for words in (60, 200):
            send(target, text(dice, words), 2, dice)


def _inject(
    injector: Injector,
    bench: Bench,
    dice: random.Random,
    say: Say,
    injections: list[Injection],
) -> None:
    """With another load each time; drawn again where it hurt nobody."""
    for _ in range(1 + REDRAWS):
        bench.load.set_clients(dice.randint(1, CLIENTS))
        bench.load.wait_for(dice.randint(2, 4))
        with decoy(injector.fault, bench, dice):
            injection = injector.inject(bench, dice)
        injections.append(injection)
        bench.load.wait_for(bench.load.clients)  # those that were there have ended
        sent = [*bench.load.sent, *(one for burst in bench.bursts for one in burst.sent)]
        hurt = injector.fault.name == "none" or hurts(injection, injector.fault, sent, injections)
        seconds = (injection.end_ns - injection.start_ns) / 1e9
        say(f"{injector.fault.name}: {seconds:.2f} s{'' if hurt else ', hurt nobody'}")
        if hurt:
            return


@contextmanager
def own_cgroup(pid: int) -> Iterator[Path | None]:
    """The engine in a cgroup (v1, cpu) of its own; None where there is no such controller."""
    home = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    path = next((line.split(":")[2] for line in home if ":cpu:" in line or ":cpu," in line), None)
    parent = None if path is None else CPU_CONTROLLER / path.lstrip("/")
    group = None if parent is None else parent / f"dsagent-lab-{pid}"
    try:
        if group is not None and parent is not None:
            group.mkdir()
            # As much as that many lone busy tasks: a hog outside is its equal on each CPU.
            group.joinpath("cpu.shares").write_text(str(1024 * (os.cpu_count() or 1)))
            group.joinpath("cgroup.procs").write_text(str(pid))
    except OSError:
        group = None
    try:
        yield group
    finally:
        if group is not None and parent is not None:
            with suppress(ProcessLookupError):
                parent.joinpath("cgroup.procs").write_text(str(pid))
            with suppress(OSError):  # somebody is still in it: it goes with them
                os.rmdir(group)
