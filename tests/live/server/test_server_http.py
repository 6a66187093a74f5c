"""The front end in a real process with the real engine: answers, refusals, lives."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
from served import PATIENCE_S, Event, Served, post

MAX_BODY_BYTES = 64 << 10
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = {"max_body_bytes": MAX_BODY_BYTES, "upload_timeout_s": 1.0}
    with Served(limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def ask(
    served: Served, method: str, path: str, body: bytes | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return response.status, headers, response.read()
    finally:
        connection.close()


def assert_in_order(life: Event) -> None:
    names = ("received", "tokenised", "queued", "first_scheduled", "first_token", "first_sent")
    moments = [life[f"{name}_ns"] for name in names]
    assert moments == sorted(moments)
    assert life["first_token_ns"] <= life["finished_ns"] <= life["sent_ns"]
    assert life["first_sent_ns"] <= life["sent_ns"]


def test_models_health_and_metrics(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-llama"]
    assert client.models.retrieve("tiny-llama").id == "tiny-llama"
    assert ask(served, "GET", "/health")[0] == 200
    status, headers, body = ask(served, "GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b'cache_request_total{cache_name="prefix",operation="lookup"}' in body


def test_chat_through_the_openai_client(served: Served, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny-llama",
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
        extra_headers={
            "traceparent": TRACEPARENT,
            "X-Request-Id": "mine" * 100,
            "X-Tenant-Id": "acme",
        },
    )
    answer = raw.parse()
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert raw.headers["x-request-id"] == answer.id
    life = served.closed(answer.id)
    assert_in_order(life)
    assert life["traceparent"] == TRACEPARENT
    assert life["external_id"] == ("mine" * 100)[:256]
    assert life["tenant"] == "acme"
    assert (life["operation"], life["model"]) == ("chat", "tiny-llama")
    assert (life["max_tokens"], life["temperature"], life["top_p"]) == (8, 0.0, 1.0)
    assert (life["prompt_tokens"], life["output_tokens"]) == (answer.usage.prompt_tokens, 8)
    assert (life["finish_reason"], life["error"]) == ("length", None)
    assert life["first_sent_ns"] == life["sent_ns"]


def test_a_stream_says_the_same_as_one_answer(served: Served, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny-llama",
        "prompt": "a prompt of more than sixteen tokens, for the prefix cache",
        "max_tokens": 40,
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 7,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**request)
    chunks = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (40, 48)
    life = served.closed(chunks[0].id)
    assert_in_order(life)
    assert life["cached_tokens"] == 48
    assert life["first_sent_ns"] < life["sent_ns"]


def test_a_chat_stream_begins_with_the_role(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny-llama", messages=[USER], max_tokens=12, stream=True, seed=1
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_answer(served: Served, client: openai.OpenAI, stream: bool) -> None:
    request: dict[str, Any] = {
        "model": "tiny-llama",
        "prompt": "x",
        "max_tokens": 60,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    text = client.completions.create(**request).choices[0].text
    stop = text[5:8]
    answer = client.completions.create(**request, stop=[stop, "never there"], stream=stream)
    if stream:
        chunks = list(answer)
        request_id = chunks[0].id
        said, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0]
    else:
        request_id = answer.id
        said, reason = answer.choices[0].text, answer.choices[0]
    assert said == text[: text.index(stop)]
    assert reason.finish_reason == "stop"
    # The engine was told: nothing of it is left.
    stats = served.idle_after(request_id)
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)


def test_the_clients_own_error_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny-llama", prompt="x", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="context") as refusal:
        client.completions.create(model="tiny-llama", prompt="x" * 3000)
    assert refusal.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny-llama", prompt="x" * 2047)


GOOD = {"model": "tiny-llama", "prompt": "x"}
REFUSED: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"not json", 400),
    (b'{"model": "tiny-llama", "prompt": "\xff"}', 400),
    (b'{"model": "tiny-llama", "prompt": "x", "temperature": NaN}', 400),
    (b'{"model": "tiny-llama", "prompt": "x", "temperature": 1e999}', 400),
    (b"[" * 50_000, 400),
    (json.dumps(GOOD | {"prompt": ""}).encode(), 200),  # the begin token alone
    (json.dumps(GOOD | {"prompt": [256] * 2048}).encode(), 400),
    (json.dumps(GOOD | {"n": 2}).encode(), 400),
    (json.dumps(GOOD | {"max_tokens": "many"}).encode(), 400),
    (json.dumps(GOOD | {"max_tokens": 2048}).encode(), 400),
    (json.dumps(GOOD | {"model": "other"}).encode(), 404),
    (b"x" * (MAX_BODY_BYTES + 1), 413),
]


@pytest.mark.parametrize(("body", "status"), REFUSED)
def test_wrong_bodies_are_refused_and_seen(served: Served, body: bytes, status: int) -> None:
    got, headers, answer = ask(served, "POST", "/v1/completions", body)
    assert got == status
    life = served.closed(headers["x-request-id"])
    opened = [e for e in served.events if e["event"] == "opened"]
    assert [e["request_id"] for e in opened].count(life["request_id"]) == 1
    if status != 200:
        error = json.loads(answer)["error"]
        assert error["type"] == "invalid_request_error"
        assert life["error"] == ("body_too_large" if status == 413 else "invalid_request")
        assert (life["queued_ns"], life["finish_reason"]) == (None, None)
        assert life["sent_ns"] >= life["received_ns"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
def test_wrong_paths_and_methods(served: Served, method: str, path: str, status: int) -> None:
    got, _, body = ask(served, method, path)
    assert got == status
    assert json.loads(body)["error"]["message"]


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000],
)
def test_what_is_not_http_gets_one_answer(served: Served, sent: bytes) -> None:
    with served.connect() as client:
        client.sendall(sent)
        assert read_all(client).startswith(b"HTTP/1.1 400 ")


def test_slow_headers_are_not_waited_for(served: Served) -> None:
    with served.connect() as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")
        assert read_all(client) == b""


def test_a_slow_upload_is_not_waited_for(served: Served) -> None:
    with served.connect() as client:
        client.sendall(post("/v1/completions", GOOD)[:-1])
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    request_id = answer.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
    assert served.closed(request_id)["error"] == "upload_timeout"


def test_a_refused_upload_is_thrown_away_but_not_for_ever(served: Served) -> None:
    with served.connect() as client:
        client.sendall(post("/v1/embeddings", b"x" * 100)[:-1])
        answer = read_all(client)  # up to where the server closes
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_an_endless_upload_is_cut(served: Served) -> None:
    with served.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        piece = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        for _ in range(MAX_BODY_BYTES // 0x4000 + 1):
            client.sendall(piece)
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_leaves_while_uploading(served: Served) -> None:
    with served.connect() as client:
        client.sendall(post("/v1/completions", GOOD, name="leaves early")[:-1])
    life = served.closed(served.opened("leaves early"))
    assert life["error"] == "client_disconnect"


LONG = GOOD | {"max_tokens": 2000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted_within_one_step(served: Served, stream: bool) -> None:
    name = f"leaves, {stream}"
    with served.connect() as client:
        client.sendall(post("/v1/completions", LONG | {"stream": stream}, name=name))
        request_id = served.opened(name)
        served.first_step(request_id)
        if stream:
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK")
    life = served.closed(request_id)
    assert (life["finish_reason"], life["error"]) == ("abort", "client_disconnect")
    stats = served.idle_after(request_id)
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
    steps = [e for e in served.events if e["event"] == "step"]
    late = [e for e in steps if request_id in e["served"] and e["start_ns"] > life["sent_ns"]]
    assert len(late) <= 1
    assert life["output_tokens"] < 2000


def test_a_client_that_reads_slowly_holds_up_nobody(served: Served, client: openai.OpenAI) -> None:
    ask_slowly = post("/v1/completions", LONG | {"stream": True}, "connection: close", name="slow")
    with served.connect(receive_bytes=4096) as slow:
        slow.sendall(ask_slowly)
        request_id = served.opened("slow")
        served.idle_after(request_id)  # all of its tokens are made, though nobody reads them
        answer = client.completions.create(**GOOD, max_tokens=4)
        quick = served.closed(answer.id)
        assert not any(
            e["event"] == "closed" and e["request_id"] == request_id for e in served.events
        )
        whole = read_all(slow)
    assert b"data: [DONE]" in whole
    life = served.closed(request_id)
    assert (life["output_tokens"], life["finish_reason"], life["error"]) == (2000, "length", None)
    # It says when its last byte left, not when it was made.
    assert life["finished_ns"] < quick["received_ns"] < life["sent_ns"]


def test_nothing_was_lost(served: Served, client: openai.OpenAI) -> None:
    """After all of the above: every request opened once and closed once, and it still answers."""
    answer = client.completions.create(**GOOD, max_tokens=2)
    served.closed(answer.id)
    opened = [e["request_id"] for e in served.events if e["event"] == "opened"]
    closed = [e["request_id"] for e in served.events if e["event"] == "closed"]
    assert sorted(opened) == sorted(closed)
    assert len(set(opened)) == len(opened)
