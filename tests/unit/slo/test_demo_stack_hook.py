"""The web hook of demo-stack: what it takes, and what it says when something is not told."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from alert_hook import NotToldError, WebHook


@pytest.fixture
def hook() -> Iterator[WebHook]:
    with WebHook() as made:
        yield made


def post(url: str, body: bytes) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def alert(
    status: str, causes: str = "0.770 batch.prefill_interference, 0.230 cpu.runqueue"
) -> bytes:
    made = {"status": status, "labels": {"alertname": "A"}, "annotations": {"causes": causes}}
    return json.dumps({"alerts": [made]}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"alerts": 1}',
        b'{"alerts": [{"labels": {}}]}',
        b"\xff",
        b"[" * 99999,
    ],
)
def test_what_is_no_alert_is_refused(hook: WebHook, body: bytes) -> None:
    assert post(hook.url("agent"), body) == 400
    assert post(hook.url("agent").replace("/agent", "/other"), alert("firing")) == 404
    assert hook.notices == []


def test_the_last_word_counts(hook: WebHook) -> None:
    for route in ("agent", "alertmanager"):
        assert post(hook.url(route), alert("firing")) == 200
    assert post(hook.url("agent"), alert("resolved")) == 200
    assert [notice.route for notice in hook.firing(lambda _: True)] == ["alertmanager"]
    told = hook.wait(lambda n: n.status == "resolved", "the end", timeout_s=10)
    assert told.causes == {"batch.prefill_interference", "cpu.runqueue"}


def test_what_is_not_told_is_said(hook: WebHook) -> None:
    for _ in range(2):
        post(hook.url("agent"), alert("firing"))
    with pytest.raises(
        NotToldError, match=r"the end: .*came: 2× agent firing A; last agent firing A"
    ):
        hook.wait(lambda n: n.status == "resolved", "the end", timeout_s=0.01)
    with pytest.raises(NotToldError, match=r"quiet: .*firing"):
        hook.wait_until(lambda: not hook.firing(lambda _: True), "quiet", timeout_s=0.01)
