"""A real engine that is stepped by hand, its requests arriving at given steps, and the agent's
own way from its rings to the accounts, in one process."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from dsagent.agent.attribution.account import Account
from dsagent.agent.attribution.accountant import Accountant
from dsagent.agent.facts import Target
from dsagent.agent.host import procfs
from dsagent.agent.sources.steps import StepsSource
from dsagent.engine.config import EngineConfig
from dsagent.engine.loader import LoadedModel, load_model
from dsagent.engine.loop import Engine
from dsagent.engine.observe import RequestLife
from dsagent.engine.request import SamplingParams, TokenOutput
from dsagent.engine.sequence import Sequence as Running
from dsagent.instrumentation.records import Step, request_key
from dsagent.instrumentation.reference import ReferenceObserver

ENGINE_ID = 1
# Of torch. A step of a millisecond is too short for a team that must meet ten times in it.
THREADS = {"smollm2": None, "tiny-llama": 1}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes just before a given step."""

    request_id: str
    at_step: int  # counted from the run's first
    prompt_tokens: int
    output_tokens: int


class PinnedEngine(Engine):
    """Between two steps a sequence can be put aside, its KV blocks kept, and be let on again."""

    def __init__(
        self, loaded: LoadedModel, observer: ReferenceObserver, threads: int | None
    ) -> None:
        config = EngineConfig(enable_prefix_cache=False, threads=threads)
        super().__init__(loaded, config, observer=observer, on_outputs=self._take)
        self.outputs: list[TokenOutput] = []
        self.vocab_size = loaded.model.vocab_size

    def _take(self, outputs: Sequence[TokenOutput]) -> None:
        self.outputs += outputs

    def put_aside(self, request_id: str) -> Running:
        running = self._scheduler.running
        sequence = next(s for s in running if s.request_id == request_id)
        running.remove(sequence)
        return sequence

    def let_on(self, sequence: Running) -> None:
        self._scheduler.running.append(sequence)


@dataclass(slots=True)
class Run:
    """What came of one run: its steps as the rings told them, the accounts made of them."""

    steps: list[Step] = field(default_factory=list)
    accounts: dict[str, Account] = field(default_factory=dict)  # by request id

    def steps_of(self, request_id: str) -> list[Step]:
        key = request_key(request_id)
        return [s for s in self.steps if any(share.request_key == key for share in s.shares)]


class Bench:
    """One engine, and the agent that watches it: rings, reader, accountant, model."""

    def __init__(self, model: str, seed: int) -> None:
        self.observer = ReferenceObserver(engine_id=ENGINE_ID)
        self.engine = PinnedEngine(load_model(model), self.observer, THREADS[model])
        self._dice = random.Random(f"{seed} {model}")
        self._lives: dict[str, RequestLife] = {}
        self._serial = 0
        # A first request makes the rings that the source looks for.
        self._drive([Arrival("first", 0, 8, 4)])
        self._source = StepsSource(_this_process())
        self._source.start()
        self._accountant = Accountant(self._source.attached_ns)
        self._accountant.source_off("kernel")

    def close(self) -> None:
        self._source.stop()
        self.observer.close()

    @property
    def clean_steps(self) -> int:
        return self._accountant.model.clean_steps

    def run(
        self,
        arrivals: Sequence[Arrival],
        *,
        beforehand: Arrival | None = None,
        resumes_at_step: int = 0,
    ) -> Run:
        """Steps until all have ended, then reads what the rings hold. The one that comes
        `beforehand` is prefilled before the first step of the run, waits aside, and decodes from
        the step `resumes_at_step` on. Between the first step and the last nothing else runs."""
        aside = None if beforehand is None else self._prefilled(beforehand)
        self._read()  # what lies before is no part of the run
        self._drive(
            arrivals,
            at_step={} if aside is None else {resumes_at_step: lambda: self.engine.let_on(aside)},
        )
        return self._read()

    def learn(self, steps: int) -> None:
        """Runs a mixed load until the model has seen that many more clean steps: prompts and
        batches of all sizes, none of them a case's own."""
        wanted = self.clean_steps + steps
        while self.clean_steps < wanted:
            arrivals = []
            for i in range(self._dice.randint(1, 7)):
                at_step, size = self._dice.randint(0, 4), self._dice.randint(12, 70)
                arrivals.append(Arrival(self.name(f"load{i}"), at_step, size, 12))
            size = round(16 * 64 ** self._dice.random())  # from 16 to 1,024, alike by octave
            arrivals.append(Arrival(self.name("long"), self._dice.randint(3, 8), size, 4))
            self.run(arrivals)

    def name(self, what: str) -> str:
        """A request id that no other run has."""
        self._serial += 1
        return f"{what}-{self._serial}"

    def _prefilled(self, arrival: Arrival) -> Running:
        self._arrive(arrival)
        while not any(o.request_id == arrival.request_id for o in self.engine.outputs):
            self.engine.step()
        self._deliver()
        return self.engine.put_aside(arrival.request_id)

    def _drive(
        self,
        arrivals: Sequence[Arrival],
        at_step: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        todo = defaultdict[int, list[Callable[[], None]]](list)
        for arrival in arrivals:
            todo[arrival.at_step].append(partial(self._arrive, arrival))
        for step, do in (at_step or {}).items():
            todo[step].append(do)
        last, step = max(todo), 0
        while True:
            for do in todo.get(step, ()):
                do()
            stepped = self.engine.step()
            self._deliver()
            if not stepped and step >= last:
                return
            step += 1

    def _arrive(self, arrival: Arrival) -> None:
        """As the front end does it, but for HTTP and tokenising."""
        vocabulary = self.engine.vocab_size
        prompt = [self._dice.randrange(vocabulary) for _ in range(arrival.prompt_tokens)]
        sampling = SamplingParams(arrival.output_tokens, temperature=0.0, ignore_eos=True)
        now_ns = time.monotonic_ns()
        life = RequestLife(arrival.request_id, "text_completion", "pinned", now_ns)
        life.prompt_tokens = arrival.prompt_tokens
        self.observer.request_opened(life)
        life.tokenised_ns = life.queued_ns = time.monotonic_ns()
        self._lives[arrival.request_id] = life
        self.engine.submit(arrival.request_id, prompt, sampling)

    def _deliver(self) -> None:
        """What the front end notes of each output, and the end of those that have ended."""
        outputs, self.engine.outputs = self.engine.outputs, []
        for output in outputs:
            life = self._lives[output.request_id]
            life.output_tokens += len(output.token_ids)
            life.first_token_ns = life.first_token_ns or output.output_ns
            life.first_sent_ns = life.first_sent_ns or time.monotonic_ns()
            if output.finish_reason is not None:
                life.first_scheduled_ns = output.first_scheduled_ns
                life.finished_ns = output.output_ns
                life.finish_reason = output.finish_reason
                life.sent_ns = time.monotonic_ns()
                self.observer.request_closed(self._lives.pop(output.request_id))

    def _read(self) -> Run:
        run = Run()
        while True:
            readings = self._source.poll(time.monotonic_ns())
            run.steps += readings.steps
            self._accountant.add(readings)
            for account in self._accountant.due(time.monotonic_ns()):
                run.accounts[account.record.request_id] = account
            if not self._source.behind:
                break
        if self._source.status().dropped or self._source.uncounted_losses:
            raise RuntimeError("the rings lost records")
        return run


def _this_process() -> Target:
    pid = os.getpid()
    return Target(
        pid=pid,
        start_ticks=procfs.read_stat(pid).start_ticks,
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        comm="pinned",
        children=(),
        engine="reference",
    )
