"""A log cut into units that any process can read by itself, and what a unit has, as Arrow tables.

    Unit             a chunk, a bundle, or the snapshot that a history begins with
    records_of       its records, a row each
    names_of         what its commits say of segments and inodes: which directory a segment is of

Owner: units are values; reading blocks, any process. Reads only.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import EVENT_SCHEMA_ID, Mutation, decode_event
from aof2.engine.catalog.snapshots import SECTION_PREFIX, rows_of
from aof2.engine.history.columns import LABELS, columns_of
from aof2.engine.history.fold import kind_of
from aof2.engine.manifest.batch import EventAssembler
from aof2.engine.manifest.format import (
    CHUNK_HEADER_LEN,
    RECORD_HEADER_LEN,
    LogPosition,
    RecordType,
    bundle_key,
    chunk_key,
)
from aof2.engine.manifest.payloads import CustomEvent, decode
from aof2.engine.manifest.reader import Chunk, ChunkFile, Folder, parse_chunk, split_bundle
from aof2.engine.manifest.snapshot import Snapshot, load_snapshot
from aof2.engine.recency.uses import SCHEMA_ID as USES_SCHEMA
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.listing import RemoteLog, list_streams

if TYPE_CHECKING:
    import pyarrow as pa

# Rows of a snapshot, beside the record types: what a tier had of a segment when the history begins.
START_HOT: Final = 1000
START_WARM: Final = 1001
START_REMOTE: Final = 1002
START_SEALED: Final = 1003
STARTS: Final = ("StartHot", "StartWarm", "StartRemote", "StartSealed")
ROWS_AT_ONCE: Final = 64_000

RECORDS_SCHEMA: Final = (
    "stream_id int, chunk_index bigint, chunk_offset bigint, ordinal bigint, type_id int, type string,"
    " segment_id bigint, logical_offset bigint, timestamp_ms bigint, schema_id bigint, value bigint, key string,"
    " key_kind string, sample binary"
)
NAMES_SCHEMA: Final = (
    "stream_id int, kind string, id bigint, parent bigint, name string, is_directory boolean, ordinal bigint"
)


class Unit(NamedTuple):
    """`path` on this disk or `key` in the remote; a snapshot where `snapshot_id` is not 0. `since`: records from there
    on count."""

    stream_id: int
    first: int
    last: int
    size: int
    path: str = ""
    start: int = 0
    key: str = ""
    snapshot_id: int = 0
    since: LogPosition | None = None
    is_last: bool = False


def remote_units(store: RemoteStore) -> Iterator[Unit]:
    """All that the remote has of every stream's log."""
    for stream_id, inventory in sorted(list_streams(store).items()):
        log = RemoteLog(store, stream_id, inventory)
        first = min(inventory.chunk_indexes(), default=0)
        since = None
        if first:
            start = _oldest(log, first)
            if start is not None:
                since = start.position
                yield Unit(stream_id, 0, 0, 1 << 20, key="snapshot", snapshot_id=start.snapshot_id)
        done: set[int] = set()
        for (low, high), info in sorted(inventory.bundles.items()):
            yield Unit(stream_id, low, high, info.size, key=bundle_key(stream_id, low, high), since=since)
            done |= set(range(low, high + 1))
        for index, info in sorted(inventory.chunks.items()):
            if index not in done:
                yield Unit(stream_id, index, index, info.size, key=chunk_key(stream_id, index), since=since)


def _oldest(log: RemoteLog, first: int) -> Snapshot | None:
    for snapshot_id in sorted(log.inventory.snapshots):
        _, snapshot = log.snapshot(snapshot_id)
        if snapshot.position.chunk_index >= first:
            return snapshot
    return None


def local_units(manifest_dir: Path) -> Iterator[Unit]:
    """All that a folder of streams' folders has; its tasks must see it, too."""
    for directory in sorted(path for path in manifest_dir.iterdir() if path.name.isdecimal()):
        stream_id, folder = int(directory.name), Folder(directory)
        first = folder.chunks[0].index if folder.chunks else 0
        since = None
        if first:
            for snapshot_id in folder.snapshots:
                position = load_snapshot(directory, snapshot_id).position
                if position.chunk_index >= first:
                    since = position
                    yield Unit(stream_id, 0, 0, 1 << 20, path=str(directory), snapshot_id=snapshot_id)
                    break
        for number, one in enumerate(folder.chunks):
            size = one.length if one.length is not None else one.path.stat().st_size
            yield Unit(
                stream_id,
                one.index,
                one.index,
                size,
                path=str(one.path),
                start=one.start,
                since=since,
                is_last=number == len(folder.chunks) - 1,
            )


# -- reading


def _snapshot(unit: Unit, store: RemoteStore | None) -> Snapshot:
    if unit.path or store is None:
        return load_snapshot(Path(unit.path), unit.snapshot_id)
    return RemoteLog(store, unit.stream_id).snapshot(unit.snapshot_id)[1]


def chunks_of(unit: Unit, store: RemoteStore | None) -> Iterator[tuple[Chunk, int]]:
    """Its chunks, verified, and from which byte on they count."""
    for chunk in _chunks(unit, store):
        if unit.since is None or chunk.index >= unit.since.chunk_index:
            yield chunk, chunk.goes_on_at(unit.since)


def _chunks(unit: Unit, store: RemoteStore | None) -> Iterator[Chunk]:
    if unit.path or store is None:
        whole = unit.start or not unit.path.endswith(".mlog")
        data = ChunkFile(unit.first, Path(unit.path), unit.start, unit.size if whole else None).read()
        found = parse_chunk(data, path=unit.path, last=unit.is_last, expect_index=unit.first)
        if found is not None:
            yield found
        return
    _, data = store.get_blob(unit.key)
    if unit.key.endswith(".mlogs"):
        pieces = split_bundle(
            len(data), lambda at: data[at : at + CHUNK_HEADER_LEN], unit.first, unit.last, path=unit.key
        )
        for index, start, length in pieces:
            chunk = parse_chunk(data[start : start + length], path=unit.key, last=False, expect_index=index)
            if chunk is not None:
                yield chunk
        return
    chunk = parse_chunk(data, path=unit.key, last=False, expect_index=unit.first)
    if chunk is not None:
        yield chunk


# -- records


def records_of(unit: Unit, store: RemoteStore | None) -> Iterator[pa.RecordBatch]:
    """A row a record."""
    if unit.snapshot_id:
        yield _start_rows(unit, _snapshot(unit, store))
        return
    for chunk, offset in chunks_of(unit, store):
        yield _batch(unit.stream_id, chunk, offset)


def _batch(stream_id: int, chunk: Chunk, offset: int) -> pa.RecordBatch:
    import pyarrow as pa

    c = columns_of(chunk, offset)
    count = len(c)
    labels = pa.array([*LABELS, "Unknown"], pa.string())
    types = pa.array(np.minimum(c.type_id, len(LABELS)).astype(np.int32))
    codes = pa.array(c.key, mask=c.key < 0)
    kinds = pa.array([kind_of(key) for key in c.keys], pa.string())
    samples: list[bytes | None] | None = None
    for row in np.flatnonzero(c.schema_id == USES_SCHEMA).tolist():
        samples = samples or [None] * count
        start = int(c.chunk_offset[row]) + RECORD_HEADER_LEN
        samples[row] = _blob(bytes(chunk.data[start : start + int(c.payload_len[row])]))
    columns = [
        pa.array(np.full(count, stream_id, np.int32)),
        pa.array(np.full(count, chunk.index, np.int64)),
        pa.array(c.chunk_offset.astype(np.int64)),
        pa.array(c.ordinal.astype(np.int64)),
        pa.array(c.type_id.astype(np.int32)),
        labels.take(types),
        pa.array(c.segment_id.astype(np.int64)),
        pa.array(c.logical_offset.astype(np.int64)),
        pa.array(c.timestamp_ms.astype(np.int64)),
        pa.array(c.schema_id.astype(np.int64)),
        pa.array(c.value.astype(np.int64)),
        pa.array(c.keys, pa.string()).take(codes),
        kinds.take(codes),
        pa.array(samples, pa.binary()) if samples is not None else pa.nulls(count, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=[part.split()[0] for part in RECORDS_SCHEMA.split(",")])


def _blob(payload: bytes) -> bytes:
    event = decode(RecordType.CUSTOM_EVENT, payload)
    return event.blob if isinstance(event, CustomEvent) else b""


def _start_rows(unit: Unit, snapshot: Snapshot) -> pa.RecordBatch:
    import pyarrow as pa

    rows: list[tuple[int, int, int, str | None]] = []
    for segment_id, entry in sorted(snapshot.index.entries.items()):
        has = (entry.resident_bytes, entry.compressed_bytes, entry.durable_bytes)
        rows += [
            (START_HOT + tier, segment_id, amount, entry.key if tier == 2 else None)
            for tier, amount in enumerate(has)
            if entry.residency >> tier & 1
        ]
        rows.append((START_SEALED, segment_id, entry.durable_bytes, None))
    count = len(rows)
    kinds, segments, values, keys = zip(*rows, strict=True) if rows else ((), (), (), ())
    zeros = np.zeros(count, np.int64)
    position = snapshot.position
    columns = [
        pa.array(np.full(count, unit.stream_id, np.int32)),
        pa.array(zeros + position.chunk_index),
        pa.array(zeros + position.chunk_offset),
        pa.array(zeros - 1),
        pa.array(np.array(kinds, np.int32)),
        pa.array([STARTS[kind - START_HOT] for kind in kinds], pa.string()),
        pa.array(np.array(segments, np.uint64).astype(np.int64)),
        pa.array(zeros),
        pa.array(zeros + snapshot.created_ms),
        pa.array(zeros),
        pa.array(np.array(values, np.uint64).astype(np.int64)),
        pa.array(keys, pa.string()),
        pa.nulls(count, pa.string()),
        pa.nulls(count, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=[part.split()[0] for part in RECORDS_SCHEMA.split(",")])


# -- names


def names_of(unit: Unit, store: RemoteStore | None) -> Iterator[pa.RecordBatch]:
    """`kind` segment: parent is its inode. `kind` inode: its directory and its name. `kind` tenant: its name."""
    import pyarrow as pa

    rows: list[tuple[Any, ...]] = []
    names = [part.split()[0] for part in NAMES_SCHEMA.split(",")]
    types = [pa.int32(), pa.string(), pa.int64(), pa.int64(), pa.string(), pa.bool_(), pa.int64()]

    def batch() -> pa.RecordBatch:
        columns = zip(*rows, strict=True) if rows else ((),) * len(names)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        rows.clear()
        return pa.RecordBatch.from_arrays(arrays, names=names)

    for ordinal, mutation in _mutations(unit, store):
        row = _name(unit.stream_id, ordinal, mutation)
        if row is not None:
            rows.append(row)
        if len(rows) >= ROWS_AT_ONCE:
            yield batch()
    yield batch()


def _mutations(unit: Unit, store: RemoteStore | None) -> Iterator[tuple[int, Mutation]]:
    if unit.snapshot_id:
        for name, section in _snapshot(unit, store).sections.items():
            number = t.DB_NUMBER.get(name.removeprefix(SECTION_PREFIX))
            for key, value in rows_of(section, name) if number is not None else ():
                yield -1, (int(number or 0), key, value)
        return
    for chunk, offset in chunks_of(unit, store):
        events = EventAssembler()
        columns = columns_of(chunk, offset)
        for row in np.flatnonzero(columns.schema_id == EVENT_SCHEMA_ID).tolist():
            start = int(columns.chunk_offset[row]) + RECORD_HEADER_LEN
            event = events.feed(
                EVENT_SCHEMA_ID, _blob(bytes(chunk.data[start : start + int(columns.payload_len[row])]))
            )
            for mutation in decode_event(event.body) if event is not None else ():
                yield int(columns.ordinal[row]), mutation


_CHUNK: Final = (t.CHUNKS.number, t.CHUNKS.tag)
_INODE: Final = (t.INODES.number, t.INODES.tag)
_TENANT: Final = (t.TENANTS.number, t.TENANTS.tag)


def _name(stream_id: int, ordinal: int, mutation: Mutation) -> tuple[Any, ...] | None:
    number, key, value = mutation
    if value is None:
        return None
    table = (number, key[:1])
    if table == _CHUNK:
        chunk = t.CHUNKS.decode(value)
        return (stream_id, "segment", chunk.chunk_id, chunk.ino, None, False, ordinal)
    if table == _INODE:
        row = t.INODES.decode(value)
        name = row.last_name.decode(errors="backslashreplace")
        return (stream_id, "inode", row.ino, row.parent, name, stat.S_ISDIR(row.mode), ordinal)
    if table == _TENANT:
        tenant = t.TENANTS.decode(value)
        return (stream_id, "tenant", tenant.tenant_id, 0, tenant.name, False, ordinal)
    return None
