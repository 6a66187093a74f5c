"""What cannot be seen is found, and said."""

from __future__ import annotations

import ctypes
import os

import pytest

from dsagent.agent.sources.outside.unseen import rings_of_io_uring, sentence

IO_URING_SETUP = 425


def test_rings_of_io_uring_are_found() -> None:
    before = rings_of_io_uring([os.getpid()])
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    fd = ctypes.CDLL(None, use_errno=True).syscall(IO_URING_SETUP, 4, parameters)
    if fd < 0:
        pytest.skip(f"no io_uring here: {os.strerror(ctypes.get_errno())}")
    try:
        assert rings_of_io_uring([os.getpid(), 1 << 22]) == before + 1
    finally:
        os.close(fd)
    assert rings_of_io_uring([os.getpid()]) == before


def test_nothing_is_said_where_all_was_seen() -> None:
    assert sentence(0, 0, 0, 0) == ""
    assert sentence(2, 0, 1, 0) == (
        "2 connections are ciphered (TLS): their requests are not seen; "
        "1 rings of io_uring are open: what goes through them is not seen"
    )
