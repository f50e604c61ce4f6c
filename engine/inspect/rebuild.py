"""Rows of a stream from its log alone, into a catalog of the caller's, up to where the caller says.

The same replay as recovery's, with two differences: it may stop at a position (so that rows found somewhere can be
compared with what the log says for exactly that position), and it never writes to the log's folder: a damaged stream is
the caller's to report, not to quarantine.

Owner: the calling thread; no other thread has the catalog given. A crash leaves a temporary folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from aof2 import native
from aof2.engine.catalog import snapshots
from aof2.engine.catalog.recovery import _apply_chunk, _chunks
from aof2.engine.catalog.store import Catalog
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, LogPosition, ManifestGapError, ManifestIntegrityError
from aof2.engine.manifest.reader import Chunk
from aof2.engine.manifest.snapshot import Snapshot, usable_snapshots


def rebuild_stream(catalog: Catalog, directory: Path, stream_id: int, upto: LogPosition | None = None) -> None:
    """Brings the stream's rows in `catalog` to `upto`, or to the end of the log.

    ManifestIntegrityError: the log is damaged, or does not reach `upto`. FileNotFoundError: retention took a chunk
    meanwhile; start again.
    """
    with catalog.view() as view:
        position = view.position(stream_id)
    if position is None:
        snapshot = usable_snapshot(directory, upto)
        if snapshot is not None:
            with catalog.writing() as txn:
                snapshots.load(txn, catalog, stream_id, snapshot)
            position = snapshot.position
    ordinal = position.ordinal if position else 0
    if upto is not None and ordinal >= upto.ordinal:
        return
    for chunk in _chunks(directory, position):
        part = cut(chunk, upto)
        _apply_chunk(catalog, stream_id, part, position)
        ordinal = part.end_position.ordinal
        if upto is not None and ordinal >= upto.ordinal:
            return
    if upto is not None and ordinal < upto.ordinal:
        what = f"the log ends at record {ordinal}, {upto.ordinal} were written"
        raise ManifestGapError(what, path=str(directory), chunk_index=upto.chunk_index)


def usable_snapshot(directory: Path, upto: LogPosition | None) -> Snapshot | None:
    """The newest snapshot that is whole and not past `upto`."""
    usable = usable_snapshots(directory)
    return next((one for one in usable if upto is None or one.position.ordinal <= upto.ordinal), None)


def cut(chunk: Chunk, upto: LogPosition | None) -> Chunk:
    """The chunk up to a position, which must be where one of its records starts, or its end."""
    if upto is None or chunk.end_position.ordinal <= upto.ordinal:
        return chunk
    count = upto.ordinal - chunk.header.base_record
    at = chunk.rows.offset[count] if count > 0 else CHUNK_HEADER_LEN
    if count < 0 or (upto.chunk_index == chunk.index and at != upto.chunk_offset):
        what = f"no record starts at byte {upto.chunk_offset}, where record {upto.ordinal} should"
        raise ManifestIntegrityError(what, path=chunk.path, chunk_index=chunk.index, offset=upto.chunk_offset)
    rows = native.ManifestRows(*(column[:count] for column in chunk.rows))
    return replace(chunk, rows=rows, count=count, end=at)
