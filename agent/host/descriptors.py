"""How many files may be open at once: enough before the agent begins, not too few half-way."""

from __future__ import annotations

import resource

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError

LEAST = 256  # of one attachment: its BPF programs, rings, connections; all tiers take 160
WANTED = 4096


def raise_limit() -> int:
    """This process's own, as far as anybody may; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WANTED
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


def make_room() -> None:
    """Raises DsagentError (exit 3) where the limit stays too low: what failed later, for want of a
    descriptor, would say so in many words."""
    limit = raise_limit()
    if limit < LEAST:
        raise DsagentError(
            f"cannot attach: only {limit} files may be open at once here, and {LEAST} are needed; "
            "allow more with `ulimit -n 1024`, or LimitNOFILE=1024 of its service",
            exit_code=CANNOT_ATTACH,
        )
