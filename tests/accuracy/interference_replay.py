"""What a prefill costs those beside it: the account's word against a replay without it.

Arrivals are pinned to step numbers, so that both runs of a pair have the same steps. In the one
the culprit's prompt is computed among the victims' steps; in the other it was computed before
them, and only its decodes are there, at the steps at which they were. What a victim's steps took
less is what was really saved; what `delayed_by` charges to the culprit is what the account
predicts. Pairs are interleaved, since the machine is not quiet; compared are medians.

`python tests/accuracy/interference_replay.py` prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from interference import CASES, FEW, Case, Result, Saving, document
from interference_engine import Arrival, Bench, Run

REPEATS = {"smollm2": 5, "tiny-llama": 15}  # each way; a short step needs more, and has the time
LEARN_STEPS = 260  # the model counts as fitted from 200 on
VICTIM_PROMPT = 40
ARRIVES = 4  # the step before which the culprit comes; the victims' own prefill is step 0
DECODES = 3  # of the culprit, beside the victims
IN_BATCH = "batch.prefill_interference"
IN_QUEUE = ("batch.not_scheduled", "queue.wait")


def measure(cases: Sequence[Case], seed: int) -> Iterator[Result]:
    for model in dict.fromkeys(case.model for case in cases):
        bench = Bench(model, seed)
        try:
            bench.learn(LEARN_STEPS)
            for case in cases:
                if case.model == model:
                    yield _result(bench, case)
        finally:
            bench.close()


@dataclass(frozen=True, slots=True)
class _Side:
    """One run, seen by its victims; the median one of them."""

    took_ns: float  # the steps that contained it
    waited_ns: float  # before its admission
    in_batch_ns: float  # charged to the culprit
    in_queue_ns: float


def _result(bench: Bench, case: Case) -> Result:
    sides = [
        (_with_prefill(bench, case), _without(bench, case)) for _ in range(REPEATS[case.model])
    ]
    with_it, without = [a for a, _ in sides], [b for _, b in sides]
    in_batch = _saving(
        [side.in_batch_ns for side in with_it],
        [side.took_ns for side in with_it],
        [side.took_ns for side in without],
    )
    in_queue = _saving(
        [side.in_queue_ns for side in with_it],
        [side.waited_ns for side in with_it],
        [side.waited_ns for side in without],
    )
    return Result(case, in_batch, in_queue if case.behind else None)


def _saving(
    predicted: Sequence[float], with_it: Sequence[float], without: Sequence[float]
) -> Saving:
    spread_ns = max(_spread(with_it), _spread(without))
    return Saving(median(predicted), median(with_it) - median(without), spread_ns)


def _spread(times: Sequence[float]) -> float:
    middle = median(times)
    return median(abs(time - middle) for time in times)


def _victims(bench: Bench, case: Case) -> tuple[list[Arrival], list[str]]:
    """Who decodes all the while, and the ids of those who are judged."""
    steps = ARRIVES + case.chunks + DECODES + 2
    arrivals = [Arrival(bench.name("victim"), 0, VICTIM_PROMPT, steps) for _ in range(case.victims)]
    if not case.behind:
        return arrivals, [arrival.request_id for arrival in arrivals]
    judged = Arrival(bench.name("behind"), ARRIVES, VICTIM_PROMPT, 1 + DECODES)
    return [*arrivals, judged], [judged.request_id]


def _with_prefill(bench: Bench, case: Case) -> _Side:
    arrivals, judged = _victims(bench, case)
    culprit = Arrival(bench.name("culprit"), ARRIVES, case.prompt_tokens, 1 + DECODES)
    place = case.victims  # it comes before the one that waits behind it
    run = bench.run([*arrivals[:place], culprit, *arrivals[place:]])
    return _side(run, judged, culprit.request_id)


def _without(bench: Bench, case: Case) -> _Side:
    arrivals, judged = _victims(bench, case)
    culprit = Arrival(bench.name("dummy"), 0, case.prompt_tokens, 1 + DECODES)
    # Whoever waited behind the prefill is admitted at once: the decodes follow its prefill, too.
    resumes = ARRIVES + (1 if case.behind else case.chunks)
    run = bench.run(arrivals, beforehand=culprit, resumes_at_step=resumes)
    return _side(run, judged, culprit.request_id)


def _side(run: Run, judged: Sequence[str], culprit: str) -> _Side:
    took, waited, in_batch, in_queue = [], [], [], []
    for request_id in judged:
        account = run.accounts[request_id]
        record = account.record
        assert record.first_scheduled_ns is not None
        assert record.queued_ns is not None
        took.append(sum(step.end_ns - step.start_ns for step in run.steps_of(request_id)))
        waited.append(record.first_scheduled_ns - record.queued_ns)
        charged = [d for d in account.delayed_by if d.request_id == culprit]
        in_batch.append(sum(d.ns for d in charged if d.cause == IN_BATCH))
        in_queue.append(sum(d.ns for d in charged if d.cause in IN_QUEUE))
    return _Side(median(took), median(waited), median(in_batch), median(in_queue))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--few", action="store_true", help="only the quick cases")
    arguments = parser.parse_args(argv)
    results = []
    for result in measure(FEW if arguments.few else CASES, arguments.seed):
        results.append(result)
        print(result, file=sys.stderr, flush=True)
    print(json.dumps(document(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
