"""The hash-chained audit log (ENC/ASL-LOG/1): what was sealed, published, hidden and anchored, provably and in order.

format.py the bytes · commit.py whole batches · source.py, damage.py, reader.py replay · writer.py append ·
ranges.py the remote pieces · state.py what the records add up to.
"""

from aof2.engine.audit.commit import BATCH_BYTES_MAX
from aof2.engine.audit.damage import Tail
from aof2.engine.audit.format import (
    ArtifactPublish,
    ArtifactRef,
    ArtifactUnpublish,
    ChainBrokenError,
    Payload,
    RecordType,
    SegmentSeal,
    SnapshotAnchor,
    Tombstone,
    TombstoneLift,
    artifact_ref,
)
from aof2.engine.audit.ranges import LogRange, cut_points, replay_ranges
from aof2.engine.audit.reader import LogRecord, Outcome, Position, Replay
from aof2.engine.audit.source import Source
from aof2.engine.audit.state import AnchorMismatch, AnchorMismatchError, BadLift, Problem, ResealConflict, VisibleState
from aof2.engine.audit.writer import CRASH_POINTS, AuditWriter

__all__ = [
    "BATCH_BYTES_MAX",
    "CRASH_POINTS",
    "AnchorMismatch",
    "AnchorMismatchError",
    "ArtifactPublish",
    "ArtifactRef",
    "ArtifactUnpublish",
    "AuditWriter",
    "BadLift",
    "ChainBrokenError",
    "LogRange",
    "LogRecord",
    "Outcome",
    "Payload",
    "Position",
    "Problem",
    "RecordType",
    "Replay",
    "ResealConflict",
    "SegmentSeal",
    "SnapshotAnchor",
    "Source",
    "Tail",
    "Tombstone",
    "TombstoneLift",
    "VisibleState",
    "artifact_ref",
    "cut_points",
    "replay_ranges",
]
