"""One atomic change to a stream's rows, as the function that makes it sees it.

`catalog.writer` calls the function with a Batch, on the writer thread, inside the write transaction: reads see every
batch before it, so read-modify-write needs no lock. What it changes is kept here and reaches the transaction and the
log only if the function returns; if it raises, nothing happened.

Owner: the writer thread, for the length of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

import msgspec

from aof2.engine.catalog import ops as o
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChangeRow
from aof2.engine.catalog.store import View
from aof2.engine.catalog.tables import Table
from aof2.engine.manifest import payloads
from aof2.engine.manifest.batch import COMMIT_OF_ROWS, EventAssembler, RecordBatch
from aof2.engine.manifest.format import ManifestIntegrityError, RecordType

R = TypeVar("R")
K = TypeVar("K")

EVENT_SCHEMA_ID: Final = COMMIT_OF_ROWS
READ_ROWS_MAX: Final = 65_536  # that one batch remembers
_UNKNOWN: Final[Any] = object()
Mutation = tuple[int, bytes, bytes | None]  # database number, key without its stream, row or None: deleted
decode_event: Final = msgspec.msgpack.Decoder(list[Mutation]).decode


def mutations_in(records: Iterable[tuple[int, bytes]], *, skip_damaged: bool = False) -> Iterator[Mutation]:
    """What the commits among these records, (type, payload) in the order of the log, change in the rows."""
    for changes in batches_in(records, skip_damaged=skip_damaged):
        yield from changes


def batches_in(records: Iterable[tuple[int, bytes]], *, skip_damaged: bool = False) -> Iterator[list[Mutation]]:
    """The same, of each batch."""
    events = EventAssembler()
    for kind, payload in records:
        if kind != RecordType.CUSTOM_EVENT:
            continue
        try:
            record = payloads.decode(kind, payload)
            if not isinstance(record, payloads.CustomEvent) or record.schema_id != EVENT_SCHEMA_ID:
                continue
            event = events.feed(record.schema_id, record.blob)
            changes = decode_event(event.body) if event is not None else []
        except (ManifestIntegrityError, msgspec.MsgspecError):
            if not skip_damaged:
                raise
            continue
        if changes:
            yield changes


class Batch:
    """Rows of one stream, read and changed; tier records and ManifestOps written along."""

    def __init__(self, view: View, stream_id: int, now_ms: int, now_ns: int, ordinal: int = 0) -> None:
        self.stream_id = stream_id
        self.now_ms = now_ms
        self.now_ns = now_ns  # of inodes
        self.ordinal = ordinal  # of the next record in the stream's log
        self.view = view
        self.records = RecordBatch()
        self.ops: list[o.ManifestOp] = []
        self.after_commit: list[Callable[[], None]] = []
        self.foretold = False  # a log that ends before it, and the remote's objects, tell what it says
        self.awaited = False  # a caller waits for the remote to have the log up to here
        self._prefix = t.STREAM.pack(stream_id)
        # Rows are values: they are packed once, at the end, and one that was read is not unpacked again.
        self._changed: dict[tuple[int, bytes], Any] = {}
        self._read: dict[tuple[int, bytes], Any] = {}

    def get(self, table: Table[K, R], key: K) -> R | None:
        packed = table.tag + table.pack_key(key)
        slot = (table.number, packed)
        row: R | None = self._changed.get(slot, _UNKNOWN)
        if row is _UNKNOWN:
            row = self._read.get(slot, _UNKNOWN)
        if row is _UNKNOWN:
            data = self.view.raw(table.database, self._prefix + packed)
            row = None if data is None else table.decode(data)
            if len(self._read) < READ_ROWS_MAX:
                self._read[slot] = row
        return row

    def put(self, table: Table[K, R], key: K, row: R) -> None:
        self._changed[table.number, table.tag + table.pack_key(key)] = row

    def delete(self, table: Table[K, R], key: K) -> None:
        self._changed[table.number, table.tag + table.pack_key(key)] = None

    def read_ahead(self, table: Table[K, R], keys: Iterable[K]) -> None:
        """Rows that are asked for next, in one look."""
        tag, pack_key, number, lead = table.tag, table.pack_key, table.number, self._prefix
        changed, read, decode = self._changed, self._read, table.decode
        slots = [slot for key in keys if (slot := (number, tag + pack_key(key))) not in changed and slot not in read]
        found = self.view.raw_many(table.database, [lead + name for _, name in slots]) if slots else {}
        for slot in slots:
            data = found.get(lead + slot[1])
            read[slot] = None if data is None else decode(data)

    def scan(self, table: Table[K, R], *, prefix: bytes = b"") -> Iterator[tuple[K, R]]:
        """Rows as they were before this batch."""
        return self.view.scan(self.stream_id, table, prefix=prefix)

    def next_id(self, counter: str, *, step: int = 1) -> int:
        """The next value of a counter of this stream, from 1; `step` takes several, the first is returned."""
        value = (self.get(t.COUNTERS, counter) or 0) + 1
        self.put(t.COUNTERS, counter, value + step - 1)
        return value

    def record(self, payload: payloads.Payload, *, segment_id: int, logical_offset: int = 0) -> None:
        """A tier record, committed with the rows."""
        self.records.add(payload, segment_id=segment_id, logical_offset=logical_offset, timestamp_ms=self.now_ms)

    def record_of_each(
        self, payload: payloads.Payload, segment_ids: Sequence[int], logical_offsets: Sequence[int] | None = None
    ) -> None:
        """The same tier record of many segments."""
        self.records.add_of_each(payload, segment_ids, logical_offsets, timestamp_ms=self.now_ms)

    def apply(self, op: o.ManifestOp) -> None:
        """Changes a row that subscribers watch, and tells them."""
        match op:
            case o.UpsertChunk(chunk):
                self.put(t.CHUNKS, chunk.chunk_id, chunk)
            case o.DeleteChunk(chunk_id):
                self.delete(t.CHUNKS, chunk_id)
                self.delete(t.RESIDENCY, chunk_id)
                if self.get(t.PIECES, chunk_id) is not None:
                    self.delete(t.PIECES, chunk_id)
            case o.UpsertChunkDelta(db_id, chunk_id, generation, delta):
                self.put(t.DELTAS, (db_id, chunk_id, generation), delta)
            case o.DeleteChunkDelta(db_id, chunk_id, generation):
                self.delete(t.DELTAS, (db_id, chunk_id, generation))
            case o.UpsertWal(stream_ino, wal):
                self.put(t.WALS, (stream_ino, wal.segment_id), wal)
            case o.DeleteWal(stream_ino, segment_id):
                self.delete(t.WALS, (stream_ino, segment_id))
            case o.SetWatermark(component, generation):
                if generation > (self.get(t.WATERMARKS, component) or 0):
                    self.put(t.WATERMARKS, component, generation)
        self.ops.append(op)

    def finish(self, *, subscribed: bool) -> list[Mutation]:
        """The row changes to log and apply, with the change record where a subscriber reads it."""
        if self.ops:
            sequence = self.next_id("change_sequence")
            if subscribed:
                watermarks = dict(self.view.scan(self.stream_id, t.WATERMARKS))
                moved = {op.component for op in self.ops if isinstance(op, o.SetWatermark)}
                watermarks |= {component: self.get(t.WATERMARKS, component) or 0 for component in moved}
                packed = tuple(t.encode(op) for op in self.ops)
                self.put(t.CHANGES, sequence, ChangeRow(sequence, self.now_ms, packed, watermarks))
        encode = t.encode
        return [(number, key, None if row is None else encode(row)) for (number, key), row in self._changed.items()]
