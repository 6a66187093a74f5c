"""What calls on sockets tell of real HTTP servers: known numbers of requests and tokens, heads in
pieces, requests behind one another, clients that leave, ciphers, marks of steps."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernel_lab import Child, require_kernel_source

from dsagent.agent.facts import FACT_DTYPE, Kind, Readings, Target
from dsagent.agent.sources.kernel import KernelSource
from dsagent.agent.sources.outside.capture import Capture
from dsagent.agent.sources.outside.messages import MessageKind
from dsagent.agent.sources.outside.source import OutsideSource
from dsagent.instrumentation.records import RequestRecord

pytestmark = pytest.mark.ebpf

REQUESTS, TOKENS = 13, 7
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SERVER = """
import asyncio, json, uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
async def complete(request):
    await request.body()
    async def pieces():
        for number in range(TOKENS):
            piece = {"id": "cmpl-1", "model": "m", "choices": [{"text": f"t{number}"}]}
            yield "data: " + json.dumps(piece) + "\\n\\n"
            await asyncio.sleep(0.002)
        yield "data: [DONE]\\n\\n"
    return StreamingResponse(pieces(), media_type="text/event-stream")
async def health(request):
    return PlainTextResponse("ok")
app = Starlette(routes=[
    Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)])
listener = socket_module.create_server(("127.0.0.1", 0))
say(port=listener.getsockname()[1])
uvicorn.Server(uvicorn.Config(app, http=HTTP, log_level="critical", lifespan="off")).run(
    sockets=[listener])
"""

AIOHTTP = """
import asyncio, json
from aiohttp import web
async def complete(request):
    await request.read()
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for number in range(TOKENS):
        piece = {"id": "cmpl-1", "model": "m", "choices": [{"text": f"t{number}"}]}
        await reply.write(b"data: " + json.dumps(piece).encode() + b"\\n\\n")
        await asyncio.sleep(0.002)
    await reply.write(b"data: [DONE]\\n\\n")
    await reply.write_eof()
    return reply
async def health(request):
    return web.Response(text="ok")
app = web.Application()
app.add_routes([web.post("/v1/completions", complete), web.get("/health", health)])
listener = socket_module.create_server(("127.0.0.1", 0))
say(port=listener.getsockname()[1])
web.run_app(app, sock=listener, print=None)
"""


def request(body: bytes = b'{"prompt": "x"}') -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\ntraceparent: 00-{TRACE}-{'b' * 16}-01\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


class Seen:
    """An OutsideSource on a child, and what it has brought."""

    def __init__(self, pid: int, make_capture: Callable[[], Capture] = Capture) -> None:
        self.source = OutsideSource(Target(pid, 1, 0, "child", (), "http"), make_capture)
        self.readings = Readings()

    def __enter__(self) -> Seen:
        self.source.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.source.stop()

    def until(self, enough: Callable[[Readings], bool]) -> Readings:
        end = time.monotonic() + 30
        while not enough(self.readings) and time.monotonic() < end:
            brought = self.source.poll(time.monotonic_ns())
            self.readings.opened += brought.opened
            self.readings.closed += brought.closed
            self.readings.steps += brought.steps
            time.sleep(0.01)
        assert enough(self.readings), self.readings
        return self.readings

    def records(self, count: int) -> list[RequestRecord]:
        return self.until(lambda readings: len(readings.closed) >= count).closed


@pytest.fixture(params=["h11", "httptools", "aiohttp"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(pid, port) of an unmodified uvicorn with either of its parsers, or aiohttp."""
    require_kernel_source()
    body = f"import socket as socket_module\nHTTP, TOKENS = {request.param!r}, {TOKENS}\n"
    body += AIOHTTP if request.param == "aiohttp" else SERVER
    with Child(body, installed=True) as child:
        yield child.pid, child.hear()["port"]


def whole_reply(client: socket.socket, count: int = 1) -> None:
    """Reads until `count` replies have ended."""
    got = b""
    while got.count(b"\r\n0\r\n\r\n") < count:
        piece = client.recv(65536)
        assert piece, got
        got += piece


def test_all_requests_and_all_their_tokens(server: tuple[int, int]) -> None:
    pid, port = server
    with Seen(pid) as seen:
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(REQUESTS):
                client.sendall(request())
                whole_reply(client)
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            client.recv(65536)
        records = seen.records(REQUESTS)
    assert len(records) == len(seen.readings.opened) == REQUESTS
    assert {record.output_tokens for record in records} == {TOKENS}
    assert {record.trace_id for record in records} == {int(TRACE, 16)}
    assert {(r.request_id, r.model, r.operation, r.error) for r in records} == {
        ("cmpl-1", "m", "text_completion", None)
    }
    for record in records:
        assert record.first_sent_ns is not None
        assert record.received_ns < record.first_sent_ns < record.sent_ns


def test_a_head_in_pieces_begins_with_its_first_byte(server: tuple[int, int]) -> None:
    pid, port = server
    with Seen(pid) as seen:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            before_ns = time.monotonic_ns()
            text = request()
            client.sendall(text[:1])
            after_ns = time.monotonic_ns()
            for piece in (text[1:20], text[20:60], text[60:]):
                time.sleep(0.02)
                client.sendall(piece)
            whole_reply(client)
        (record,) = seen.records(1)
    assert before_ns < record.received_ns < after_ns + 10_000_000
    assert record.trace_id == int(TRACE, 16) and record.output_tokens == TOKENS


def test_requests_behind_one_another(server: tuple[int, int]) -> None:
    pid, port = server
    with Seen(pid) as seen:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request() + request() + request())
            whole_reply(client, 3)
        records = seen.records(3)
    assert [record.output_tokens for record in records] == [TOKENS] * 3


def test_a_client_that_leaves(server: tuple[int, int]) -> None:
    pid, port = server
    with Seen(pid) as seen:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request())
            client.recv(10)
            left_ns = time.monotonic_ns()
        (record,) = seen.records(1)
    assert record.finish_reason == "abort" and record.error is None
    assert abs(record.sent_ns - left_ns) < 50_000_000


def test_what_finds_no_room_is_counted(server: tuple[int, int]) -> None:
    pid, port = server
    with Seen(pid, lambda: Capture(ring_bytes=8192)) as seen:
        with socket.create_connection(("127.0.0.1", port)) as client:
            for _ in range(REQUESTS):
                client.sendall(request())
                whole_reply(client)
        seen.until(lambda _: seen.source.status().dropped > 0)
        # And the one after is whole again.
        before = len(seen.readings.closed)
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(request())
            whole_reply(client)
        records = seen.records(before + 1)
        assert records[-1].output_tokens == TOKENS
        assert seen.source.uncounted_losses == 0


def test_what_is_ciphered_is_told(server: tuple[int, int]) -> None:
    pid, port = server
    with Seen(pid) as seen:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
            client.settimeout(1)
            client.recv(100)
        seen.until(lambda _: "ciphered" in seen.source.status().reason)
        assert "1 connections are ciphered" in seen.source.status().reason


CALLS = 101
STUB = "int cudaGraphLaunch(void *graph, void *stream) { return graph == stream; }\n"
CALLER = """
stub = ctypes.CDLL(PATH)
say(ready=True); hear()
for number in range(CALLS):
    stub.cudaGraphLaunch(None, None)
    nap(1000)
say(tid=threading.get_native_id()); hear()
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A library that has nothing of CUDA's but the name of a function."""
    require_kernel_source()
    source, made = tmp_path / "stub.c", tmp_path / "libcudart.so.12"
    source.write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, source], check=True)
    return made


def test_each_call_of_a_marker_is_a_step_and_tags_what_the_kernel_sees(stub: Path) -> None:
    with Child(f"PATH, CALLS = {str(stub)!r}, {CALLS}\n{CALLER}") as child:
        child.hear()
        kernel = KernelSource(Target(child.pid, 1, 0, "child", (), "http"), {})
        with Seen(child.pid) as seen:
            kernel.start()
            try:
                seen.source.tag(kernel.loaded)
                child.say()
                tid = child.hear()["tid"]
                steps = seen.until(lambda readings: len(readings.steps) >= CALLS).steps
                facts = kernel.poll(time.monotonic_ns()).facts
                kernel.poll(time.monotonic_ns())
            finally:
                kernel.stop()
            assert "a CUDA graph is launched" in seen.source.status().reason
    assert [step.step_id for step in steps] == list(range(1, CALLS + 1))
    assert {(step.pid, step.tid) for step in steps} == {(child.pid, tid)}
    assert facts.dtype == FACT_DTYPE
    slept = facts[(facts["kind"] == Kind.OFF_OTHER) & (facts["tid"] == tid)]
    assert len(set(slept["step_id"].tolist()) & set(range(1, CALLS + 1))) > CALLS // 2


SENDS = 101


def test_what_a_core_sends_over_unix_sockets_is_told_where_asked() -> None:
    require_kernel_source()
    body = f"""
import socket
one, other = socket.socketpair()
say(ready=True)
while True:
    hear()
    for _ in range({SENDS}):
        one.send(b"x")
    say(done=True)
"""
    with Child(body, name="VLLM::EngineCor") as child:
        child.hear()
        capture = Capture()
        try:
            capture.follow([child.pid])
            capture.attach()
            for senders, expected in (((), 0), ((child.pid,), SENDS)):
                capture.follow([child.pid], senders)
                child.say()
                child.hear()
                found = [(message.kind, message.connection) for message in capture.read()]
                assert found == [(MessageKind.LOCAL, child.pid)] * expected  # to itself
        finally:
            capture.close()
