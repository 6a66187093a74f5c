"""How a serving process ends, and where it cannot begin."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from served import Served, post

LONG = {"model": "tiny-llama", "prompt": "x", "max_tokens": 600, "ignore_eos": True}


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as server:
        yield server


def held_request(served: Served) -> socket.socket:
    """A request that has been computed, and stays inside until its client reads."""
    client = served.connect(receive_bytes=4096)
    client.sendall(
        post("/v1/completions", LONG | {"stream": True}, "connection: close", name="held")
    )
    served.idle_after(served.opened("held"))
    return client


def status_of(served: Served, request: bytes) -> int:
    with served.connect() as client:
        client.sendall(request)
        return int(client.recv(4096).split()[1])


GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def until_draining(served: Served) -> None:
    while status_of(served, GET_HEALTH) == 200:
        pass


def test_sigterm_drains(served: Served) -> None:
    with held_request(served) as client:
        served.process.send_signal(signal.SIGTERM)
        until_draining(served)
        assert status_of(served, post("/v1/completions", LONG, name="late")) == 503
        assert served.closed(served.opened("late"))["error"] == "unavailable"
        whole = b"".join(iter(lambda: client.recv(65536), b""))
    assert whole.startswith(b"HTTP/1.1 200 OK")
    assert b'"finish_reason":"length"' in whole
    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert served.exit_code() == 0
    assert served.stderr() == ""


def test_a_second_signal_stops_at_once(served: Served) -> None:
    with held_request(served):
        served.process.send_signal(signal.SIGTERM)
        until_draining(served)
        served.process.send_signal(signal.SIGINT)
        assert served.exit_code() == 128 + signal.SIGINT
    life = served.wait(lambda event: event["event"] == "closed")
    assert life["error"] == "unavailable"
    assert served.stderr() == ""


def test_draining_ends_in_time() -> None:
    with Served(limits={"drain_s": 0.2}) as served, held_request(served):
        served.process.send_signal(signal.SIGTERM)
        assert served.exit_code() == 1


def test_a_model_that_fails_is_not_healthy_for_long() -> None:
    with Served(broken=True) as served:
        assert status_of(served, post("/v1/completions", LONG)) == 500
        assert status_of(served, GET_HEALTH) == 200  # one failure is not the end
        with served.connect() as client:
            client.sendall(post("/v1/completions", LONG | {"stream": True}, "connection: close"))
            whole = b"".join(iter(lambda: client.recv(65536), b""))
        assert whole.startswith(b"HTTP/1.1 200 OK")
        assert b'data: {"error": {"message": "the engine failed' in whole
        assert status_of(served, post("/v1/completions", LONG)) in (500, 503)
        assert status_of(served, GET_HEALTH) == 503
        assert status_of(served, post("/v1/completions", LONG)) == 503
        lives = [event for event in served.events if event["event"] == "closed"]
        assert {life["error"] for life in lives} == {"engine_error"}
        served.process.send_signal(signal.SIGTERM)
        assert served.exit_code() == 0


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "dsagent.instrumentation.reference"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = serve("--model", "tiny-llama", "--port", str(port))
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_kv_cache_that_does_not_fit() -> None:
    ended = serve("--model", "tiny-llama", "--port", "0", "--num-kv-blocks", str(2**40))
    assert ended.returncode == 1
    assert "KV cache" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_model_that_is_not_there() -> None:
    ended = serve("--model", "no-such-model", "--port", "0")
    assert ended.returncode == 2
    assert "no-such-model" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.smollm2
def test_smollm2_answers_with_sense() -> None:
    command = [sys.executable, "-W", "error", "-m", "dsagent.instrumentation.reference"]
    process = subprocess.Popen(
        [*command, "--model", "smollm2", "--port", "0", "--max-model-len", "512"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("listening on http://127.0.0.1:"), line
        question = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        with socket.create_connection(("127.0.0.1", int(line.rpartition(":")[2]))) as client:
            request = post("/v1/chat/completions", question, "connection: close")
            client.sendall(request)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        choice = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
