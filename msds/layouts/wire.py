"""The protobuf wire format, as far as MindSpore's files use it: fields of a stretch of a file, without reading bytes.

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

VARINT, LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}
_HEAD_BYTES = 20  # two varints of at most ten bytes


class WireError(Exception):
    """The bytes are not a message; the text says where."""


@dataclass(frozen=True)
class Field:
    """One field: its number, and its value (a varint) or the stretch of the file that holds it."""

    number: int
    value: int
    stretch: tuple[int, int] | None


def fields(descriptor: int, start: int, stop: int) -> Iterator[Field]:
    """The fields of the message in bytes [start, stop) of an open file. WireError for what is no message."""
    while start < stop:
        head = os.pread(descriptor, min(_HEAD_BYTES, stop - start), start)
        tag, used = _varint(head, 0, start)
        kind = tag & 7
        if kind == VARINT:
            value, used = _varint(head, used, start)
            yield Field(tag >> 3, value, None)
            start += used
        elif kind == LENGTH or kind in _FIXED:
            length = _FIXED.get(kind, 0)
            if kind == LENGTH:
                length, used = _varint(head, used, start)
            if start + used + length > stop:
                raise WireError(f"a field at byte {start} states {length} bytes, {stop - start - used} are left")
            yield Field(tag >> 3, 0, (start + used, start + used + length))
            start += used + length
        else:
            raise WireError(f"byte {start} does not begin a field")


def content(descriptor: int, field: Field) -> bytes:
    """The bytes of a field that has a stretch."""
    if field.stretch is None:
        raise WireError(f"field {field.number} is a number where bytes belong")
    start, stop = field.stretch
    return os.pread(descriptor, stop - start, start)


def text(descriptor: int, field: Field) -> str:
    """A field's bytes as UTF-8."""
    try:
        return content(descriptor, field).decode()
    except UnicodeDecodeError:
        raise WireError(f"field {field.number} is not text") from None


def integers(descriptor: int, field: Field) -> list[int]:
    """A repeated integer, packed or not, as signed 64-bit numbers."""
    if field.stretch is None:
        return [_signed(field.value)]
    data, position, values = content(descriptor, field), 0, []
    while position < len(data):
        value, position = _varint(data, position, field.stretch[0])
        values.append(_signed(value))
    return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _varint(data: bytes, position: int, where: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise WireError(f"a number at byte {where} does not end")
