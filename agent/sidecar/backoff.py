"""How long to wait before trying again: doubling, bounded. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SECOND_NS = 1_000_000_000


@dataclass(slots=True)
class Backoff:
    """`failed` after each failure; `due` from then on says whether it is time to try again."""

    first_ns: int = SECOND_NS
    most_ns: int = 60 * SECOND_NS
    failures: int = 0
    due_ns: int = 0

    def failed(self, now_ns: int) -> int:
        """Returns how long to wait, in ns."""
        wait_ns = min(self.most_ns, self.first_ns << min(self.failures, 32))
        self.failures += 1
        self.due_ns = now_ns + wait_ns
        return wait_ns

    def succeeded(self) -> None:
        self.failures = 0
        self.due_ns = 0

    def due(self, now_ns: int) -> bool:
        return now_ns >= self.due_ns
