"""Buffers and columns as the calls of this folder take them, and how a scan of records ends.

Owner: any thread; no state.
"""

from __future__ import annotations

import mmap
from array import array
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias

from aof2.native._native import ffi

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""What inputs may be; anything contiguous that speaks the buffer protocol works."""
Column: TypeAlias = "array[int] | memoryview"
"""One field of many records: an array, or a memoryview of the same format."""
U32_MAX: Final = 2**32 - 1


class Outcome(IntEnum):
    """How a scan ended."""

    CLEAN = 0
    """At the end, with nothing left over."""
    TORN = 1
    """At a write that never finished: cut there and go on."""
    CORRUPT = 2
    """At damage to bytes that had been whole."""


class Fault(IntEnum):
    """Why a scan ended where it did."""

    NONE = 0
    HEADER_PAST_END = 1
    PAYLOAD_PAST_END = 2
    ZEROS = 3
    CRC = 4
    ORDER = 5
    FLAGS = 6
    EMPTY = 7
    ALIGN = 8
    MARKER = 9


def byte_len(buf: Buffer) -> int:
    with ffi.from_buffer(buf) as view:
        return len(view)


def end_within(buf: Buffer, end: int | None) -> int:
    length = byte_len(buf)
    return length if end is None else min(end, length)


def _format_of(column: Column) -> str:
    return column.format if isinstance(column, memoryview) else column.typecode


def check_columns(columns: dict[str, tuple[Column, str]]) -> int:
    """Each column has its format and all have one length, which is returned."""
    count = len(next(iter(columns.values()))[0])
    for name, (column, fmt) in columns.items():
        if _format_of(column) != fmt:
            raise ValueError(f"{name}: items of format {_format_of(column)!r}, must be {fmt!r}")
        if len(column) != count:
            raise ValueError(f"{name}: {len(column)} items where {next(iter(columns))} has {count}")
    return count


def pointer(ctype: str, column: Column | bytearray) -> Any:
    return ffi.from_buffer(ctype, column)


ItemFormat: TypeAlias = Literal["H", "I", "Q"]
_ITEM_LEN: Final = {"H": 2, "I": 4, "Q": 8}


def empty_column(fmt: ItemFormat, rows: int) -> memoryview:
    return memoryview(bytearray(rows * _ITEM_LEN[fmt])).cast(fmt)
