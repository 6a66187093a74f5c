"""How many files may be open at once: enough before the agent begins, not too few half-way."""

from __future__ import annotations

import resource

from dsagent.agent.errors import CANNOT_ATTACH, DsagentError

LEAST = 256  # of one attachment: its BPF programs, rings, connections; all tiers take 160
WANTED = 4096


def make_room(least: int = LEAST) -> None:
    """Raises this process's own limit, as far as anybody may. Raises DsagentError (exit 3) where
    that is not enough: what failed later, for want of a descriptor, would say so in many words."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(WANTED, least)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < least:
        raise DsagentError(
            f"cannot attach: only {soft} files may be open at once here, and {least} are needed; "
            "allow more with `ulimit -n 1024`, or LimitNOFILE=1024 of its service",
            exit_code=CANNOT_ATTACH,
        )
