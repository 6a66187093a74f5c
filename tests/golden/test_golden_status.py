"""The screen of `dsagent status`, of made documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_status import ENGINE, SIDECAR

from dsagent.agent.screens.render import page_of
from dsagent.agent.screens.render_status import status

Golden = Callable[[str, str], None]


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
