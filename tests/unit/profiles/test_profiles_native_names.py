"""Addresses of this very process get the names that its libraries give them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsagent.agent.host.procfs import ProcessGone
from dsagent.agent.profiles import native_names
from dsagent.agent.profiles.native_names import UNKNOWN, NativeNames, readable


@pytest.fixture
def names() -> Iterator[NativeNames]:
    try:
        made = NativeNames(os.getpid())
    except PermissionError:
        pytest.skip("not even one's own memory may be read here")
    made.look_again()
    yield made
    made.close()


def address_of(name: str) -> int:
    function = getattr(ctypes.CDLL(None), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@pytest.mark.parametrize("name", ["getpid", "qsort", "dprintf"])
def test_a_function_of_the_c_library(names: NativeNames, name: str) -> None:
    library, function = names.frames(address_of(name) + 1)
    assert library.function.startswith("libc")
    assert name in function.function
    assert function.file == library.file


def test_symbols_of_few_libraries_are_kept_and_read_again(
    names: NativeNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_names, "MAX_KEPT_SYMBOLS", 1)
    addresses = {name: address_of(name) for name in ("qsort", "Py_GetVersion", "getpid")}
    for name, address in addresses.items():
        assert name in names.frames(address + 1)[1].function
        assert len(names._tables) <= 2  # the one just read, and one that has no symbols


def test_addresses_of_nothing(names: NativeNames) -> None:
    for address in (0, 1, 1 << 47, (1 << 64) - 1):
        assert names.frames(address) == (UNKNOWN, UNKNOWN)


def test_a_buffer_is_no_library(names: NativeNames) -> None:
    buffer = ctypes.create_string_buffer(64)
    assert names.frames(ctypes.addressof(buffer))[1] == UNKNOWN


def test_a_process_that_is_gone() -> None:
    with pytest.raises(ProcessGone):
        NativeNames(2**22 + 1)


@pytest.mark.parametrize(
    ("mangled", "expected"),
    [
        ("_ZN2at6native4gemmEv", "at::native::gemm"),
        ("_ZN2at12_GLOBAL__N_13addERKNS_6TensorE", "at::(anonymous)::add"),
        ("_ZNK3c1010TensorImpl3dimEv", "c10::TensorImpl::dim"),
        ("_Z3addii", "add"),
        ("sgemm_", "sgemm_"),
        ("_ZN999x", "_ZN999x"),
        ("_Z", "_Z"),
        ("", ""),
    ],
)
def test_readable_names(mangled: str, expected: str) -> None:
    assert readable(mangled.encode()) == expected


@given(st.binary(max_size=300))
def test_any_name_becomes_text_that_is_safe_to_show(name: bytes) -> None:
    for each in (name, b"_ZN" + name, b"_Z" + name):
        text = readable(each)
        assert text.isprintable()
        assert len(text) < 2500
