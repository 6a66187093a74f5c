"""The step rings: how an engine says what it does, through shared memory.

layout.py says where things are, wire.py what a record's bytes mean,
ring_writer.py is the engine's end, ring_find.py and ring_reader.py the agent's.
"""

from dsagent.instrumentation.layout import Role
from dsagent.instrumentation.ring_find import (
    RingCandidate,
    RingHeader,
    RingRejected,
    find_rings,
    step_word_address,
)
from dsagent.instrumentation.ring_reader import RingCounters, RingReader, WriterHealth
from dsagent.instrumentation.ring_writer import RingWriter
from dsagent.instrumentation.wire import Record

__all__ = [
    "Record",
    "RingCandidate",
    "RingCounters",
    "RingHeader",
    "RingReader",
    "RingRejected",
    "RingWriter",
    "Role",
    "WriterHealth",
    "find_rings",
    "step_word_address",
]
