"""StreamState: what recovery found in a stream's folder, and the counters that follow from it.

Invariants
- Lists are in order of segment id. A segment is in one of them only.
- Counters are exact when `appendable`; otherwise something newer than every intact segment is damaged and they are
  lower bounds: open the stream read-only and repair first.

Owner: a value, built once by recovery. Crash: nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aof2.engine.segment.format import HEADER_BYTES, RECORD_BYTES, Version
from aof2.engine.segment.model import ActiveSegment, DamagedSegment, SealedSegment

AnySegment = SealedSegment | ActiveSegment


class WarningKind(StrEnum):
    """What a recovery had to put up with."""

    POINTER_MISSING = "pointer_missing"
    POINTER_DAMAGED = "pointer_damaged"
    POINTER_STALE = "pointer_stale"  # another segment is newer, or what it names is gone or tells otherwise
    TORN_TAIL = "torn_tail"
    TORN_HEADER = "torn_header"
    UNSEALED_OLDER = "unsealed_older"
    DAMAGED_SEGMENT = "damaged_segment"
    UNKNOWN_FILE = "unknown_file"


@dataclass(frozen=True, slots=True)
class RecoveryWarning:
    kind: WarningKind
    message: str
    segment_id: int | None = None
    size_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class StreamState:
    """A stream after recovery. Replay the manifest from `coordinator_watermark` + 1."""

    sealed: tuple[SealedSegment, ...]  # those whose header and footer were read
    older_ids: tuple[int, ...]  # sealed before the pointer's segment, not opened
    active: ActiveSegment | None  # give it to SegmentWriter.reopen
    unsealed: tuple[ActiveSegment, ...]  # older than the newest file, untouched: see recovery.py
    damaged: tuple[DamagedSegment, ...]
    next_segment_id: int
    next_logical_offset: int
    total_record_count: int
    coordinator_watermark: int
    flush_failure: bool
    warnings: tuple[RecoveryWarning, ...]

    @property
    def appendable(self) -> bool:
        newest = self.active.segment_id if self.active else -1
        newest = max(newest, *(s.segment_id for s in self.sealed), *(s.segment_id for s in self.unsealed), -1)
        return all(d.segment_id < newest for d in self.damaged)


def count_records(segments: Sequence[AnySegment]) -> int:
    """Records of the stream up to the last of `segments`. v3 tells what came before it; v2 is counted up."""
    total = 0
    for segment in segments:
        base = total if segment.header.version == Version.V2 else segment.header.base_record_count
        total = base + segment.record_count
    return total


def next_logical_offset(segments: Sequence[AnySegment]) -> int:
    """Where the stream's payload goes on."""
    return max((_end_of_payload(s) for s in segments), default=0)


def _end_of_payload(segment: AnySegment) -> int:
    """Exact after a scan. From header and footer alone: as if the caller had left no gaps between records."""
    if segment.next_logical_offset is not None:
        return segment.next_logical_offset
    if not isinstance(segment, SealedSegment):
        return 0
    version = Version(segment.header.version)
    overhead_bytes = HEADER_BYTES[version] + segment.record_count * RECORD_BYTES[version]
    return segment.base_offset + segment.durable_bytes - overhead_bytes
