"""A link that is not encrypted is told, unless it stays on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from made import TARGET

from dsagent.agent.clear_links import clear_links
from dsagent.agent.errors import DsagentError
from dsagent.agent.fleet.store import open_store
from dsagent.agent.session.outlets import Judged, OutletOptions, remarks


def test_once_a_host() -> None:
    links = [
        ("http", "127.0.0.1"), ("http", "localhost"), ("http", "::1"), ("https", "far.example.com"),
        ("http", "near.example.com"), ("http", "near.example.com"), ("http", "10.0.0.7"),
    ]  # fmt: skip
    lines = clear_links(links)
    assert [line.split()[0] for line in lines] == ["10.0.0.7", "near.example.com"]
    assert "https://" in lines[0]


def test_of_all_that_the_agent_sends_to(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("slo: [{model: '*', ttft_ms: 1}]\nwebhook: http://hook.example.com/x\n")
    options = OutletOptions(
        otlp_endpoint="http://collector.example.com:4318",
        remote_write="http://prometheus.example.com/api/v1/write",
        slo=slo,
    )
    said = remarks(options, Judged(options, lambda _line: None), TARGET)
    assert [line.split()[0] for line in said if "without TLS" in line] == [
        "collector.example.com",
        "hook.example.com",
        "prometheus.example.com",
    ]


def test_of_a_store(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    open_store("s3://bucket/prefix", "http://objects.example.com:9000")
    assert "objects.example.com is spoken to without TLS" in capsys.readouterr().err
    open_store("s3://bucket/prefix", "objects.example.com")  # https unless told otherwise
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "endpoint", "says"),
    [
        ("gs://bucket", None, "a folder or s3://"),
        ("", None, "needs a name"),
        ("s3://", None, "not s3://bucket/prefix"),
        ("s3://a/../b", None, "not s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", None, "not s3://bucket/prefix"),
        ("s3://bucket", "ftp://x", "not an endpoint"),
        ("s3://bucket", "https://x/path", "not an endpoint"),
    ],
)
def test_what_is_no_store(name: str, endpoint: str | None, says: str) -> None:
    with pytest.raises(DsagentError, match=says) as caught:
        open_store(name, endpoint)
    assert "secret" not in str(caught.value)
