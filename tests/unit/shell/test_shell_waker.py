"""A loop is woken from anywhere, and what comes after its end touches nobody's descriptor."""

from __future__ import annotations

import os
import selectors
import signal
import threading

import pytest

from dsagent.agent.session.waker import Waker


def test_it_wakes_a_selector() -> None:
    waker = Waker()
    with selectors.DefaultSelector() as selector:
        selector.register(waker.fd, selectors.EVENT_READ)
        assert selector.select(0) == []
        thread = threading.Thread(target=waker.wake)
        thread.start()
        assert len(selector.select(60)) == 1
        thread.join()
    waker.close()


def test_after_its_end_it_writes_to_nobody() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    waker = Waker()
    number = waker.fd
    waker.close()
    waker.close()
    os.dup2(writing, number)  # the number is another's by now
    waker.wake()
    with pytest.raises(BlockingIOError):
        os.read(reading, 8)
    for fd in {reading, writing, number}:
        os.close(fd)


def test_threads_and_signals_may_come_while_it_ends() -> None:
    for _ in range(50):
        waker = Waker()
        begin = threading.Barrier(3)

        def many(waker: Waker = waker, begin: threading.Barrier = begin) -> None:
            begin.wait()
            for _ in range(200):
                waker.wake()

        threads = [threading.Thread(target=many) for _ in range(2)]
        before = signal.signal(signal.SIGUSR1, lambda *_: waker.wake())  # noqa: B023
        for thread in threads:
            thread.start()
        begin.wait()
        signal.raise_signal(signal.SIGUSR1)
        waker.close()
        signal.raise_signal(signal.SIGUSR1)
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGUSR1, before)
