"""The engine's loop: one step after another, until told to stop."""

from __future__ import annotations

from typing import NamedTuple


class EngineStats(NamedTuple):
    """What the engine holds at this moment."""

    waiting: int
    running: int
    kv_blocks_free: int
    kv_blocks_cached: int  # free to take, but their contents can still be hit
    kv_blocks_used: int
    kv_blocks_total: int
