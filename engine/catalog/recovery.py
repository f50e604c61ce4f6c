"""Opening the catalog: trust it or throw it away, then bring it up to the end of the logs.

The rows know the log position they are at. Trusted rows need only the tail after it; rows that cannot be trusted (power
lost, other boot, damaged, deleted) are rebuilt from each stream's newest snapshot and the log after it. Either way the
result is the same rows. Start-up time depends on the length of the tails, not on the number of rows, when they are
trusted.

A stream whose log is damaged is quarantined and left without a writer; the others open.

Owner: the thread that opens the volume, before any other exists. A crash while opening is a crash before opening: the
rows are applied chunk by chunk with their position.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aof2.engine.catalog import snapshots
from aof2.engine.catalog.batch import EVENT_SCHEMA_ID, decode_event
from aof2.engine.catalog.fold import StreamFold
from aof2.engine.catalog.store import MAP_BYTES, Catalog, discard, trusted
from aof2.engine.catalog.writer import StreamState, apply_mutations, put_positions, putter
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.manifest.batch import Event
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, LogPosition, ManifestGapError, ManifestIntegrityError
from aof2.engine.manifest.quarantine import quarantine
from aof2.engine.manifest.reader import Chunk, Stream
from aof2.engine.manifest.replay import newest_snapshot
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter

log = logging.getLogger(__name__)

CRASH_POINTS: Final = ("catalog.recover.loaded", "catalog.recover.replayed")


@dataclass
class Opened:
    """An open catalog, the streams' writers, and what it took."""

    catalog: Catalog
    streams: dict[int, StreamState] = field(default_factory=dict)
    rebuilt: bool = False
    replayed_records: int = 0
    replay_s: float = 0.0
    quarantined: dict[int, ManifestIntegrityError] = field(default_factory=dict)


def stream_ids(manifest_dir: Path) -> list[int]:
    """The streams that have a folder."""
    if not manifest_dir.exists():
        return []
    return sorted(int(n) for n in os.listdir(manifest_dir) if n.isdecimal() and str(int(n)) == n)  # noqa: PTH208


def open_catalog(
    env: Env,
    catalog_dir: Path,
    manifest_dir: Path,
    settings: LogSettings,
    *,
    map_bytes: int = MAP_BYTES,
) -> Opened:
    """The catalog, up to date with every stream's log, and a writer for each."""
    started_s = env.monotonic_s()
    opened = _open_rows(env, catalog_dir, map_bytes)
    try:
        if not _catch_up(env, opened, manifest_dir):
            # Rows that do not fit the logs are no better than none.
            log.warning("catalog does not fit its logs and is rebuilt", extra={"directory": str(catalog_dir)})
            opened.catalog.abandon()
            discard(catalog_dir)
            opened = Opened(Catalog.open(env, catalog_dir, map_bytes=map_bytes), rebuilt=True)
            _catch_up(env, opened, manifest_dir)
        for stream_id in stream_ids(manifest_dir):
            if stream_id not in opened.quarantined:
                opened.streams[stream_id] = open_stream(env, opened.catalog, manifest_dir, settings, stream_id)
    except BaseException:
        for stream in opened.streams.values():
            stream.log.close()
        opened.catalog.abandon()
        raise
    opened.replay_s = env.monotonic_s() - started_s
    return opened


def open_stream(env: Env, catalog: Catalog, manifest_dir: Path, settings: LogSettings, stream_id: int) -> StreamState:
    """A writer on the stream's log, which the rows are up to date with. Creates the folder of a new stream."""
    with catalog.view() as view:
        position = view.position(stream_id)
        fold = StreamFold(stream_id)
        fold.reload(view)
    writer = ManifestLogWriter.open(env, manifest_dir / str(stream_id), settings, start=position)
    return StreamState(stream_id, writer, fold)


def _open_rows(env: Env, directory: Path, map_bytes: int) -> Opened:
    rebuilt = not trusted(directory)
    if rebuilt:
        discard(directory)
    try:
        return Opened(Catalog.open(env, directory, map_bytes=map_bytes), rebuilt=rebuilt)
    except CorruptError as e:
        log.warning("catalog is rebuilt", extra={"error": str(e)})
        discard(directory)
        return Opened(Catalog.open(env, directory, map_bytes=map_bytes), rebuilt=True)


def _catch_up(env: Env, opened: Opened, manifest_dir: Path) -> bool:
    """Replays every stream; False when trusted rows turn out not to fit."""
    for stream_id in stream_ids(manifest_dir):
        directory = manifest_dir / str(stream_id)
        try:
            opened.replayed_records += replay_stream(env, opened.catalog, directory, stream_id)
        except ManifestIntegrityError as e:
            # Rows that do not fit a sound log are rebuilt from it. Where it is the log that is damaged, the rows may
            # be all there is: they stay, and the stream takes no more.
            if not opened.rebuilt and _is_sound(directory):
                return False
            log.error("stream quarantined", extra={"stream_id": stream_id, "error": str(e)})  # noqa: TRY400
            quarantine(env, directory, e)
            opened.quarantined[stream_id] = e
    return True


def _is_sound(directory: Path) -> bool:
    """Whether the log can be replayed by itself, from its newest snapshot on."""
    snapshot = newest_snapshot(directory)
    try:
        for _ in _chunks(directory, snapshot.position if snapshot else None):
            pass
    except ManifestIntegrityError:
        return False
    return True


def replay_stream(env: Env, catalog: Catalog, directory: Path, stream_id: int) -> int:
    """Brings one stream's rows up to the end of its log; how many records that took."""
    with catalog.view() as view:
        position = view.position(stream_id)
    if position is None:
        position = _load_snapshot(catalog, directory, stream_id)
        env.failpoint("catalog.recover.loaded")
    replayed = 0
    for chunk in _chunks(directory, position):
        replayed += _apply_chunk(catalog, stream_id, chunk, position)
        env.failpoint("catalog.recover.replayed")
    return replayed


def _load_snapshot(catalog: Catalog, directory: Path, stream_id: int) -> LogPosition | None:
    snapshot = newest_snapshot(directory)
    if snapshot is None:
        return None
    with catalog.writing() as txn:
        snapshots.load(txn, catalog, stream_id, snapshot)
    return snapshot.position


def _chunks(directory: Path, position: LogPosition | None) -> Iterator[Chunk]:
    first = True
    for chunk in Stream(directory).read(position):
        if first and position is None and chunk.header.base_record != 0:
            what = f"the log starts at record {chunk.header.base_record} and no snapshot covers what came before"
            raise ManifestGapError(what, path=str(directory), chunk_index=chunk.index - 1)
        first = False
        yield chunk


def _apply_chunk(catalog: Catalog, stream_id: int, chunk: Chunk, position: LogPosition | None) -> int:
    """One chunk's records and row changes in one transaction, with the position after them."""
    at_start = position is not None and chunk.index == position.chunk_index
    from_offset = position.chunk_offset if position and at_start else CHUNK_HEADER_LEN
    with catalog.writing() as txn:
        view = catalog.view_of(txn)
        fold = StreamFold(stream_id)
        fold.reload(view)
        fold.view = view

        def on_event(event: Event, _: LogPosition) -> None:
            if event.schema_id == EVENT_SCHEMA_ID:
                apply_mutations(txn, catalog, stream_id, decode_event(event.body))

        fold.on_event = on_event
        fold.apply_chunk(chunk, from_offset)
        fold.flush(putter(txn, catalog.db("segments")))
        put_positions(txn, catalog, {stream_id: chunk.end_position})
    before = position.ordinal if position and at_start else chunk.header.base_record
    return chunk.end_position.ordinal - before
