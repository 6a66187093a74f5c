"""The screen of `dsagent status`, of made documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dsagent.agent.render import page_of
from dsagent.agent.render_status import status

Golden = Callable[[str, str], None]
S = 1_000_000_000

ENGINE: dict[str, Any] = {
    "engine": "0",
    "pid": 4242,
    "start_ticks": 99,
    "pid_namespace": 4026531836,
    "command": "python\x1b[31m",
    "command_line": "python -m dsagent.instrumentation.reference",
    "kind": "reference",
    "model": "smollm2",
    "way_in": "rings",
    "state": "watching",
    "reason": "",
    "since_unix_ns": 0,
    "attached_unix_ns": 0,
    "restarts": 2,
    "requests": 1200,
    "steps": 48000,
    "uncounted_losses": 0,
    "accounting_failures": 0,
    "sources": [
        {"name": "steps", "state": "ok", "reason": "", "dropped": 0, "cost_ns": 5},
        {
            "name": "kernel",
            "state": "unavailable",
            "reason": "CAP_BPF is missing",
            "dropped": 0,
            "cost_ns": 0,
        },
    ],
    "sinks": [
        {
            "name": "otlp",
            "sent": 900,
            "acknowledged": 880,
            "failed": 20,
            "dropped": 3,
            "reason": "HTTP 503",
            "made": 923,
            "recovered": 0,
            "queued": 0,
            "lost": {"refused": 20, "queue_full": 3},
            "parts": [],
        }
    ],
    "overhead_ratio": 0.0042,
}
_UNKNOWN = ("model", "sources", "sinks", "requests", "steps", "overhead_ratio")
YOUNG = {
    **{key: value for key, value in ENGINE.items() if key not in _UNKNOWN},
    "engine": "1",
    "pid": 77,
    "kind": "http",
    "way_in": "outside",
    "state": "attaching",
    "restarts": 0,
}
SIDECAR: dict[str, Any] = {
    "mode": "sidecar",
    "pid": 7,
    "since_unix_ns": 0,
    "now_unix_ns": 93_784 * S,
    "cpu_ns": 938 * S,
    "rss_bytes": 61_000_000,
    "failures": 0,
    "ready": False,
    "reasons": [
        "cannot listen on 127.0.0.1:9464 for Prometheus: Address already in use",
        "cannot attach: not permitted to look into process 77",
    ],
    "settings": {
        "file": "/etc/dsagent/dsagent.toml",
        "state": "refused",
        "reason": "unknown setting 'teir'; the old settings stay",
        "loaded_unix_ns": 0,
        "reloads": 3,
        "refused": 1,
        "needs_restart": ["listen"],
    },
    "listener": {
        "address": "127.0.0.1:9464",
        "port": None,
        "state": "waiting",
        "reason": "",
        "answered": 0,
        "failed": 0,
        "refused": 0,
    },
    "memory": {
        "used_bytes": 61_000_000,
        "limit_bytes": 128_000_000,
        "limit_from": "cgroup",
        "level": 0,
        "relief": "all is kept",
    },
    "recent": {"accounts": 800, "bytes": 3_100_000, "max_bytes": 33_554_432, "ended_engines": 1},
    "scan": {"processes": 12, "looked_into": 1, "not_permitted": 2},
    "engines": [ENGINE, YOUNG],
    "waiting": [
        {
            "pid": 77,
            "command": "process 77",
            "reason": "cannot attach: not permitted to look into process 77",
            "failures": 4,
            "again_in_ns": 8 * S,
        }
    ],
}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def text_of(document: dict[str, Any]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in page_of(status(document)).splitlines())


def test_of_a_sidecar(golden: Golden) -> None:
    text = text_of(SIDECAR)
    assert "\x1b" not in text
    golden("status-sidecar.txt", text)


def test_of_one_that_has_found_nothing(golden: Golden) -> None:
    golden(
        "status-nothing.txt",
        text_of({**SIDECAR, "engines": [], "waiting": [], "reasons": ["no engine has been found"]}),
    )


def test_of_an_agent_that_was_attached_by_hand(golden: Golden) -> None:
    engine = {k: v for k, v in ENGINE.items() if k not in ("engine", "restarts", "command_line")}
    keys = ("pid", "since_unix_ns", "now_unix_ns", "cpu_ns", "rss_bytes")
    agent = {key: SIDECAR[key] for key in keys}
    golden("status-attach.txt", text_of({"mode": "attach", **agent, "engines": [engine]}))
