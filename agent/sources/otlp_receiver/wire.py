"""Protobuf's wire format, walked without building objects.

A general decoder makes an object of every sub-message: four megabytes of empty ones become some
hundred. This one looks only where it is told to, and only so often.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

VARINT, I64, LEN, I32 = 0, 1, 2, 5

_DOUBLE = struct.Struct("<d")


class BadBodyError(ValueError):
    """Not what it claims to be, or more than is taken."""


class Reader:
    """One body, and how many fields of it will still be looked at."""

    def __init__(self, data: bytes, max_fields: int) -> None:
        self.data = data
        self._fields_left = max_fields

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(number, wire type, a, b) of each field in data[start:end]. For LEN the content is
        data[a:b]; for VARINT a is the value; for I64 and I32 a is where it lies. Raises
        BadBodyError for what is not in the format, and beyond the fields allowed."""
        at = start
        while at < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise BadBodyError("too many fields")
            tag, at = self._varint(at, end)
            number, wire = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                raise BadBodyError(f"no field has the number {number}")
            if wire == LEN:
                length, at = self._varint(at, end)
                a, b = at, at + length
                at = b
            elif wire == VARINT:
                a, at = self._varint(at, end)
                b = at
            elif wire in (I64, I32):
                a, b = at, at + (8 if wire == I64 else 4)
                at = b
            else:
                raise BadBodyError(f"no wire type of a field is {wire}")
            if at > end:
                raise BadBodyError("it breaks off within a field")
            yield number, wire, a, b

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        data, value = self.data, 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise BadBodyError("it breaks off within a number")
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, at
        raise BadBodyError("a number of more than ten bytes")

    def text(self, start: int, end: int, max_bytes: int) -> str:
        """The beginning of a string, whatever bytes it is made of."""
        return self.data[start : min(end, start + max_bytes)].decode("utf-8", "replace")

    def uint64(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 8], "little")

    def double(self, at: int) -> float:
        value: float = _DOUBLE.unpack_from(self.data, at)[0]
        return value
