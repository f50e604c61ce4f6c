"""A stream's directory as readers see it: the sealed segments, found by one listing, each an index and a payload file.

    <stream>/<base_offset, 20 digits>.<ext>    payloads
    <stream>/.segments/<segment_id>.idx        index (engine/segment/index.py)

The two names of a segment appear by one commit, so the indexes are listed first: the payload file of each of them is
there by then. A payload file without an index was sealed in between, and is left for the next listing.

Invariants
- Segments come in order of their offsets, and do not overlap. Offsets of a stream have no gaps: a record's payload
  begins at its offset less the segment's base_offset.
- What was read of a segment stays true: it is sealed. Only that it is there can change (truncation, retention).

Owner: one thread. Crash: it writes nothing.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Final

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment.format import RECORD_BYTES, Version
from aof2.engine.segment.index import INDEX_FIXED_BYTES, IndexHead
from aof2.engine.spark.options import OFFSET_MAX
from aof2.native.segment_index import index_check, index_starts

SEGMENTS_DIR: Final = ".segments"
RECORD: Final = RECORD_BYTES[Version.V3]
_LENGTH: Final = Struct("<I")
_OFFSET: Final = Struct("<8xQ")
_TIME: Final = Struct("<16xQ")
_PAYLOAD_NAME: Final = re.compile(r"([0-9]{20})\.[^/]+", re.ASCII)
_INDEX_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,19})\.idx", re.ASCII)


@dataclass(frozen=True, slots=True)
class Segment:
    """A sealed segment, by its header and footer."""

    segment_id: int
    base_offset: int
    record_count: int
    payload_bytes: int
    first_ms: int
    last_ms: int
    index_path: str
    payload_path: str

    @property
    def end_offset(self) -> int:
        """Behind its last record."""
        return self.base_offset + self.payload_bytes


class StreamDirectory:
    """The segments of one stream; what was read of an index is kept for the next listing."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: dict[str, Segment] = {}

    def segments(self) -> list[Segment]:
        """All that are sealed now, in order."""
        folder = Path(self.path, SEGMENTS_DIR)
        try:
            indexes = [path for path in folder.iterdir() if _INDEX_NAME.fullmatch(path.name)]
            payloads = {int(m[1]): p for p in Path(self.path).iterdir() if (m := _PAYLOAD_NAME.fullmatch(p.name))}
        except (FileNotFoundError, NotADirectoryError) as e:
            raise ValueError(f"{self.path}: not a stream: {os.strerror(e.errno or 0)}: {e.filename}") from None
        found: dict[str, Segment] = {}
        for path in indexes:
            segment = self._known.get(path.name) or _load(path, payloads)
            if segment and segment.base_offset in payloads:
                found[path.name] = segment
        self._known = found
        return _in_order(list(found.values()))


def _load(path: Path, payloads: dict[int, Path]) -> Segment | None:
    """None: truncated between the listing and now."""
    name = str(path)
    try:
        head, size = IndexHead.decode(_read(name, INDEX_FIXED_BYTES), path=name), path.stat().st_size
    except FileNotFoundError:
        return None
    payload = payloads.get(head.header.base_offset)
    if payload is None:
        return None
    segment = Segment(
        *(head.header.segment_id, head.header.base_offset, head.record_count, head.payload_bytes),
        *(head.header.creation_ts_ms, head.footer.last_record_ts_ms, name, str(payload)),
    )
    if size != head.index_bytes:
        raise CorruptError(f"{size} bytes, by its footer {head.index_bytes}", path=name, offset=size)
    if segment.end_offset > OFFSET_MAX:
        raise UnsupportedError(f"offset {segment.end_offset} is more than a bigint holds", path=name)
    return segment


def _in_order(segments: list[Segment]) -> list[Segment]:
    segments.sort(key=lambda s: s.base_offset)
    for before, after in pairwise(segments):
        if after.base_offset < before.end_offset:
            what = f"segments {before.segment_id} and {after.segment_id} overlap at offset {after.base_offset}"
            raise CorruptError(what, path=after.index_path)
    return segments


class IndexFile:
    """The record headers of a segment, read one at a time. Use as a context manager."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._fd = os.open(segment.index_path, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> IndexFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def _header(self, record: int) -> bytes:
        data = os.pread(self._fd, RECORD, INDEX_FIXED_BYTES + record * RECORD)
        if len(data) != RECORD:
            raise CorruptError(f"{len(data)} bytes of record {record}'s header", path=self._segment.index_path)
        return data

    def logical_offset(self, record: int) -> int:
        """Where a record begins as its header tells; behind the last one, where the segment ends."""
        if record == self._segment.record_count:
            return self._segment.end_offset
        return int(_OFFSET.unpack_from(self._header(record))[0])

    def near(self, logical_offset: int) -> int:
        """As `find`, without looking at the records: good enough to cut there."""
        return bisect_left(range(self._segment.record_count), logical_offset, key=self.logical_offset)

    def find(self, logical_offset: int) -> int:
        """The first record at or behind it."""
        return self._certain(self.near(logical_offset))

    def find_time(self, timestamp_ms: int) -> int:
        """The first record that was not appended before it: within a segment times do not go backwards."""

        def time_ms(record: int) -> int:
            return int(_TIME.unpack_from(self._header(record))[0])

        return self._certain(bisect_left(range(self._segment.record_count), timestamp_ms, key=time_ms))

    def _certain(self, record: int) -> int:
        """A damaged header leads a search astray. Where both records at its end are whole, it was not."""
        for beside in (record - 1, record):
            if 0 <= beside < self._segment.record_count and not self._whole(beside):
                at = INDEX_FIXED_BYTES + beside * RECORD
                raise CorruptError(f"record {beside} is damaged", path=self._segment.index_path, offset=at)
        return record

    def _whole(self, record: int) -> bool:
        header = self._header(record)
        length, logical = _LENGTH.unpack_from(header)[0], _OFFSET.unpack_from(header)[0]
        start = logical - self._segment.base_offset
        if not 0 <= start <= start + length <= self._segment.payload_bytes:
            return False
        found = index_starts(header, next_logical=0, start=start)
        payload = _read(self._segment.payload_path, length, start)
        return found.good == 1 and index_check(header, found.starts, payload, start) == 1


def _read(path: str, length: int, offset: int = 0) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)
