"""The change feed: subscribers register a cursor, read pages of ManifestChangeRecords, acknowledge them.

One feed a stream, ordered by ChangeSequence. A prefix that every live cursor has acknowledged is trimmed in the same
commit as the acknowledgement, so the feed is as long as the slowest subscriber is behind. A cursor idle for
`retention.cursor_idle` expires: it no longer holds the feed back, and its subscriber starts again from a snapshot
(`CursorExpiredError`). Without cursors nothing is kept at all.

Owner: the functions here run on the writer thread (`Batch`) or on a reader's (`View`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.ops import ManifestOp, decode_op
from aof2.engine.catalog.rows import CursorRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error

PAGE_LEN_MAX: Final = 1000


class CursorExpiredError(Aof2Error):
    """The cursor is gone, expired or never registered. Register again and start from a snapshot of the rows."""


class ManifestChangeRecord(NamedTuple):
    sequence: int
    timestamp_ms: int
    ops: tuple[ManifestOp, ...]
    watermarks: dict[str, int]


def register(batch: Batch, name: str) -> int:
    """Subscribes from here on; the sequence everything before is already in the rows. Again: goes on where it was."""
    row = batch.get(t.CURSORS, name)
    if row is not None:
        batch.put(t.CURSORS, name, msgspec.structs.replace(row, seen_ms=batch.now_ms))
        return row.acknowledged
    sequence = batch.get(t.COUNTERS, "change_sequence") or 0
    batch.put(t.CURSORS, name, CursorRow(sequence, batch.now_ms, batch.now_ms))
    return sequence


def page(
    view: View, stream_id: int, name: str, *, limit: int = PAGE_LEN_MAX, after: int | None = None
) -> list[ManifestChangeRecord]:
    """The next records this subscriber has not acknowledged; `after`: of those, the ones behind that sequence."""
    row = _registered(view.get(stream_id, t.CURSORS, name), name)
    behind = t.CHANGES.pack_key(max(row.acknowledged, after or 0))
    records: list[ManifestChangeRecord] = []
    for _, change in view.scan(stream_id, t.CHANGES, after=behind):
        ops = tuple(decode_op(op) for op in change.ops)
        records.append(ManifestChangeRecord(change.sequence, change.timestamp_ms, ops, change.watermarks))
        if len(records) == limit:
            break
    return records


def acknowledge(batch: Batch, name: str, sequence: int) -> int:
    """Everything up to `sequence` is processed; trims what no cursor needs any more. How many records went."""
    row = _registered(batch.get(t.CURSORS, name), name)
    newest = batch.get(t.COUNTERS, "change_sequence") or 0
    acknowledged = max(row.acknowledged, min(sequence, newest))
    moved = CursorRow(acknowledged, row.registered_ms, batch.now_ms)
    batch.put(t.CURSORS, name, moved)
    return _trim(batch, {name: moved})


def unregister(batch: Batch, name: str) -> int:
    batch.delete(t.CURSORS, name)
    return _trim(batch, {name: None})


def has_idle(view: View, stream_id: int, now_ms: int, idle_ms: int) -> bool:
    """Whether `expire` would find any."""
    return any(now_ms - row.seen_ms >= idle_ms for _, row in view.scan(stream_id, t.CURSORS))


def expire(batch: Batch, idle_ms: int) -> list[str]:
    """Drops cursors that were not used for so long, and what only they held back."""
    idle = [name for name, row in batch.scan(t.CURSORS) if batch.now_ms - row.seen_ms >= idle_ms]
    for name in idle:
        batch.delete(t.CURSORS, name)
    if idle:
        _trim(batch, dict.fromkeys(idle))
    return idle


def _registered(row: CursorRow | None, name: str) -> CursorRow:
    if row is None:
        raise CursorExpiredError(f"cursor {name!r} is not registered; register it and start from a snapshot")
    return row


def _trim(batch: Batch, changed: dict[str, CursorRow | None]) -> int:
    others = [row for name, row in batch.scan(t.CURSORS) if name not in changed]
    live = others + [row for row in changed.values() if row is not None]
    low = min((row.acknowledged for row in live), default=None)
    trimmed = 0
    for sequence, _ in batch.scan(t.CHANGES):
        if low is not None and sequence > low:
            break
        batch.delete(t.CHANGES, sequence)
        trimmed += 1
    return trimmed
