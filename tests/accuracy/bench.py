"""What an injector has at hand, and the registry's one shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lab import Engine
from load import Burst, Load
from truth import Fault, Injection


@dataclass(slots=True)
class Bench:
    """One engine under load."""

    target: Engine
    load: Load
    cgroup: Path | None  # of the engine alone; None where it cannot be made
    bursts: list[Burst] = field(default_factory=list)  # all that injectors sent

    def burst(self) -> Burst:
        burst = Burst()
        self.bursts.append(burst)
        return burst


Inject = Callable[[Bench, random.Random], Injection]


@dataclass(frozen=True, slots=True)
class Injector:
    """A fault that can be done. `inject` blocks until it is over."""

    fault: Fault
    engine: str  # its key in campaign.ENGINES
    inject: Inject
    # Why it cannot be done here; empty where it can.
    refused: Callable[[Bench], str] = lambda _bench: ""
