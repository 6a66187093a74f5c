"""Beside each deed, something small of another kind, as it is in life.

It is far too short to be the answer; but whoever goes by what is unusual alone
falls for it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import Bench
from faults.stops import stop_for
from truth import Fault

SECONDS = (0.003, 0.008)
_STOPPED = "process.stopped"


@contextmanager
def decoy(fault: Fault, bench: Bench, dice: random.Random) -> Iterator[None]:
    """A short stop of the process early in the block; where that is the deed itself, a lock held
    for as short. None where there is no deed."""
    seconds, delay_s = dice.uniform(*SECONDS), dice.uniform(0.02, 0.25)

    def strike() -> None:
        time.sleep(delay_s)
        if _STOPPED in fault.causes:
            bench.target.fault("lock", seconds=seconds, times=2, pause_s=0.02)
        else:
            stop_for(bench.target, seconds)

    if not fault.causes:
        yield
        return
    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        thread.join()
