"""The reference engine whose sampler computes in vain each step, for so many milliseconds of CPU
time: busy neighbours stretch them as they do the model's.

    python profiled_engine.py MILLISECONDS --model … --port …
"""

from __future__ import annotations

import sys
import time
from typing import Any

from dsagent.engine import loop
from dsagent.instrumentation import reference


def computes_in_vain(until_s: float) -> None:
    while time.thread_time() < until_s:
        pass


def main(argv: list[str]) -> int:
    seconds = float(argv[0]) / 1000
    names: dict[str, Any] = vars(loop)
    original = names["sample"]

    def slow_sample(*args: Any) -> Any:
        computes_in_vain(time.thread_time() + seconds)
        return original(*args)

    if seconds:
        names["sample"] = slow_sample
    return reference.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
