"""What a job staged, looked at: its records, cut into what makes a segment each.

Invariants: records of a staged file are in order, none is empty or longer than the stream takes; what is cut is all of
them. Checksums are looked at where they are made anew (`delivery.py`).

Owner: worker threads; pure but for reading. Crash: nothing is written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from aof2.engine.append.framing import FOOTER, HEADER, OVERHEAD
from aof2.engine.errors import os_error
from aof2.engine.kinds.kind import StagedFile
from aof2.engine.segment.index import INDEX_FIXED_BYTES, RecordRange, SegmentIndex
from aof2.engine.settings.model import AppendTenant

STEP_RECORDS: Final = 16_384
STEP_BYTES: Final = 4 << 20


class Piece(NamedTuple):
    """Records [first, first + records) of a staged file, and [payload_start, payload_end) of its payload."""

    file: StagedFile
    first: int
    records: int
    payload_start: int
    payload_end: int
    first_ms: int

    @property
    def payload_bytes(self) -> int:
        return self.payload_end - self.payload_start


def plan(files: Sequence[StagedFile], settings: AppendTenant, record_max: int) -> list[list[Piece]]:
    """Pieces of staged files that make a segment each. One index at a time is in memory. Blocks."""
    most = settings.segment_bytes - HEADER - FOOTER
    segments: list[list[Piece]] = []
    room = 0
    for file in files:
        records = _records(file, record_max)
        at = 0
        while at < records.count:
            count = fitting(records, at, room)
            if not count:
                segments.append([])
                room = most
                count = fitting(records, at, room)
                if not count:
                    raise os_error(errno.EMSGSIZE, str(file.payload_path))
            start, end = int(records.starts[at]), int(records.starts[at + count])
            first_ms = int(records.part(at, 1).columns().timestamp_ms[0])
            segments[-1].append(Piece(file, at, count, start, end, first_ms))
            room -= end - start + count * OVERHEAD
            at += count
    return segments


def _records(file: StagedFile, record_max: int) -> RecordRange:
    records = SegmentIndex.decode(file.index_path.read_bytes(), path=str(file.index_path)).records()
    lengths = records.columns().length
    if max(lengths) > record_max:
        raise os_error(errno.EMSGSIZE, str(file.payload_path))
    if not min(lengths):
        raise os_error(errno.EINVAL, str(file.payload_path))
    return records


def fitting(records: RecordRange, at: int, room: int) -> int:
    """How many records from `at` on take at most `room` bytes, headers included."""
    low, high, start = 0, records.count - at, int(records.starts[at])
    while low < high:
        middle = (low + high + 1) // 2
        if int(records.starts[at + middle]) - start + middle * OVERHEAD <= room:
            low = middle
        else:
            high = middle - 1
    return low


def steps(piece: Piece) -> Iterator[tuple[RecordRange, bytes]]:
    """Some records at a time, with their payloads."""
    payload_fd = os.open(piece.file.payload_path, os.O_RDONLY | os.O_CLOEXEC)
    index_fd = os.open(piece.file.index_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at, start = piece.first, piece.payload_start
        while at < piece.first + piece.records:
            most = min(piece.first + piece.records - at, STEP_RECORDS)
            headers = os.pread(index_fd, most * OVERHEAD, INDEX_FIXED_BYTES + at * OVERHEAD)
            path = str(piece.file.index_path)
            records = RecordRange.decode(headers, next_logical=start, start=start, path=path, first=at)
            part = records.part(0, max(1, fitting(records, 0, STEP_BYTES)))
            end = int(part.starts[part.count])
            yield part, os.pread(payload_fd, end - start, start)
            at, start = at + part.count, end
    finally:
        os.close(payload_fd)
        os.close(index_fd)


def payload_bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.payload_bytes for piece in pieces)


def index_bytes(pieces: Sequence[Piece]) -> int:
    return INDEX_FIXED_BYTES + OVERHEAD * sum(piece.records for piece in pieces)
