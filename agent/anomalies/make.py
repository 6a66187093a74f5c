"""The way to the watch, for those who have asked for it: river is imported here, and only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsagent.agent.errors import DsagentError

if TYPE_CHECKING:
    from dsagent.agent.anomalies.watch import AnomalyWatch


def make_watch() -> AnomalyWatch:
    """Raises DsagentError where river is not installed."""
    try:
        from dsagent.agent.anomalies.watch import AnomalyWatch
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("dsagent"):
            raise
        package = str(error.name).partition(".")[0]
        raise DsagentError(
            f"--anomalies needs the package {package}: pip install 'dsagent[anomalies]'"
        ) from error
    return AnomalyWatch()
