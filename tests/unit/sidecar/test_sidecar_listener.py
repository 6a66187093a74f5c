"""A port that is taken is tried again, and told once."""

from __future__ import annotations

import socket

from dsagent.agent.listening.admission import ListenOptions
from dsagent.agent.sidecar.backoff import SECOND_NS
from dsagent.agent.sidecar.listener import Health, Listener


def test_a_port_that_stays_taken_is_no_news_and_is_bound_once_free() -> None:
    listener = Listener(list, lambda: Health(ready=False, reasons=(), engines=0))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listener.set(f"127.0.0.1:{port}", ListenOptions())
        said = set()
        for minute in range(30):
            listener.attend(minute * 60 * SECOND_NS)
            said.add(listener.reason)
    assert len(said) == 1 and str(port) in said.pop()
    listener.attend(31 * 60 * SECOND_NS)
    try:
        assert (listener.port, listener.reason) == (port, "")
    finally:
        listener.stop()
