"""Lines told apart (`lines.c`), and pages that differ (`pagediff.c`).

Owner: any thread; no state.
"""

from __future__ import annotations

from array import array
from typing import Final

from aof2.native._native import ffi, lib
from aof2.native.columns import U32_MAX, Buffer

_LINES_BATCH: Final = 65536


def frame_lines(buf: Buffer, max_record: int) -> tuple[array[int], int]:
    """Lengths of the whole lines at the start of `buf`, newlines included, and their sum.

    A line longer than `max_record` is cut into records of that length. What follows the sum is a partial line.
    """
    if not 1 <= max_record <= U32_MAX:
        raise ValueError(f"max_record {max_record}: must be between 1 and {U32_MAX}")
    lengths = array("I")
    batch = ffi.new("uint32_t[]", _LINES_BATCH)
    consumed = ffi.new("size_t *")
    total = 0
    with ffi.from_buffer("uint8_t[]", buf) as view:
        count = _LINES_BATCH
        while count == _LINES_BATCH:
            count = lib.aof2_frame_lines(view + total, len(view) - total, max_record, _LINES_BATCH, batch, consumed)
            lengths.frombytes(ffi.buffer(batch, count * 4))
            total += int(consumed[0])
    return lengths, total


def page_diff(a: Buffer, b: Buffer, page_len: int) -> tuple[bytes, int]:
    """Bitmap (LSB first) of the pages that differ, and how many do. A page only one side has differs."""
    if page_len < 1:
        raise ValueError(f"page_len {page_len}: must be at least 1")
    with ffi.from_buffer(a) as view_a, ffi.from_buffer(b) as view_b:
        pages = -(-max(len(view_a), len(view_b)) // page_len)
        bitmap = bytearray(-(-pages // 8))
        with ffi.from_buffer("uint8_t[]", bitmap) as bits:
            changed = lib.aof2_page_diff(view_a, len(view_a), view_b, len(view_b), page_len, bits, len(bitmap))
    return bytes(bitmap), int(changed)
