"""Snapshots of the catalog: one stream's rows and folded records at one position of its log.

A snapshot is taken beside the writer, not by it: rows are copied in pages while others are written (`pages.py`), and
what changed meanwhile is taken from one last short transaction, whose log position is the snapshot's. Each database is
a section `db:<name>`, zstd over {u32 key_len, u32 row_len, key without its stream, row}, keys in order.

Invariants
- It holds the rows and folded records of exactly its position.
- No read transaction lasts longer than a page, or than what was changed while the pages were copied. Only where the end
  of the log is damaged, so that it cannot tell that, one transaction does it all.
- The log is synced up to the snapshot's position before the snapshot gets its name.
- The SnapshotMarker follows it in the log, and retention follows the marker.

Owner: one snapshot at a time a stream; runs on a worker thread. A crash leaves a temporary file, or a whole snapshot
with or without its marker: either is used.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import zstandard

from aof2.engine.catalog import pages
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import StreamFold, decode_entry, load_pending, put_all
from aof2.engine.catalog.pages import ROW_HEAD
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import CatalogWriter, put_positions
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.manifest import retention
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition, ManifestIntegrityError, chunk_key
from aof2.engine.manifest.index import ManifestEntry, ManifestIndex
from aof2.engine.manifest.payloads import SnapshotMarker
from aof2.engine.manifest.snapshot import Snapshot, SnapshotAt, encode_snapshot, list_snapshots, store_snapshot

SECTION_PREFIX: Final = "db:"
ROW_LEN_MAX: Final = 64 << 20
LOAD_ROWS: Final = 4096  # at a time
READ_BYTES: Final = 1 << 20

# By (database number, the table's tag): what becomes of a row's value; None: it is not loaded.
Hooks = Mapping[tuple[int, bytes], Callable[[bytes, bytes], bytes | None]]


class _Copied:
    """Rows of one stream, each as it was when its page was copied. Made once, used up by what is made of it."""

    def __init__(self, opened: pages.OpenView, stream_id: int) -> None:
        prefix = t.STREAM.pack(stream_id)
        kept = (name for name in t.DATABASES if name not in t.DERIVED)
        self._databases = {name: pages.copy(opened, name, prefix) for name in kept}
        self._entries = pages.copy(opened, "segments", prefix + t.SEGMENT_ENTRY)

    def sections(self, changed: Mapping[str, pages.Changed]) -> dict[str, bytes]:
        return {SECTION_PREFIX + name: _section(rows, changed.get(name, {})) for name, rows in self._databases.items()}

    def entries(self, changed: pages.Changed) -> Iterator[tuple[int, ManifestEntry]]:
        for rows in pages.merged(self._entries, changed):
            for key, value in pages.split(rows):
                yield int.from_bytes(key, "big"), decode_entry(value)


def _section(rows: pages.Pages, changed: pages.Changed) -> bytes:
    out = io.BytesIO()
    with zstandard.ZstdCompressor(level=1).stream_writer(out, closefd=False) as sink:
        for some in pages.merged(rows, changed):
            sink.write(some)
    return out.getvalue()


def dump(view: View, stream_id: int) -> dict[str, bytes]:
    """Every database's rows of one stream, compressed."""
    return _Copied(lambda: contextlib.nullcontext(view), stream_id).sections({})


def rows_of(section: bytes, name: str) -> Iterator[tuple[bytes, bytes]]:
    """(key without stream, row) of a section, read in bounded memory."""
    head_of, head_len = ROW_HEAD.unpack_from, ROW_HEAD.size
    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(section)) as source:
            data = b""
            while more := source.read(READ_BYTES):
                data = data + more if data else more
                at, end = 0, len(data)
                while at + head_len <= end:
                    key_len, row_len = head_of(data, at)
                    if key_len > 511 or row_len > ROW_LEN_MAX:
                        raise CorruptError(f"snapshot section {name!r} claims a row of {row_len} bytes")
                    key_at = at + head_len
                    row_at = key_at + key_len
                    if row_at + row_len > end:
                        break
                    at = row_at + row_len
                    yield data[key_at:row_at], data[row_at:at]
                data = data[at:]
            if data:
                raise CorruptError(f"snapshot section {name!r} ends inside a row")
    except zstandard.ZstdError as e:
        raise CorruptError(f"snapshot section {name!r} does not decompress ({e})") from e


def _hooked(
    rows: Iterator[tuple[bytes, bytes]], of: Mapping[bytes, Callable[[bytes, bytes], bytes | None]]
) -> Iterator[tuple[bytes, bytes]]:
    for pair in rows:
        hook = of.get(pair[0][:1])
        if hook is None:
            yield pair
        elif (value := hook(*pair)) is not None:
            yield pair[0], value


def load(
    txn: Any,
    catalog: Catalog,
    stream_id: int,
    snapshot: Snapshot,
    *,
    hooks: Hooks | None = None,
) -> None:
    """The snapshot's rows into an empty catalog, and the position they are at; those of some tables through a hook."""
    prefix = t.STREAM.pack(stream_id)
    for name, section in snapshot.sections.items():
        database = name.removeprefix(SECTION_PREFIX)
        number = t.DB_NUMBER.get(database)
        if number is None:
            continue  # a newer AOF2's: its rows come back when it does
        pairs = rows_of(section, name)
        of = {tag: hook for (n, tag), hook in hooks.items() if n == number} if hooks else None
        if of:
            pairs = _hooked(pairs, of)
        rows = ((prefix + key, value) for key, value in pairs)
        while some := list(islice(rows, LOAD_ROWS)):
            put_all(txn, catalog.db(database), some)
    fold = StreamFold(stream_id)
    for segment_id, entry in snapshot.index.entries.items():
        fold.entries[segment_id] = entry
    for pair, reason in snapshot.index.pending_uploads.items():
        fold.pending_uploads[pair] = reason
    for pair in snapshot.index.pending_deletes:
        fold.pending_deletes.add(pair)
    for key_text, etag in snapshot.index.log_objects.items():
        fold.log_objects[key_text] = etag
    fold.snapshot = snapshot.index.snapshot
    fold.flush(txn, catalog.db("segments"))
    put_positions(txn, catalog, {stream_id: snapshot.position})


def clear(txn: Any, catalog: Catalog, stream_id: int) -> None:
    """Deletes every row of the stream, and where they were; the next replay starts with a snapshot, or the log."""
    prefix = t.STREAM.pack(stream_id)
    for name in t.DATABASES:
        with txn.cursor(db=catalog.db(name)) as cursor:
            more = cursor.set_range(prefix)
            while more and cursor.key().startswith(prefix):
                more = cursor.delete()
    txn.delete(t.POSITION_PREFIX + prefix, db=catalog.db("meta"))


class _State(NamedTuple):
    """A stream as of `position`: what was copied, and what of that is to be replaced."""

    position: LogPosition
    pending: ManifestIndex
    copied: _Copied
    changed: Mapping[str, pages.Changed]
    changed_entries: pages.Changed


def _copy_beside_the_writer(catalog: Catalog, directory: Path, stream_id: int) -> _State | None:
    with catalog.view() as view:
        since = view.position(stream_id)
    if since is None:
        return None
    copied = _Copied(catalog.view, stream_id)
    touched = pages.Touched(directory, since)
    touched.read_on()  # most of it, before the view that is to be short
    with catalog.view() as view:
        position = view.position(stream_id)
        touched.read_on()
        prefix = t.STREAM.pack(stream_id)
        changed = {name: {key: view.raw(name, prefix + key) for key in keys} for name, keys in touched.rows.items()}
        ids = (segment_id.to_bytes(8, "big") for segment_id in touched.segments)
        entries = {key: view.raw("segments", prefix + t.SEGMENT_ENTRY + key) for key in ids}
        return _State(position or since, load_pending(view, stream_id), copied, changed, entries)


def _copy_at_once(view: View, stream_id: int) -> _State | None:
    position = view.position(stream_id)
    if position is None:
        return None
    copied = _Copied(lambda: contextlib.nullcontext(view), stream_id)
    return _State(position, load_pending(view, stream_id), copied, {}, {})


def take(env: Env, catalog: Catalog, writer: CatalogWriter, directory: Path, stream_id: int) -> SnapshotAt | None:
    """Stores a snapshot of the stream and marks it in its log; None when nothing was ever written. Blocks."""
    existing = list_snapshots(directory)
    snapshot_id = existing[-1] + 1 if existing else 1
    try:
        state = _copy_beside_the_writer(catalog, directory, stream_id)
    except ManifestIntegrityError:
        with catalog.view() as view:
            state = _copy_at_once(view, stream_id)
    if state is None:
        return None
    position, created_ms = state.position, env.now_ms()
    pieces = encode_snapshot(
        state.pending,
        snapshot_id=snapshot_id,
        position=position,
        created_ms=created_ms,
        sections=state.copied.sections(state.changed),
        entries=state.copied.entries(state.changed_entries),
    )
    del state
    writer.flush()
    store_snapshot(env, directory, pieces, snapshot_id)
    del pieces
    catalog.sync()
    marker = SnapshotMarker(position.chunk_index, position.chunk_offset, snapshot_id)
    writer.call(
        stream_id,
        lambda b: b.record(marker, segment_id=LOG_SEGMENT_ID, logical_offset=position.ordinal),
        sync=True,
    )
    return SnapshotAt(snapshot_id, position, created_ms)


def retain(
    env: Env, catalog: Catalog, directory: Path, stream_id: int, covered: LogPosition
) -> retention.RetentionPlan:
    """Deletes the chunks and snapshots of the stream that retention lets go, by what the log says is uploaded."""
    with catalog.view() as view:
        uploaded = load_pending(view, stream_id).log_objects
    return retention.apply(env, directory, covered, uploaded=lambda index: chunk_key(stream_id, index) in uploaded)
