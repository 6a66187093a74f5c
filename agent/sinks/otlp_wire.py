"""The little of protobuf's wire format that is written by hand."""

from __future__ import annotations

MAX_STRING_CHARS = 1024


def varint(number: int) -> bytes:
    """A number that is not negative."""
    if number < 0x80:
        return _ONE_BYTE[number]
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_ONE_BYTE = tuple(bytes((number,)) for number in range(0x80))


def field(number: int, content: bytes) -> bytes:
    """A field, of a number below 16, that holds a message, a string or bytes."""
    return _ONE_BYTE[number << 3 | 2] + varint(len(content)) + content


def clean_text(text: str, max_chars: int = MAX_STRING_CHARS) -> bytes:
    """UTF-8, fit for protobuf, which refuses lone surrogates; bounded."""
    return text[:max_chars].encode("utf-8", "replace")
