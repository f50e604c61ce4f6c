"""A stream's state from its folder alone, and snapshots of it: what the catalog does, without a catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from aof2.engine.manifest.format import CHUNK_HEADER_LEN, LOG_SEGMENT_ID, LogPosition, ManifestGapError
from aof2.engine.manifest.index import EventHandler, ManifestIndex
from aof2.engine.manifest.payloads import SnapshotMarker
from aof2.engine.manifest.reader import Stream
from aof2.engine.manifest.snapshot import Snapshot, encode_snapshot, list_snapshots, newest_snapshot, store_snapshot
from aof2.engine.manifest.writer import ManifestLogWriter

CRASH_POINTS = ("manifest.snapshot.stored", "manifest.snapshot.marked")

SectionHandler = Callable[[dict[str, bytes]], None]


def replay(
    directory: Path, *, on_event: EventHandler | None = None, on_sections: SectionHandler | None = None
) -> ManifestIndex:
    """The state of the stream. `on_sections` gets the engine's part of the snapshot before any event of the tail."""
    snapshot = newest_snapshot(directory)
    index = snapshot.index if snapshot else ManifestIndex()
    if snapshot and on_sections:
        on_sections(snapshot.sections)
    index.on_event = on_event
    start = snapshot.position if snapshot else None
    for chunk in Stream(directory).read(start):
        if start is None and chunk.header.base_record != 0:
            raise ManifestGapError(
                f"the log starts at record {chunk.header.base_record} and no snapshot covers what came before",
                path=str(directory),
                chunk_index=chunk.index - 1,
            )
        at_start = start is not None and chunk.index == start.chunk_index
        index.apply_chunk(chunk, start.chunk_offset if start and at_start else CHUNK_HEADER_LEN)
        start = start or LogPosition(chunk.index, CHUNK_HEADER_LEN, chunk.header.base_record)
    return index


def take_snapshot(
    writer: ManifestLogWriter, index: ManifestIndex, *, sections: Mapping[str, bytes] | None = None
) -> Snapshot:
    """Commits and syncs the log, stores `index` (which must be the state there), and marks it in the log."""
    env, directory = writer.env, writer.directory
    position = writer.commit()
    existing = list_snapshots(directory)
    snapshot_id = existing[-1] + 1 if existing else 1
    created_ms = env.now_ms()
    data = encode_snapshot(index, snapshot_id=snapshot_id, position=position, created_ms=created_ms, sections=sections)
    store_snapshot(env, directory, data, snapshot_id)
    env.failpoint("manifest.snapshot.stored")
    marker = SnapshotMarker(position.chunk_index, position.chunk_offset, snapshot_id)
    writer.append(marker, segment_id=LOG_SEGMENT_ID, logical_offset=position.ordinal)
    writer.commit()
    env.failpoint("manifest.snapshot.marked")
    return Snapshot(snapshot_id, position, created_ms, index, dict(sections or {}))
