"""Objectives: what a file may ask of requests, how fast the budget burns, and why."""

from dsagent.agent.slo.file import SloFile, load_limits, load_slo
from dsagent.agent.slo.limits import Limit, Limits

__all__ = ["Limit", "Limits", "SloFile", "load_limits", "load_slo"]
