"""Tier events that the sixteen record types have no word for: CustomEvents of the log's own schemas, about a segment.

LocalEvicted says that tier 0 gave a segment up; it has no tier, so dropping the warm copy is an event of its own. The
other is the end of a segment: every record before it is history, and the fold forgets the segment.

Schemas are in logs. Never renumber.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from aof2.engine.manifest.payloads import CustomEvent

WARM_DROPPED: Final = 2  # u64 reclaimed_bytes: tier 1 gave its copy up
SEGMENT_RETIRED: Final = 3  # no fields: its chunk is purged, or was never written
_BYTES: Final = Struct("<Q")

LABELS: Final = {WARM_DROPPED: "WarmDropped", SEGMENT_RETIRED: "SegmentRetired"}


def warm_dropped(reclaimed_bytes: int) -> CustomEvent:
    return CustomEvent(WARM_DROPPED, _BYTES.pack(reclaimed_bytes))


def segment_retired() -> CustomEvent:
    return CustomEvent(SEGMENT_RETIRED, b"")


def reclaimed_bytes(event: CustomEvent) -> int:
    """Of a WarmDropped. Fields that a later version adds are behind this one; a blob without it counts nothing."""
    return int.from_bytes(event.blob[: _BYTES.size], "little")
