"""Which request header a server takes the tenant from: it is the server that reads it, so its own
environment says which."""

from __future__ import annotations

from pathlib import Path

from dsagent.agent.host import procfs
from dsagent.agent.host.environment import environment
from dsagent.agent.slo.file import DEFAULT_TENANT_HEADER

VARIABLE = "DSAGENT_TENANT_HEADER"  # engine/api.py and instrumentation/vllm_requests.py read it
MAX_HEADER_CHARS = 64


def tenant_header_of(pid: int, proc: Path = procfs.PROC) -> str | None:
    """The header's name; None where the environment cannot be read."""
    try:
        named = environment(pid, proc).get(VARIABLE)
    except (OSError, procfs.ProcessGone):
        return None
    if named is None:
        return DEFAULT_TENANT_HEADER
    return procfs.escape(named, MAX_HEADER_CHARS)


def remark(wanted: str, pid: int, proc: Path = procfs.PROC) -> str | None:
    """What to tell where the server reads another header than the SLO file names."""
    found = tenant_header_of(pid, proc)
    if found is None or found.lower() == wanted.lower():
        return None
    return (
        f"the SLO file takes tenants from {wanted}, but the server reads {found}: start it with "
        f"{VARIABLE}={wanted}"
    )
