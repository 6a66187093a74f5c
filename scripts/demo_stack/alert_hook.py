"""A web hook that keeps every alert that comes, in order: on one path the agent's own, on another
Alertmanager's. Both speak Alertmanager's JSON (version 4)."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, get_args

Route = Literal["agent", "alertmanager"]
ROUTES: tuple[Route, ...] = get_args(Route)
MAX_BODY_BYTES = 1 << 20


class NotToldError(Exception):
    """What was waited for at the web hook did not come."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One alert of one notification. `at_s`: when it came, of time.monotonic()."""

    route: Route
    at_s: float
    status: str  # firing or resolved
    labels: dict[str, str]
    annotations: dict[str, str]
    alert: dict[str, Any]  # as it came

    @property
    def name(self) -> str:
        return self.labels["alertname"]

    @property
    def identity(self) -> tuple[str, frozenset[tuple[str, str]]]:
        """The same from firing to resolved."""
        return self.route, frozenset(self.labels.items())

    @property
    def causes(self) -> frozenset[str]:
        """Those named, without their shares."""
        return frozenset(re.findall(r"[a-z][a-z_.]+", self.annotations.get("causes", "")))


Wanted = Callable[[Notice], bool]


class WebHook:
    """Listens on a free port of loopback from entering to leaving."""

    def __init__(self, on_notice: Callable[[Notice], None] = lambda _notice: None) -> None:
        """`on_notice`: is told of each, in the thread that took it."""
        self.notices: list[Notice] = []
        self._on_notice = on_notice
        self._changed = threading.Condition()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_POST(self) -> None:
                self.send_response(hook._take(self.path, self._body()))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _body(self) -> bytes:
                length = self.headers.get("Content-Length", "")
                good = length.isdecimal() and int(length) <= MAX_BODY_BYTES
                return self.rfile.read(int(length)) if good else b""

            def log_message(self, *_: object) -> None:
                """Not on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> WebHook:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, route: Route) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{route}"

    def wait(self, wanted: Wanted, what: str, *, since: int = 0, timeout_s: float) -> Notice:
        """The first notice like that after the first `since`, come or still to come. Raises
        NotToldError."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for notice in self.notices[since:]:
                    if wanted(notice):
                        return notice
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    came = _in_short(self.notices[since:])
                    raise NotToldError(f"{what}: not told within {timeout_s:.0f} s; came: {came}")
                self._changed.wait(left_s)

    def wait_until(self, holds: Callable[[], object], what: str, *, timeout_s: float) -> None:
        """Until that holds, looked at after each notification. Raises NotToldError."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not holds():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    came = _in_short(self.notices)
                    raise NotToldError(f"{what}: not within {timeout_s:.0f} s; came: {came}")
                self._changed.wait(left_s)

    def firing(self, wanted: Wanted) -> list[Notice]:
        """Those whose last word is that they fire."""
        with self._changed:
            last = {notice.identity: notice for notice in self.notices if wanted(notice)}
        return [notice for notice in last.values() if notice.status == "firing"]

    def _take(self, path: str, body: bytes) -> int:
        """The status to answer with."""
        route = next((route for route in ROUTES if path == f"/{route}"), None)
        if route is None:
            return 404
        try:
            found = [_notice(route, alert) for alert in json.loads(body)["alerts"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return 400
        with self._changed:
            for notice in found:
                self.notices.append(notice)
                self._on_notice(notice)
            self._changed.notify_all()
        return 200


def _in_short(notices: Sequence[Notice]) -> str:
    """What came, as one line: how often each, and the last of all."""
    if not notices:
        return "nothing"
    counts = Counter(f"{n.route} {n.status} {n.name}" for n in notices)
    last = notices[-1]
    each = ", ".join(f"{count}× {what}" for what, count in counts.items())
    return f"{each}; last {last.route} {last.status} {last.name}"


def _notice(route: Route, alert: dict[str, Any]) -> Notice:
    def texts(key: str) -> dict[str, str]:
        return {str(name): str(text) for name, text in alert[key].items()}

    labels = texts("labels")
    labels["alertname"]  # it has one
    return Notice(
        route, time.monotonic(), str(alert["status"]), labels, texts("annotations"), alert
    )
