"""A range of a segment as Arrow batches.

The payload bytes become the value buffer of the binary column as they lie in the file, the record headers become the
other columns in one native pass; no Python runs a row. Where neither `payload` nor `verify` is asked for, the payload
file is not opened: the columns then come from the index alone.

Invariants
- No payload leaves whose record's checksum did not hold, header included.
- FAILFAST raises before the first damaged record's batch is given out, and names its segment and offset.

Owner: one task. Crash: it writes nothing.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from aof2.engine.errors import CorruptError
from aof2.engine.segment.index import INDEX_FIXED_BYTES, RecordRange
from aof2.engine.spark.options import Mode
from aof2.engine.spark.plan import Range
from aof2.engine.spark.salvage import Bad, Good, salvage
from aof2.engine.spark.streams import RECORD, Segment

BATCH_ROWS: Final = 16_384
BATCH_BYTES: Final = 4 << 20


class Request:
    """What is wanted of records, once for all ranges of a task."""

    def __init__(self, schema: pa.Schema, mode: Mode, corrupt_column: str, *, verify: bool) -> None:
        self.schema = schema
        self.mode = mode
        self.corrupt_column = corrupt_column
        self.payload = "payload" in schema.names
        self.reads_payload = self.payload or verify or corrupt_column in schema.names


def read_range(piece: Range, request: Request) -> Iterator[pa.RecordBatch]:
    """All of its records, in order."""
    headers = _headers(piece)
    with _opened(piece.segment.payload_path, request) as payload_fd:
        at = 0
        try:
            records = _decoded(piece, headers)
            for part in _parts(records):
                yield _batch(piece.segment, part, _payload(piece, part, payload_fd, request), request)
                at += part.count
        except CorruptError:
            if request.mode is Mode.FAILFAST:
                raise
            yield from _salvaged(piece.segment, headers[at * RECORD :], request)


@contextlib.contextmanager
def _opened(path: str, request: Request) -> Iterator[int]:
    if not request.reads_payload:
        yield -1
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _headers(piece: Range) -> memoryview:
    path, size = piece.segment.index_path, piece.count * RECORD
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = _pread(fd, size, INDEX_FIXED_BYTES + piece.first * RECORD)
    finally:
        os.close(fd)
    if data.size != size:
        raise CorruptError("the index is shorter than it was", path=path)
    return memoryview(data).cast("B")


def _pread(fd: int, length: int, offset: int) -> pa.Buffer:
    """Up to `length` bytes, straight into memory that Arrow keeps."""
    buffer = pa.allocate_buffer(length)
    done = 0
    with memoryview(buffer) as view, view.cast("B") as octets:
        while done < length:
            got = os.preadv(fd, [octets[done:]], offset + done)
            if not got:
                break
            done += got
    return buffer.slice(0, done)


def _decoded(piece: Range, headers: memoryview) -> RecordRange:
    records = RecordRange.decode(
        headers,
        next_logical=piece.logical_start,
        start=piece.payload_start,
        path=piece.segment.index_path,
        first=piece.first,
    )
    if records.starts[-1] != piece.payload_end or records.next_logical != piece.logical_end:
        what = f"segment {piece.segment.segment_id}: records from offset {piece.logical_start} on do not add up"
        raise CorruptError(what, path=piece.segment.index_path, offset=INDEX_FIXED_BYTES + piece.first * RECORD)
    return records


def _parts(records: RecordRange) -> Iterator[RecordRange]:
    """What makes a batch each."""
    at = 0
    while at < records.count:
        count = _fitting(records.starts, at)
        yield records.part(at, count)
        at += count


def _payload(piece: Range, part: RecordRange, payload_fd: int, request: Request) -> pa.Buffer | None:
    """The payloads of a batch, each checked beside its header."""
    if not request.reads_payload:
        return None
    start, end = int(part.starts[0]), int(part.starts[-1])
    payload = _pread(payload_fd, end - start, start)
    good = part.check(memoryview(payload), start)
    if good < part.count:
        columns, segment = part.columns(), piece.segment
        what = f"segment {segment.segment_id}: the record at offset {columns.logical_offset[good]} is damaged"
        raise CorruptError(what, path=segment.payload_path, offset=int(columns.start[good]))
    return payload


def _fitting(starts: memoryview, at: int) -> int:
    """How many records from `at` on make a batch: one at least."""
    end = min(at + BATCH_ROWS, len(starts) - 1)
    return max(1, bisect_right(starts, starts[at] + BATCH_BYTES, at, end + 1) - 1 - at)


# -- columns


def _batch(segment: Segment, part: RecordRange, payload: pa.Buffer | None, request: Request) -> pa.RecordBatch:
    columns, count = part.columns(), part.count
    arrays: list[pa.Array] = []
    for field in request.schema:
        match field.name:
            case "offset":
                arrays.append(_plain(pa.int64(), columns.logical_offset))
            case "timestamp":
                milliseconds = _plain(pa.int64(), columns.timestamp_ms)
                arrays.append(pc.multiply_checked(milliseconds, 1000).view(field.type))
            case "ext_id":
                arrays.append(_plain(pa.int64(), columns.ext_id))
            case "flags":
                arrays.append(_plain(pa.int32(), columns.flags))
            case "segment_id":
                arrays.append(pa.repeat(pa.scalar(segment.segment_id, pa.int64()), count))
            case "payload":
                arrays.append(_binary(part, payload))
            case _:
                arrays.append(pa.nulls(count, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=request.schema)


def _plain(kind: pa.DataType, column: memoryview) -> pa.Array:
    """The column's own memory, seen as `kind`: of the same width."""
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])


def _binary(part: RecordRange, payload: pa.Buffer | None) -> pa.Array:
    starts = pa.Array.from_buffers(pa.int64(), part.count + 1, [None, pa.py_buffer(part.starts)])
    offsets = pc.subtract(starts, starts[0]).cast(pa.int32())
    return pa.Array.from_buffers(pa.binary(), part.count, [None, offsets.buffers()[1], payload])


# -- damage


def _salvaged(segment: Segment, headers: memoryview, request: Request) -> Iterator[pa.RecordBatch]:
    """What is whole, and in PERMISSIVE a row for each record that is not."""
    fd = os.open(segment.payload_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        payload = _pread(fd, segment.payload_bytes, 0)
    finally:
        os.close(fd)
    for found in salvage(segment, headers, memoryview(payload).cast("B")):
        if isinstance(found, Good):
            for part in _parts(found.records):
                start, end = int(part.starts[0]), int(part.starts[-1])
                yield _batch(segment, part, payload.slice(start, end - start), request)
        elif request.mode is Mode.PERMISSIVE:
            yield _bad(segment, found, payload, request)


def _bad(segment: Segment, bad: Bad, payload: pa.Buffer, request: Request) -> pa.RecordBatch:
    """Where it should be, and the bytes that lie there."""
    start = min(bad.logical_offset - segment.base_offset, payload.size)
    raw = payload.slice(start, min(bad.length, payload.size - start)).to_pybytes()
    known: dict[str, Any] = {
        "offset": bad.logical_offset,
        "segment_id": segment.segment_id,
        request.corrupt_column: raw,
    }
    arrays = [pa.array([known.get(field.name)], field.type) for field in request.schema]
    return pa.RecordBatch.from_arrays(arrays, schema=request.schema)
