"""The text that the target's interpreter runs: one expression, which leaves no name anywhere.

It runs a source in a namespace of its own, lets nothing escape (an exception
would end up in whatever the target was doing), and writes how it went into the
report: through /proc/self/mem, so that neither a descriptor nor another module
is needed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dsagent.agent.host.procfs import escape
from dsagent.agent.inject.bundle import quoted

MAX_TEXT_BYTES = 64 << 10
_OUTER = '"""'
_HEADER = struct.Struct("<QQQQ")  # began and ended (ns), 1: well, size of the message
_MESSAGE_CHARS = 600

# `REPORT` is what the source has to say. `builtins` as its name: dataclasses look up the module of
# a class in sys.modules, and there must be none of ours.
_RUNNER = f"""
import os, time
began = time.monotonic_ns()
space = {{"__name__": "builtins"}}
try:
    exec(compile(SOURCE, "<dsagent>", "exec"), space)
    well, message = 1, str(space.get("REPORT", ""))
except BaseException as error:
    well = 0
    try:
        message = type(error).__name__ + ": " + str(error)
    except BaseException:
        message = "an exception that cannot be shown"
    if isinstance(error, KeyboardInterrupt):
        import _thread
        _thread.interrupt_main()
try:
    body = message.encode("utf-8", "replace")[:ROOM - {_HEADER.size}]
    mem = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    try:
        numbers = began, time.monotonic_ns(), well, len(body)
        os.pwrite(mem, b"".join(each.to_bytes(8, "little") for each in numbers) + body, AT)
    finally:
        os.close(mem)
except BaseException:
    pass
"""


@dataclass(frozen=True, slots=True)
class Report:
    """`message`: what the source has said, or the exception that ended it (escaped)."""

    well: bool
    message: str
    began_ns: int
    ended_ns: int


def text_of(source: str, report_at: int, report_bytes: int) -> bytes:
    """Raises ValueError for one of more than 64 KiB."""
    whole = quoted(source, _OUTER)
    names = f"'SOURCE': {whole}, 'AT': {report_at}, 'ROOM': {report_bytes}"
    text = f"exec({_RUNNER!a}, {{{names}}})\n".encode()
    if len(text) >= MAX_TEXT_BYTES:
        raise ValueError(f"a text of {len(text)} bytes: {MAX_TEXT_BYTES} are allowed")
    return text + b"\0"


def report_of(raw: bytes) -> Report | None:
    """None where nothing was written, or what makes no sense."""
    began_ns, ended_ns, well, size = _HEADER.unpack_from(raw)
    if not began_ns or well > 1 or size > len(raw) - _HEADER.size or ended_ns < began_ns:
        return None
    message = raw[_HEADER.size : _HEADER.size + size].decode("utf-8", "replace")
    return Report(bool(well), escape(message, _MESSAGE_CHARS), began_ns, ended_ns)
