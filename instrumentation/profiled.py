"""Continuous profiling of the engine by Pyroscope's own client, inside its process.

Who runs no agent gets profiles by phase and version all the same. The client samples and pushes in
threads of its own; here it is only told which phase the loop is in.
"""

from __future__ import annotations

import os
import threading
from importlib.metadata import version
from urllib.parse import urlsplit

import pyroscope  # type: ignore[import-untyped,unused-ignore]

RATE_HZ = 20  # the client's own 100 takes some 7 % of the engine's speed
SERVICE = "reference"  # as its traces say, unless OTEL_SERVICE_NAME does


class BadAddress(ValueError):  # noqa: N818 - what it is, not what went wrong
    """Where to push is no URL."""


class Profiler:
    """Runs until `stop`. One thread, the engine's loop, calls `enter`."""

    def __init__(self, url: str) -> None:
        """Raises BadAddress. Whether anybody answers there shows later: profiles are lost then, and
        nothing else is."""
        check_address(url)
        self._phase: str | None = None
        pyroscope.configure(
            application_name=os.environ.get("OTEL_SERVICE_NAME", "").strip() or SERVICE,
            server_address=url,
            sample_rate=RATE_HZ,
            oncpu=True,
            gil_only=False,  # the model computes without the interpreter's lock
            report_thread_name=True,
            tags={"version": version("dsagent"), "engine": SERVICE},
        )

    def enter(self, phase: str) -> None:
        """Samples of the calling thread are of this phase from now on; 0.7 µs."""
        if phase == self._phase:
            return
        if self._phase is not None:
            pyroscope.remove_thread_tag("phase", self._phase)
        pyroscope.add_thread_tag("phase", phase)
        self._phase = phase

    def stop(self, deadline_s: float) -> None:
        """Pushes what it has, if that takes no longer than the deadline."""
        last = threading.Thread(target=pyroscope.shutdown, daemon=True)
        last.start()
        last.join(deadline_s)


def check_address(url: str) -> None:
    """Raises BadAddress; the client itself takes anything, and says nothing."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address = is_address and (parts.port or 1) > 0 and url.isprintable() and " " not in url
    except ValueError:
        is_address = False
    if not is_address:
        # It is not repeated: there may be a password in it.
        raise BadAddress("--pyroscope takes a URL such as http://127.0.0.1:4040")
