"""Clients that read or upload slowly, and a network that loses."""

from __future__ import annotations

import ctypes
import http.client
import random
import socket
import struct
import threading
import time

from bench import Bench, Injector
from load import Sent, send, text
from truth import Fault, Injection, Timeline, after_output, before_queue

_ATTACH_FILTER, _DETACH_FILTER = 26, 27


def slow_reader(bench: Bench, dice: random.Random, seconds: float | None = None) -> Injection:
    """It reads the first token, then nothing for a while."""
    seconds = dice.uniform(1.5, 4.5) if seconds is None else seconds
    pauses: list[tuple[int, int]] = []

    def pause(sent: Sent) -> None:
        if sent.first_ns is not None and not pauses:
            start_ns = time.monotonic_ns()
            time.sleep(seconds)
            pauses.append((start_ns, time.monotonic_ns()))

    connection = _narrow_connection(bench)
    question, tokens = f"Tell me of {text(dice, 3)}.", dice.randint(500, 700)
    sent = send(bench.target, question, tokens, dice, on_chunk=pause, connection=connection)
    return _itself("slow_reader", pauses, sent)


def _narrow_connection(bench: Bench) -> http.client.HTTPConnection:
    """Small segments and a small buffer here let the server's socket hold some 50 KB, no more."""
    connection = http.client.HTTPConnection(bench.target.host, bench.target.port, timeout=120)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.sock.connect((bench.target.host, bench.target.port))
    return connection


def retransmits(bench: Bench, dice: random.Random) -> Injection:
    """From the first token on the client's socket drops all that comes, for a while; the server
    sends it again, at ever longer intervals. Over when the next piece of text is here."""
    seconds = dice.uniform(1.0, 2.5)
    losses: list[tuple[int, int]] = []
    start_ns = 0
    heard = threading.Event()
    connection = _narrow_connection(bench)
    client = connection.sock
    assert client is not None

    def hear() -> None:
        time.sleep(seconds)
        client.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
        heard.set()

    listener = threading.Thread(target=hear)

    def go_deaf(sent: Sent) -> None:
        nonlocal start_ns
        if sent.first_ns is not None and not start_ns:
            drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))  # return 0
            program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
            client.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
            start_ns = time.monotonic_ns()
            listener.start()
        elif heard.is_set() and not losses:
            losses.append((start_ns, time.monotonic_ns()))

    question, tokens = f"Tell me of {text(dice, 3)}.", dice.randint(500, 700)
    sent = send(bench.target, question, tokens, dice, on_chunk=go_deaf, connection=connection)
    listener.join()
    return _itself("retransmits", losses, sent)


def slow_uploader(bench: Bench, dice: random.Random) -> Injection:
    """The headers at once, the body in two pieces with a pause between."""
    seconds = dice.uniform(0.05, 1.0)
    pauses: list[tuple[int, int]] = []

    def upload(
        connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]
    ) -> None:
        connection.putrequest("POST", "/v1/chat/completions")
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders(body[:20])
        start_ns = time.monotonic_ns()
        time.sleep(seconds)
        pauses.append((start_ns, time.monotonic_ns()))
        connection.send(body[20:])

    question = f"Tell me of {text(dice, 3)}."
    sent = send(bench.target, question, dice.randint(4, 12), dice, upload=upload)
    return _itself("slow_uploader", pauses, sent)


def _itself(fault: str, pauses: list[tuple[int, int]], sent: Sent) -> Injection:
    """Nobody but that request is the victim."""
    if sent.error or not pauses:
        raise RuntimeError(f"the injector's own request failed: {sent.error}")
    start_ns, end_ns = pauses[0]
    victims = frozenset({sent.trace_id})
    return Injection(fault, start_ns, end_ns, Timeline.of(pauses), victims=victims)


SLOW_READER = Injector(
    Fault("slow_reader", frozenset({"net.backpressure"}), "logged", after_output),
    "tiny-llama",
    slow_reader,
)
RETRANSMITS = Injector(
    Fault("retransmits", frozenset({"net.retransmit"}), "logged", after_output),
    "tiny-llama",
    retransmits,
)
SLOW_UPLOADER = Injector(
    Fault("slow_uploader", frozenset({"frontend.in"}), "logged", before_queue),
    "smollm2",
    slow_uploader,
)
