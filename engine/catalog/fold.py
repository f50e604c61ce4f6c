"""The tier records of one stream, folded into the `segments` rows.

ManifestIndex does the folding; here its dictionaries are LMDB's: entries are loaded when a record touches them and
written back with the batch, so a stream of a million segments costs the memory of the few in hand. What is pending is
kept in memory as well: it is short by nature.

Owner: the catalog's writer thread. `flush` writes into its transaction; after an aborted one, `reload`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import TYPE_COUNT
from aof2.engine.manifest.index import HANDLERS, ManifestEntry, ManifestIndex
from aof2.engine.manifest.payloads import decode as decode_payload

K = TypeVar("K")
V = TypeVar("V")

decode_entry = msgspec.msgpack.Decoder(ManifestEntry).decode
_pair_decoder = msgspec.msgpack.Decoder(tuple[int, str])
_pending_decoder = msgspec.msgpack.Decoder(tuple[int, str, int])


def put_all(txn: Any, db: Any, rows: Sequence[tuple[bytes, bytes]]) -> None:
    """Many rows of one database, by one call into LMDB."""
    if len(rows) == 1:
        txn.put(*rows[0], db=db)
    elif rows:
        with txn.cursor(db=db) as cursor:
            cursor.putmulti(rows)


class _Entries(dict[int, ManifestEntry]):
    """Entries in hand; a missing one is looked up in the rows."""

    def __init__(self, load: Callable[[int], ManifestEntry | None]) -> None:
        super().__init__()
        self._load = load
        self.gone: set[int] = set()

    def __setitem__(self, segment_id: int, entry: ManifestEntry) -> None:
        self.gone.discard(segment_id)
        super().__setitem__(segment_id, entry)

    def pop(self, segment_id: int, *default: Any) -> Any:
        self.gone.add(segment_id)
        return super().pop(segment_id, *default)

    def clear(self) -> None:
        self.gone.clear()
        super().clear()

    def get(self, segment_id: int, default: Any = None) -> Any:
        entry = super().get(segment_id)
        if entry is None and segment_id not in self.gone:
            entry = self._load(segment_id)
            if entry is not None:
                self[segment_id] = entry
        return default if entry is None else entry


class _Touched(dict[K, V]):
    """A dictionary that remembers which keys changed."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[K] = set()

    def __setitem__(self, key: K, value: V) -> None:
        self.touched.add(key)
        super().__setitem__(key, value)

    def pop(self, key: K, *default: Any) -> Any:
        self.touched.add(key)
        return super().pop(key, *default)


class _Uploads(_Touched[tuple[int, str], int]):
    """Uploads that did not end, by segment and key; a pack's members are many."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: Counter[int] = Counter()

    def load(self, key: tuple[int, str], reason: int) -> None:
        """It is in the rows already."""
        self.segments[key[0]] += key not in self
        dict.__setitem__(self, key, reason)

    def __setitem__(self, key: tuple[int, str], reason: int) -> None:
        self.segments[key[0]] += key not in self
        super().__setitem__(key, reason)

    def pop(self, key: tuple[int, str], *default: Any) -> Any:
        if key in self:
            self.segments[key[0]] -= 1
            if not self.segments[key[0]]:
                del self.segments[key[0]]
        return super().pop(key, *default)


class _TouchedSet(set[K]):
    def __init__(self) -> None:
        super().__init__()
        self.touched: set[K] = set()

    def add(self, key: K) -> None:
        self.touched.add(key)
        super().add(key)

    def discard(self, key: Any) -> None:
        self.touched.add(key)
        super().discard(key)


class StreamFold(ManifestIndex):
    """A ManifestIndex whose state is the `segments` rows of one stream."""

    def __init__(self, stream_id: int) -> None:
        super().__init__()
        self.stream_id = stream_id
        self.prefix = t.STREAM.pack(stream_id)
        self.view: View | None = None
        self._saved_snapshot: tuple[int, int, int] | None = None
        self._reset()

    def _reset(self) -> None:
        self.entries = self._entries = _Entries(self._load)
        self.pending_uploads = self._uploads = _Uploads()
        self.pending_deletes = self._deletes = _TouchedSet[tuple[int, str]]()
        self.log_objects = self._objects = _Touched[str, str]()

    def _load(self, segment_id: int) -> ManifestEntry | None:
        return None if self.view is None else entry_of(self.view, self.stream_id, segment_id)

    def _is_uploading(self, segment_id: int) -> bool:
        return segment_id in self._uploads.segments

    def reload(self, view: View) -> None:
        """What is pending, from the rows; entries follow when touched."""
        self._reset()
        at = len(self.prefix) + 1
        for _, value in view.raw_scan("segments", self.prefix + t.SEGMENT_PENDING_UPLOAD):
            segment_id, key, reason = _pending_decoder.decode(value)
            self._uploads.load((segment_id, key), reason)
        for _, value in view.raw_scan("segments", self.prefix + t.SEGMENT_PENDING_DELETE):
            set.add(self._deletes, _pair_decoder.decode(value))
        for name, value in view.raw_scan("segments", self.prefix + t.SEGMENT_LOG_OBJECT):
            dict.__setitem__(self._objects, name[at:].decode(), value.decode())
        last = view.raw("segments", self.prefix + t.SEGMENT_LAST_SNAPSHOT)
        self.snapshot = None if last is None else msgspec.msgpack.decode(last, type=tuple[int, int, int])
        self._saved_snapshot = self.snapshot

    def apply_all(self, records: RecordBatch) -> None:
        """Folds records that were just written. Neighbours often say the same: that is decoded once."""
        self._read_ahead(records.segment_ids)
        last_kind, last, payload = -1, b"", None
        for kind, segment_id, _, stamp, data in records.rows():
            if kind >= TYPE_COUNT:
                continue
            if kind != last_kind or data != last:
                last_kind, last, payload = kind, data, decode_payload(kind, data)
            HANDLERS[kind](self, segment_id, payload, stamp)

    def _read_ahead(self, segment_ids: Iterable[int]) -> None:
        """The entries of these segments, in one look."""
        wanted = {i for i in segment_ids if i not in self._entries and i not in self._entries.gone}
        if len(wanted) <= 1 or self.view is None:
            return
        names = {self._entry_key(segment_id): segment_id for segment_id in wanted}
        for name, data in self.view.raw_many("segments", names).items():
            self._entries[names[name]] = decode_entry(data)

    def flush(self, txn: Any, db: Any) -> None:
        """Writes what the records since the last flush changed."""
        puts: list[tuple[bytes, bytes]] = []

        def put(key: bytes, value: bytes | None) -> None:
            if value is None:
                txn.delete(key, db=db)
            else:
                puts.append((key, value))

        encode = t.encode
        puts += [(self._entry_key(segment_id), encode(entry)) for segment_id, entry in self._entries.items()]
        for segment_id in self._entries.gone:
            put(self._entry_key(segment_id), None)
        self._entries.clear()
        for pair in self._uploads.touched:
            reason = dict.get(self._uploads, pair)
            put(self._pair_key(t.SEGMENT_PENDING_UPLOAD, pair), None if reason is None else encode((*pair, reason)))
        for pair in self._deletes.touched:
            put(self._pair_key(t.SEGMENT_PENDING_DELETE, pair), encode(pair) if pair in self._deletes else None)
        for name in self._objects.touched:
            etag = dict.get(self._objects, name)
            put(self.prefix + t.SEGMENT_LOG_OBJECT + name.encode(), None if etag is None else etag.encode())
        for tracked in (self._uploads, self._deletes, self._objects):
            tracked.touched.clear()
        if self.snapshot != self._saved_snapshot:
            put(self.prefix + t.SEGMENT_LAST_SNAPSHOT, encode(self.snapshot))
            self._saved_snapshot = self.snapshot
        put_all(txn, db, puts)

    def _entry_key(self, segment_id: int) -> bytes:
        return self.prefix + t.SEGMENT_ENTRY + segment_id.to_bytes(8, "big")

    def _pair_key(self, tag: bytes, pair: tuple[int, str]) -> bytes:
        # Keys may be longer than LMDB allows (511 bytes): what does not fit is replaced by its hash.
        name = pair[1].encode()
        if len(name) > 400:
            name = name[:300] + hashlib.sha256(name).digest()
        return self.prefix + tag + pair[0].to_bytes(8, "big") + name


def load_index(view: View, stream_id: int) -> ManifestIndex:
    """The whole index of a stream in memory: for `verify` and tests."""
    index = load_pending(view, stream_id)
    index.entries.update(entries_of(view, stream_id))
    return index


def load_pending(view: View, stream_id: int) -> StreamFold:
    """The index of a stream without its entries: short by nature."""
    fold = StreamFold(stream_id)
    fold.reload(view)
    return fold


def uploads_begun(view: View, stream_id: int, segment_id: int) -> list[str]:
    """The keys under which uploads of this segment were begun, and did not end."""
    prefix = t.STREAM.pack(stream_id) + t.SEGMENT_PENDING_UPLOAD + segment_id.to_bytes(8, "big")
    return [_pending_decoder.decode(value)[1] for _, value in view.raw_scan("segments", prefix)]


def entry_of(view: View, stream_id: int, segment_id: int) -> ManifestEntry | None:
    """What the records say about one segment."""
    data = view.raw("segments", t.STREAM.pack(stream_id) + t.SEGMENT_ENTRY + segment_id.to_bytes(8, "big"))
    return None if data is None else decode_entry(data)


def entries_of(view: View, stream_id: int, *, after: bytes | None = None) -> Iterator[tuple[int, ManifestEntry]]:
    """The entries, by segment id, one at a time; those behind `after` (a packed id)."""
    prefix = t.STREAM.pack(stream_id) + t.SEGMENT_ENTRY
    start = None if after is None else prefix + after
    for key, value in view.raw_scan("segments", prefix, start):
        if key == start:
            continue
        yield int.from_bytes(key[len(prefix) :], "big"), decode_entry(value)
