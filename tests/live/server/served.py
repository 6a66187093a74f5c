"""A server in a process of its own, and what it says, for the live tests of the front end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 60.0  # for what must happen; only a failure ever waits so long

Event = dict[str, Any]


class Served:
    """serve_and_tell.py as a child; ready once constructed."""

    def __init__(self, **settings: Any) -> None:
        script = Path(__file__).with_name("serve_and_tell.py")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(script), json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.url: str = self.wait(lambda event: event["event"] == "listening")["url"]
        except BaseException:
            self.close()
            raise
        self.port = int(self.url.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()

    def wait(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event like that, come or still to come."""
        return self.events[self._place(wanted, 0)]

    def _place(self, wanted: Callable[[Event], bool], since: int) -> int:
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for place in range(since, len(self.events)):
                    if wanted(self.events[place]):
                        return place
                since = max(since, len(self.events))
                assert self._reader.is_alive(), self.stderr()
                assert time.monotonic() < deadline, "it did not happen"
                self._changed.wait(1.0)

    def opened(self, name: str) -> str:
        """The id of the request that was sent with `x-request-id: name`."""
        event = self.wait(lambda event: event["event"] == "opened" and event["external_id"] == name)
        return str(event["request_id"])

    def closed(self, request_id: str) -> Event:
        """The request's life, once it has ended."""
        return self.wait(
            lambda event: event["event"] == "closed" and event["request_id"] == request_id
        )

    def first_step(self, request_id: str) -> int:
        """The place of the first step that served the request."""
        return self._place(
            lambda event: event["event"] == "step" and request_id in event["served"], 0
        )

    def idle_after(self, request_id: str) -> Event:
        """The engine's stats once it has nothing to run, that request included."""
        place = self._place(lambda event: event["event"] == "idle", self.first_step(request_id))
        return self.events[place]

    def connect(self, *, receive_bytes: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", self.port))
        return client

    def stderr(self) -> str:
        """All of it, once the process has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def post(path: str, body: bytes | dict[str, Any], *headers: str, name: str = "") -> bytes:
    """A request as it goes over the wire; `name` tells it from the others (see `opened`)."""
    if name:
        headers = (*headers, f"x-request-id: {name}")
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(raw)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + raw
