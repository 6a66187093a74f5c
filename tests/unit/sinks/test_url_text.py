"""A URL that is shown holds no secret."""

from __future__ import annotations

import pytest

from dsagent.agent.errors import DsagentError
from dsagent.agent.fleet.s3 import _endpoint
from dsagent.agent.sinks.otlp_config import otlp_config, remote_write_endpoint
from dsagent.agent.url_text import refuse_user, shown

CANARY = "canary-secret"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://host:4318/v1", "http://host:4318/v1"),
        (f"http://user:{CANARY}@host:1/a", "http://…@host:1/a"),
        (f"https://user:a/{CANARY}@b@host/a?x=1", "https://…@host/a?…"),
        (f"http://host/a?token={CANARY}", "http://host/a?…"),
        (f"http://host/a#{CANARY}", "http://host/a?…"),
        (f"user:{CANARY}@host", "…@host"),
        (f"s3://key:{CANARY}@bucket/x", "s3://…@bucket/x"),
        ("nonsense", "nonsense"),
    ],
)
def test_what_is_shown(url: str, text: str) -> None:
    assert shown(url) == text


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{CANARY}@127.0.0.1:4318",
        f"http://user:{CANARY}@127.0.0.1:99999",
        f"ftp://user:{CANARY}@127.0.0.1/",
        f"http://[::1/?token={CANARY}",
        f"ftp://127.0.0.1/?token={CANARY}",
    ],
)
def test_what_is_complained_of_is_shown_without_its_secrets(url: str) -> None:
    for parse in (
        lambda: otlp_config({}, url),
        lambda: otlp_config({"OTEL_EXPORTER_OTLP_ENDPOINT": url}),
        lambda: remote_write_endpoint(url, {}),
    ):
        with pytest.raises(DsagentError) as refused:
            parse()
        assert CANARY not in str(refused.value)


def test_credentials_of_a_store_are_not_shown() -> None:
    with pytest.raises(DsagentError) as refused:
        _endpoint(f"https://user:{CANARY}@host/path")
    assert CANARY not in str(refused.value)


def test_a_user_in_a_url_is_refused() -> None:
    refuse_user("http://host/a")
    with pytest.raises(ValueError, match="a user or password in a URL") as refused:
        refuse_user(f"http://u:{CANARY}@host/a")
    assert CANARY not in str(refused.value)
