"""Tier transitions as log lines: one `tier.transition` for each record that moved a segment, or failed to.

`{stream_id, segment_id, action, offset, chunk_index, chunk_offset}`: the action is the record's type, the offset its
logical one; the last two are where the log of the stream was when the batch with the record was appended, so that
`aof2 manifest inspect` finds it. What only begins (a segment opened, an upload started) is in the log of records alone.

Where one commit does the same to more than LINES_MAX segments, say those of a pack, that is one line: `segment_id` is
the first of them, `last_segment_id` the last, `segments` their number and `offset` the sum of their offsets.

Owner: the catalog's writer thread, after the commit. Crash: see `logs`.
"""

from __future__ import annotations

import logging
from typing import Final

from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition, RecordType
from aof2.engine.manifest.tier_events import LABELS, WARM_DROPPED
from aof2.engine.observe.logs import log_event

log = logging.getLogger(__name__)

EVENT: Final = "tier.transition"
LINES_MAX: Final = 8  # about one action in one commit
_ACTIONS: Final = {
    int(kind): kind.label
    for kind in (
        RecordType.SEAL_SEGMENT,
        RecordType.COMPRESSION_DONE,
        RecordType.COMPRESSION_FAILED,
        RecordType.UPLOAD_DONE,
        RecordType.UPLOAD_FAILED,
        RecordType.TIER2_DELETED,
        RecordType.HYDRATION_DONE,
        RecordType.HYDRATION_FAILED,
        RecordType.LOCAL_EVICTED,
    )
}
_WARM_DROPPED: Final = WARM_DROPPED.to_bytes(4, "little")


def log_transitions(stream_id: int, records: RecordBatch, at: LogPosition) -> None:
    """The records are committed; the log was `at` there before."""
    if not log.isEnabledFor(logging.INFO):
        return
    moved: dict[str, list[tuple[int, int]]] = {}
    start = 0
    columns = (records.types, records.segment_ids, records.logical_offsets, records.lengths)
    for kind, segment_id, offset, length in zip(*columns, strict=True):
        action = _ACTIONS.get(kind)
        if kind == RecordType.CUSTOM_EVENT and records.payloads[start : start + 4] == _WARM_DROPPED:
            action = LABELS[WARM_DROPPED]
        start += length
        if action is not None and segment_id != LOG_SEGMENT_ID:
            moved.setdefault(action, []).append((segment_id, offset))
    where = {"chunk_index": at.chunk_index, "chunk_offset": at.chunk_offset}
    for action, segments in moved.items():
        if len(segments) <= LINES_MAX:
            for segment_id, offset in segments:
                log_event(log, EVENT, stream_id=stream_id, segment_id=segment_id, action=action, offset=offset, **where)
            continue
        log_event(
            log,
            EVENT,
            stream_id=stream_id,
            segment_id=segments[0][0],
            last_segment_id=segments[-1][0],
            segments=len(segments),
            action=action,
            offset=sum(offset for _, offset in segments),
            **where,
        )
