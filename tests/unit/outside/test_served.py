"""What engines say of themselves, by whichever name; hostile scrapes."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsagent.agent.metrics.exposition import Scraped, parse
from dsagent.agent.metrics.served import NAMES, QUANTITIES, quantities
from dsagent.agent.sources import served

VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b\\"c"} 2.0
vllm:num_requests_running{engine="1",model_name="x"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="x"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="x"} 0.25
vllm:request_success_total{engine="0",finished_reason="stop",model_name="x"} 4.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="x"} 9.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="x"} 1.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="x"} 6.0
vllm:iteration_tokens_total_count{engine="0",model_name="x"} 136.0
"""


def test_several_engines_behind_one_address() -> None:
    assert quantities(parse(VLLM, NAMES)) == {
        "requests.running": 5.0,
        "kv_cache.usage": 0.375,
        "requests.finished": 5.0,
        "steps.yielding": 136.0,
    }


def test_older_names_count_where_the_newer_are_not_there() -> None:
    old = "vllm:gpu_cache_usage_perc 0.5\n"
    assert quantities(parse(old, NAMES)) == {"kv_cache.usage": 0.5}
    assert quantities(parse(old + "vllm:kv_cache_usage_perc 0.75\n", NAMES)) == {
        "kv_cache.usage": 0.75
    }


def test_lines_that_make_no_sense_are_left_out() -> None:
    text = (
        "llamacpp:n_decode_total\nllamacpp:n_decode_total x\nllamacpp:n_decode_total NaN\n"
        'llamacpp:n_decode_total{a="b" 3\nllamacpp:n_decode_total{a=b} 3\n'
        f'llamacpp:n_decode_total{{a="{"x" * 9000}"}} 3\nllamacpp:n_decode_total 18 1700000000000\n'
    )
    assert parse(text, NAMES) == [Scraped("llamacpp:n_decode_total", {}, 18.0)]


def test_no_name_stands_for_two_things() -> None:
    spelled = [spelling.name for each in QUANTITIES for spelling in each.spellings]
    assert len(spelled) == len(set(spelled)) == len(NAMES)
    assert len({each.key for each in QUANTITIES}) == len(QUANTITIES)


@pytest.mark.parametrize("at_once", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n"])
def test_a_server_that_drips_is_left(at_once: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its head, or in its body."""
    monkeypatch.setattr(served, "TIMEOUT_S", 0.3)
    drips = b"x" * 400 if at_once else b"HTTP/1.1 200 OK\r\nX: %s\r\n\r\n" % (b"x" * 400)
    left = threading.Event()
    server = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(at_once)
            for byte in drips:
                left.wait(0.05)
                connection.sendall(bytes((byte,)))

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            served._get("127.0.0.1", server.getsockname()[1])
    finally:
        left.set()
        thread.join()
        server.close()


@given(st.text(max_size=200), st.sampled_from(sorted(NAMES)))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(text: str, name: str) -> None:
    parse(text, NAMES)
    for sample in parse(name + text, NAMES):
        assert sample.value == sample.value
