"""What the session hands to every sink, and what a sink says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dsagent.agent.attribution.account import Account
from dsagent.agent.facts import (
    ClockAnchor,
    Event,
    Facts,
    OtlpBody,
    Sample,
    SourceStatus,
    Target,
    View,
    no_facts,
)
from dsagent.agent.profiles.stacks import Recorded
from dsagent.instrumentation.records import RankStep, RequestOpen, Step


@dataclass(frozen=True, slots=True)
class Explained:
    """One tick's worth of results. `steps` and `facts` are those that came in since the last one;
    `accounts` the requests accounted for since then (their steps came in this tick or before)."""

    target: Target
    anchor: ClockAnchor
    now_ns: int
    attached_ns: int = 0
    due_ns: int = 0  # what was due by then is accounted for
    facts_complete_ns: int | None = None
    view: View = field(default_factory=View)  # by which the accounts were made
    opened: tuple[RequestOpen, ...] = ()
    ended: tuple[int, ...] = ()  # request_keys: their end was read, or is lost; accounts follow
    accounts: tuple[Account, ...] = ()
    steps: tuple[Step, ...] = ()
    rank_steps: tuple[RankStep, ...] = ()
    facts: Facts = field(default_factory=no_facts)
    names: Mapping[int, str] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    events: tuple[Event, ...] = ()
    sources: tuple[SourceStatus, ...] = ()
    sinks: tuple[SinkStatus, ...] = ()
    uncounted_losses: int = 0
    otlp_bodies: tuple[OtlpBody, ...] = ()  # received, to be passed on unchanged
    profiles: tuple[Recorded, ...] = ()  # what the sampler saw, runs that have ended


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """Counted by the sink itself: sent to the back end, acknowledged by it, failed, given up.
    Where a sink keeps a delivery ledger, made + recovered == queued + sent + dropped and
    sent == acknowledged + failed at any moment; `lost` adds up to failed + dropped."""

    name: str
    sent: int = 0
    acknowledged: int = 0
    failed: int = 0
    dropped: int = 0
    reason: str = ""  # of the last failure
    ended: bool = False  # for that reason, it takes no more
    made: int | None = None  # None: this sink keeps no such ledger
    recovered: int = 0  # left on disk by an earlier run
    queued: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)  # by why, see sinks/delivery_ledger.py
    parts: tuple[SinkStatus, ...] = ()  # the same by kind of item; their sum is this one
    notice: str = ""  # worth a line for people, once


class Sink(Protocol):
    """Sends results somewhere. Never blocks the caller, never raises into it, never grows."""

    name: str

    def start(self) -> None:
        """Begin. Raises DsagentError where it cannot (a port in use, a folder not writable)."""

    def take(self, batch: Explained) -> None: ...

    def status(self) -> SinkStatus: ...

    def stop(self, deadline_s: float) -> None:
        """Flush for at most `deadline_s` seconds; what is left is counted as dropped."""
