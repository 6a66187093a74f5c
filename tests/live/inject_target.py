"""A Python process to inject into: its main thread is in the state that argv names, while another
thread answers expressions on stdin, one a line, as JSON.

The states end when told to (`done` is set, or what they wait for comes), and say so: a wait that
was cut short, or lost what it waited for, would be seen. Standard library only, for Python 3.9.
"""

# ruff: noqa: PLW0603 - the globals are what is asked for

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import mmap
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

done = False
ticks = 0
broken = 0
inside: list[bool] = []  # what injected code leaves here to be asked for
items: queue.Queue[str] = queue.Queue()
port = 0
flag = ctypes.c_int(0)
event = threading.Event()
ours, theirs = socket.socketpair()
say_lock = threading.Lock()


def say(value: object) -> None:
    with say_lock:
        print(json.dumps(value), flush=True)


def answer() -> None:
    for line in sys.stdin:
        if line.startswith("!"):
            exec(line[1:], globals())
            say("ok")
        else:
            say(eval(line, globals()))
    os._exit(0)


def naps() -> None:
    global ticks
    while not done:
        ticks += 1
        time.sleep(0.005)


def sleeps() -> bool:
    began = time.monotonic()
    time.sleep(1.5)
    return time.monotonic() - began >= 1.5


def work() -> tuple[int, float]:
    total, scale = 0, 1.0
    for i in range(20000):
        total += i * i
        scale = scale * 1.0001 + 0.5
    return total, scale


def busy() -> None:
    """Arithmetic whose result is known: a register that was not restored would spoil it."""
    global ticks, broken
    expected = work()
    while not done:
        broken += work() != expected
        ticks += 1


def in_c() -> None:
    """Holds the interpreter's lock for long in C, again and again."""
    global ticks
    while not done:
        sum(range(3_000_000))
        ticks += 1


def long_in_c() -> None:
    """Seconds without Python, without its lock, and without a system call."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 6_000_000)
    naps()


def in_machine_code() -> int:
    """Turns in a loop of its own with another rounding mode, until `flag`; then says the mode."""
    machine = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    machine.write(
        bytes.fromhex(
            "c706805f0000"  # movl $0x5f80, (%rsi)
            "0fae16"  # ldmxcsr (%rsi)
            "833f00"  # cmpl $0, (%rdi)
            "74fb"  # je, to the cmpl
            "0fae1e"  # stmxcsr (%rsi)
            "c74604801f0000"  # movl $0x1f80, 4(%rsi)
            "0fae5604"  # ldmxcsr 4(%rsi)
            "c3"  # ret
        )
    )
    address = ctypes.addressof(ctypes.c_char.from_buffer(machine))
    modes = (ctypes.c_uint32 * 2)()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)(
        ctypes.addressof(flag), ctypes.addressof(modes)
    )
    return modes[0]


def threads() -> None:
    workers = [threading.Thread(target=busy) for _ in range(4)]
    for worker in workers:
        worker.start()
    busy()
    for worker in workers:
        worker.join()


def echoes() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()

    async def serve() -> None:
        global port
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        say("ready")
        async with server:
            await server.serve_forever()

    asyncio.run(serve())


def epoll() -> int:
    waits = select.epoll()
    waits.register(theirs.fileno(), select.EPOLLIN)
    return len(waits.poll())


def poll() -> int:
    waits = select.poll()
    waits.register(theirs.fileno(), select.POLLIN)
    return len(waits.poll(600_000))


waker = threading.Thread(target=event.wait)
waker.start()
STATES: dict[str, Callable[[], object]] = {
    "naps": naps,
    "sleeps": sleeps,
    "busy": busy,
    "in_c": in_c,
    "long_in_c": long_in_c,
    "in_machine_code": in_machine_code,
    "threads": threads,
    "echoes": echoes,
    "epoll": epoll,
    "poll": poll,
    "select": lambda: len(select.select([theirs], [], [])[0]),
    "recv": lambda: theirs.recv(1).decode(),
    "queue": items.get,
    "queue_with_limit": lambda: items.get(timeout=600),
    "event": event.wait,
    "join": waker.join,
}
answering = threading.Thread(target=answer, daemon=True)
answering.start()
if sys.argv[1] != "echoes":
    say("ready")
result = STATES[sys.argv[1]]()
say(["over", result])
event.set()
answering.join()
