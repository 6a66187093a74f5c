"""The server of pages: whatever comes over its connections, the next client is answered."""

from __future__ import annotations

import errno
import http.client
import selectors
import socket
import socketserver
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import until

from dsagent.agent.errors import DsagentError
from dsagent.agent.listening import control
from dsagent.agent.listening.admission import Guard
from dsagent.agent.listening.pages import TEXT, Page, PageServer

PIECES = st.binary(max_size=60) | st.sampled_from(
    [
        *(b"GET / HTTP/1.1\r\n", b"GET ", b"HTTP/0.9", b"POST / HTTP/1.1\r\n", b"\r\n", b"\n\n"),
        *(b"Authorization: Bearer x\r\n", b"Content-Length: 5\r\n", b"Expect: 100-continue\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"\x16\x03\x01\x02\x00\x01", b"A: " + b"b" * 9000),
    ]
)


@pytest.fixture
def server() -> Iterator[PageServer]:
    def answer(path: str, _accept: str) -> Page:
        if path == "/broken":
            raise RuntimeError("\x1b[2J")
        return Page(200 if path == "/" else 404, TEXT, "here\n")

    made = PageServer("127.0.0.1", 0, "--prometheus", Guard(), answer)
    made.start("pages")
    yield made
    made.stop(5.0)


def status(server: PageServer, path: str = "/", method: str = "GET") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request(method, path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PIECES, max_size=6))
def test_no_bytes_end_it(server: PageServer, pieces: list[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"".join(pieces))
    assert status(server) == 200


def test_only_get_and_only_what_is_there(server: PageServer) -> None:
    assert status(server, "/other") == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert status(server, method=method) == 501
    assert server.tally.answered == 0


def test_a_page_that_fails_is_counted_and_told_tamely(server: PageServer) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        status(server, "/broken")
    until(lambda: server.tally.failed == 1)
    assert server.tally.reason == r"RuntimeError: \x1b[2J"
    assert status(server) == 200


def test_without_descriptors_it_waits_instead_of_spinning(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays in the queue, and each try finds it again: it sleeps in between."""
    slept: list[float] = []
    accept, sleep = socketserver.TCPServer.get_request, time.sleep

    def refuse(_server: object) -> None:
        if len(slept) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(_server)  # type: ignore[arg-type,return-value]

    def noted(seconds: float) -> None:
        slept.append(seconds)
        sleep(0)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", refuse)
    monkeypatch.setattr("dsagent.agent.listening.pages.time.sleep", noted)
    assert status(server) == 200
    assert min(slept[:3]) > 0.01


def test_the_control_socket_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    with selectors.DefaultSelector() as selector:
        server = control.ControlServer(1_999_999_999, selector, dict)
        try:
            monkeypatch.setattr("dsagent.agent.listening.control.time.sleep", slept.append)
            with pytest.MonkeyPatch.context() as patch:

                def refuse(_socket: object) -> None:
                    raise OSError(errno.EMFILE, "Too many open files")

                patch.setattr(socket.socket, "accept", refuse)
                server._accept(0)
            assert slept
        finally:
            server.close()


def test_a_port_that_is_taken_is_one_line(server: PageServer) -> None:
    with pytest.raises(DsagentError, match=r"cannot listen on 127\.0\.0\.1:\d+ .*--listen HOST"):
        PageServer("127.0.0.1", server.port, "--listen", Guard(), server.answer)
