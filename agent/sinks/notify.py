"""Carries alerts to web hooks and starts commands, in a thread of its own: bounded, with retries,
never in anybody's way."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from dsagent.agent.session.guard import attempt
from dsagent.agent.sinks.base import SinkStatus

QUEUE = 256  # further ones push the oldest out, counted
TIMEOUT_S = 5.0  # of one wait for a web hook
MOST_POST_S = 15.0  # of one try in all, however many waits
COMMAND_TIMEOUT_S = 30.0
TRIES = 5
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 8.0
MAX_ANSWER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Message:
    """A document for a web hook, or for the standard input of a command."""

    body: dict[str, Any]
    url: str = ""
    command: tuple[str, ...] = ()


class Notifier:
    """`send` returns at once. The order is kept: an alert's end never overtakes its beginning."""

    def __init__(self, name: str) -> None:
        self._status = SinkStatus(name)
        self._queue: deque[Message] = deque()
        self._changed = threading.Condition()
        self._deadline_s = float("inf")  # of time.monotonic(), once it is to end
        self._is_busy = False
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        with self._changed:
            if len(self._queue) >= QUEUE:
                self._queue.popleft()
                self._count(dropped=1, reason=f"more than {QUEUE} alerts wait to be sent")
            self._queue.append(message)
            self._changed.notify_all()

    def status(self) -> SinkStatus:
        with self._changed:
            return self._status

    def stop(self, deadline_s: float) -> None:
        """What is not delivered by then is counted as dropped."""
        with self._changed:
            self._deadline_s = time.monotonic() + deadline_s
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(deadline_s)
        with self._changed:
            left = len(self._queue) + self._is_busy
            self._queue.clear()
            if left:
                self._count(dropped=left, reason="not delivered before the end")
            child = self._child
        if child is not None:
            child.kill()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and self._deadline_s == float("inf"):
                    self._changed.wait()
                if not self._queue:
                    return
                message = self._queue.popleft()
                self._is_busy = True
            # It may fail in ways that are not the other end's, such as: no more threads.
            delivered, why = attempt(partial(self._deliver, message))
            reason = why or delivered or ""
            with self._changed:
                self._is_busy = False
                if reason:
                    self._count(failed=1, reason=reason)
                else:
                    self._count(acknowledged=1)

    def _deliver(self, message: Message) -> str:
        """Empty, or why it could not be delivered."""
        body = json.dumps(message.body).encode()
        with self._changed:
            self._count(sent=1)
        if message.command:
            return self._execute(message.command, body)
        wait_s, reason = FIRST_WAIT_S, ""
        for before in range(TRIES):
            if before and not self._pause(wait_s):
                break
            wait_s = min(2 * wait_s, MAX_WAIT_S) if before else wait_s
            reason, is_worth_another = post(message.url, body)
            if not is_worth_another:
                break
        return reason

    def _pause(self, wait_s: float) -> bool:
        """Whether there is time for another try after it."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            while (left_s := until_s - time.monotonic()) > 0:
                if self._deadline_s < until_s:
                    return False
                self._changed.wait(left_s)
        return True

    def _execute(self, command: tuple[str, ...], body: bytes) -> str:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not k.startswith("OTEL_")},
            )
        except (OSError, ValueError) as error:
            return f"{command[0]}: {getattr(error, 'strerror', None) or error}"
        with self._changed:
            self._child = child
        try:
            child.communicate(body, timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            return f"{command[0]}: took longer than {COMMAND_TIMEOUT_S:g} s"
        except OSError as error:  # it ended without reading its input
            child.wait()
            return f"{command[0]}: {error.strerror or error}"
        finally:
            with self._changed:
                self._child = None
        return f"{command[0]}: ended with {child.returncode}" if child.returncode else ""

    def _count(
        self,
        *,
        sent: int = 0,
        acknowledged: int = 0,
        failed: int = 0,
        dropped: int = 0,
        reason: str = "",
    ) -> None:
        was = self._status
        self._status = replace(
            was,
            sent=was.sent + sent,
            acknowledged=was.acknowledged + acknowledged,
            failed=was.failed + failed,
            dropped=was.dropped + dropped,
            reason=reason or was.reason,
        )


def post(url: str, body: bytes) -> tuple[str, bool]:
    """Why it was not taken (empty where it was), and whether another try may help."""
    parts = urlsplit(url)
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    # Of many web hooks, the path is the secret.
    shown = f"the web hook at {parts.hostname}" + (f":{parts.port}" if parts.port else "")
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"dsagent/{version('dsagent')}",
    }
    late = f"not done after {MOST_POST_S:g} s"
    host, is_late = parts.hostname or "", threading.Event()
    make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = make(host, parts.port)
    try:
        reached = socket.create_connection((host, connection.port), TIMEOUT_S)
        connection.sock = reached
        with _cut_off(reached, is_late):
            if parts.scheme == "https":
                context = ssl.create_default_context()
                connection.sock = context.wrap_socket(reached, server_hostname=host)
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            status = response.status
            with suppress(OSError, HTTPException, ValueError):  # it has answered
                response.read(MAX_ANSWER_BYTES)
    except OSError as error:
        why = error.strerror or error or type(error).__name__
        return f"{shown}: {late if is_late.is_set() else why}", True
    except (HTTPException, ValueError) as error:
        if is_late.is_set():
            return f"{shown}: {late}", True
        return f"{shown}: no HTTP answer ({type(error).__name__})", False
    finally:
        connection.close()
    if 200 <= status < 300:
        return "", False
    return f"{shown}: answered {status}", status == 429 or status >= 500


@contextmanager
def _cut_off(reached: socket.socket, is_late: threading.Event) -> Iterator[None]:
    """After `MOST_POST_S` the connection ends: each wait has its limit, but an answer that drips in
    byte by byte never reaches it."""

    def cut() -> None:
        is_late.set()
        try:
            handle.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was quicker

    # A handle of its own: TLS takes the other one.
    with reached.dup() as handle:
        timer = threading.Timer(MOST_POST_S, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
