"""What a prefill costs those beside it: the cases, and what the replay (interference_replay.py)
says of them. Pure, but for starting it in a process of its own: torch has no place in ours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

REPLAY = Path(__file__).with_name("interference_replay.py")
LEAST_SIZE = 3.0  # times the spread of the runs, from which on a saving is scored
BUDGET = 512  # tokens of one step, the engine's default


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, and who was there when it came."""

    model: str
    prompt_tokens: int
    victims: int  # decoding beside it
    behind: bool = False  # judged is one more, that came just after it and waits for its place

    @property
    def chunks(self) -> int:
        """Steps that the prefill takes: the decodes go first."""
        return -(-self.prompt_tokens // (BUDGET - self.victims))


@dataclass(frozen=True, slots=True)
class Saving:
    """Of one victim, in the median: what removing the prefill saves, as told and in truth."""

    predicted_ns: float
    real_ns: float
    spread_ns: float  # how far a run's time lies from its median, in the median

    @property
    def error(self) -> float | None:
        """None where the runs themselves differ too much to tell."""
        if self.real_ns <= 0 or self.real_ns < LEAST_SIZE * self.spread_ns:
            return None
        return abs(self.predicted_ns - self.real_ns) / self.real_ns


@dataclass(frozen=True, slots=True)
class Result:
    case: Case
    in_batch: Saving  # over the steps that it took part in
    in_queue: Saving | None  # before it was admitted; None where nobody waited


CASES = (
    Case("smollm2", 64, 1),
    Case("smollm2", 128, 4),
    Case("smollm2", 256, 2),
    Case("smollm2", 400, 6),
    Case("smollm2", 800, 3),
    Case("smollm2", 1500, 1),
    Case("smollm2", 700, 2, behind=True),
    Case("tiny-llama", 100, 2),
    Case("tiny-llama", 300, 1),
    Case("tiny-llama", 500, 6),
    Case("tiny-llama", 1000, 3),
    Case("tiny-llama", 1500, 5),
    Case("tiny-llama", 1200, 2, behind=True),
)
# On each change: those that take little time.
FEW = tuple(c for c in CASES if c.model == "tiny-llama" or c.prompt_tokens <= 400)


def document(results: Sequence[Result]) -> dict[str, Any]:
    """The key `interference` of build/accuracy.json. Errors that cannot be told are null."""
    errors = [error for result in results if (error := result.in_batch.error) is not None]
    queue = [result.in_queue for result in results if result.in_queue is not None]
    queue_errors = [error for saving in queue if (error := saving.error) is not None]
    return {
        "cases": [
            {
                **asdict(result.case),
                "predicted_ns": round(result.in_batch.predicted_ns),
                "saved_ns": round(result.in_batch.real_ns),
                "spread_ns": round(result.in_batch.spread_ns),
                "error": result.in_batch.error,
            }
            for result in results
        ],
        "scored": len(errors),
        "prediction_error_p50": median(errors) if errors else None,
        "queue_saving_predicted_ns": round(sum(saving.predicted_ns for saving in queue)),
        "queue_saving_ns": round(sum(saving.real_ns for saving in queue)),
        "queue_saving_error_p50": median(queue_errors) if queue_errors else None,
    }


def in_process_of_its_own(*flags: str) -> dict[str, Any]:
    """Replays, and returns the document."""
    command = [sys.executable, str(REPLAY), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def section(found: Mapping[str, Any]) -> str:
    """Markdown: the saving that the account predicts beside the one that was measured."""
    lines = [
        "| prefill removed | beside it | predicted saving | real saving | error |",
        "|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        who = f"{case['victims']} decoding" + (", judged one behind it" if case["behind"] else "")
        error = "too small to tell" if case["error"] is None else f"{case['error']:.1%}"
        lines.append(
            f"| {case['model']}, {case['prompt_tokens']} tokens | {who} "
            f"| {case['predicted_ns'] / 1e6:.1f} ms | {case['saved_ns'] / 1e6:.1f} ms | {error} |"
        )
    worth = found["prediction_error_p50"]
    lines += [
        "",
        f"Interference: error at the median {'-' if worth is None else f'{worth:.1%}'} "
        f"({found['scored']} cases); of queueing behind a prefill "
        f"{found['queue_saving_predicted_ns'] / 1e6:.1f} ms were predicted and "
        f"{found['queue_saving_ns'] / 1e6:.1f} ms saved.",
    ]
    return "\n".join(lines)
