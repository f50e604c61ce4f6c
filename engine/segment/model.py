"""What is known about one segment, in the three states it can be in: sealed, active, damaged. And how files are named.

Invariants
- A SealedSegment is made only from a footer that reached the disk: by a seal that returned, or by reading it back.
- `<segment_id>.seg` is plain decimal without leading zeros; any other spelling is not a segment.

Owner: frozen values, shared freely. Crash: nothing here touches a disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.errors import Aof2Error
from aof2.engine.segment.format import U64_MAX, Pointer, SegmentFooter, SegmentHeader

POINTER_NAME: Final = "current.sealed"
_SEGMENT_NAME = re.compile(r"(0|[1-9][0-9]{0,19})\.seg", re.ASCII)


def segment_path(directory: Path, segment_id: int) -> Path:
    return directory / f"{segment_id}.seg"


def parse_segment_name(name: str) -> int | None:
    """The segment id of a file name; None when it is not a segment's."""
    match = _SEGMENT_NAME.fullmatch(name)
    if match is None or int(match[1]) > U64_MAX:
        return None
    return int(match[1])


class Position(NamedTuple):
    """Where a record is: its index in the segment, its file offset, its place in the stream's payload."""

    record_index: int
    offset: int
    logical_offset: int


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A whole, sealed file. `next_logical_offset` is None when only header and footer were read."""

    path: Path
    header: SegmentHeader
    footer: SegmentFooter
    base_offset: int  # logical_offset of the first record (v2 does not store it: read from the record)
    next_logical_offset: int | None = None

    @property
    def segment_id(self) -> int:
        return self.header.segment_id

    @property
    def record_count(self) -> int:
        return self.footer.record_count

    @property
    def durable_bytes(self) -> int:
        return self.footer.durable_bytes

    @property
    def pointer(self) -> Pointer:
        return Pointer(self.segment_id, self.footer.coordinator_watermark, self.footer.durable_bytes)


@dataclass(frozen=True, slots=True)
class ActiveSegment:
    """An unsealed file with at least one whole record: all that `SegmentWriter.reopen` needs to go on."""

    path: Path
    header: SegmentHeader
    end_offset: int  # file offset after the last whole record
    crc64: int  # of [0, end_offset)
    record_count: int
    next_logical_offset: int
    last_record_ts_ms: int

    @property
    def segment_id(self) -> int:
        return self.header.segment_id


@dataclass(frozen=True, slots=True)
class DamagedSegment:
    """A file that recovery left exactly as it found it, and why."""

    path: Path
    segment_id: int
    error: Aof2Error
