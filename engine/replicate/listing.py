"""What one stream has on the remote, and its chunks and snapshots, verified before a caller sees them.

A chunk is an object of its own or a part of a bundle; both hold the same bytes, with the `uploaded` flag clear. Which
of them is there can change between the listing and the reading (the writer bundles meanwhile): a chunk that is gone is
looked for in the bundles, then the listing is made anew.

Invariants
- Nothing leaves `RemoteLog` that did not pass the checks of the format: crc of the chunk and of each payload, crc of
  each section of a snapshot, and the number that its name promises.
- Reads only.

Owner: one thread at a time. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest import format as fmt
from aof2.engine.manifest.reader import Chunk, parse_chunk, split_bundle
from aof2.engine.manifest.snapshot import Snapshot, decode_snapshot
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.store import BlobInfo, RemoteStore

MANIFEST_PREFIX = "manifest/"


class Inventory(NamedTuple):
    """The objects of one stream by what they are. `others` are names that are not ours."""

    chunks: dict[int, BlobInfo]
    bundles: dict[tuple[int, int], BlobInfo]
    snapshots: dict[int, BlobInfo]
    others: list[str]

    def add(self, info: BlobInfo) -> None:
        match keys.parse_key(info.key):
            case keys.ManifestChunkKey(_, index):
                self.chunks[index] = info
            case keys.ManifestBundleKey(_, first, last):
                self.bundles[first, last] = info
            case keys.ManifestSnapshotKey(_, snapshot_id):
                self.snapshots[snapshot_id] = info
            case _:
                self.others.append(info.key)

    def has_chunk(self, index: int) -> bool:
        return index in self.chunks or self.bundle_of(index) is not None

    def bundle_of(self, index: int) -> tuple[int, int] | None:
        return next(((first, last) for first, last in self.bundles if first <= index <= last), None)

    def chunk_indexes(self) -> set[int]:
        """Every chunk that can be had, by itself or out of a bundle."""
        return set(self.chunks).union(*(range(first, last + 1) for first, last in self.bundles))


def stream_prefix(stream_id: int) -> str:
    return f"{MANIFEST_PREFIX}{stream_id}/"


def list_stream(store: RemoteStore, stream_id: int) -> Inventory:
    found = Inventory({}, {}, {}, [])
    for info in store.list(stream_prefix(stream_id)):
        found.add(info)
    return found


def list_streams(store: RemoteStore) -> dict[int, Inventory]:
    """Every stream that has objects, by one listing."""
    found: dict[int, Inventory] = {}
    for info in store.list(MANIFEST_PREFIX):
        number = info.key.split("/")[1]
        if number.isdecimal() and str(int(number)) == number:
            found.setdefault(int(number), Inventory({}, {}, {}, [])).add(info)
    return found


class RemoteLog:
    """One stream as the remote has it. Keeps the bundle that was read last: its chunks are asked for in order."""

    def __init__(self, store: RemoteStore, stream_id: int, inventory: Inventory | None = None) -> None:
        self.store = store
        self.stream_id = stream_id
        self.inventory = inventory if inventory is not None else list_stream(store, stream_id)
        self._bundle: dict[int, bytes] = {}
        self._span: tuple[int, int] | None = None

    def chunk(self, index: int) -> tuple[bytes, Chunk]:
        """A sealed chunk, bytes and parsed. ManifestGapError: not there. ManifestIntegrityError: damaged everywhere."""
        for attempt in range(3):
            if attempt:
                self.inventory = list_stream(self.store, self.stream_id)
            try:
                return self._read_chunk(index)
            except RemoteMissingError:
                continue  # bundled or deleted since it was listed
        raise fmt.ManifestGapError("chunk is not on the remote", path=stream_prefix(self.stream_id), chunk_index=index)

    def _read_chunk(self, index: int) -> tuple[bytes, Chunk]:
        damage: CorruptError | None = None
        if index in self.inventory.chunks:
            key = fmt.chunk_key(self.stream_id, index)
            try:
                return _parsed(self.store.get_blob(key)[1], key, index)
            except CorruptError as e:
                damage = e
        span = self.inventory.bundle_of(index)
        if span is not None:
            return self.bundled_chunk(span, index)
        if damage is not None:
            raise damage
        raise RemoteMissingError(f"chunk {index} of stream {self.stream_id} is not on the remote")

    def bundled_chunk(self, span: tuple[int, int], index: int) -> tuple[bytes, Chunk]:
        """The chunk out of this bundle, whether or not it also has an object of its own."""
        if self._span != span:
            self._bundle, self._span = dict(self._split(span)), span
        return _parsed(self._bundle[index], fmt.bundle_key(self.stream_id, *span), index)

    def is_bundle_whole(self, first: int, last: int) -> bool:
        """Whether every chunk that its name promises is in the bundle, undamaged."""
        try:
            for index in range(first, last + 1):
                self.bundled_chunk((first, last), index)
        except (CorruptError, UnsupportedError):
            return False
        return True

    def _split(self, span: tuple[int, int]) -> Iterator[tuple[int, bytes]]:
        key = fmt.bundle_key(self.stream_id, *span)
        _, data = self.store.get_blob(key)
        at = split_bundle(len(data), lambda pos: data[pos : pos + fmt.CHUNK_HEADER_LEN], *span, path=key)
        return ((index, data[start : start + length]) for index, start, length in at)

    def snapshot(self, snapshot_id: int) -> tuple[bytes, Snapshot]:
        """RemoteMissingError, CorruptError or UnsupportedError when it cannot be used."""
        key = keys.manifest_snapshot_key(self.stream_id, snapshot_id)
        _, data = self.store.get_blob(key)
        snapshot = decode_snapshot(data, path=key)
        if snapshot.snapshot_id != snapshot_id:
            raise CorruptError(f"snapshot: its header says {snapshot.snapshot_id}", path=key, offset=48)
        return data, snapshot

    def follows(self, position: fmt.LogPosition) -> bool:
        """Whether replay can go on at `position`: its chunk can be had, or it is the very end of the log."""
        if self.inventory.has_chunk(position.chunk_index):
            return True
        at_end = not any(index >= position.chunk_index for index in self.inventory.chunk_indexes())
        return at_end and position.chunk_offset == fmt.CHUNK_HEADER_LEN


def _parsed(data: bytes, key: str, index: int) -> tuple[bytes, Chunk]:
    chunk = parse_chunk(data, path=key, last=False, expect_index=index)
    if chunk is None or not chunk.header.sealed or chunk.end != len(data):
        raise fmt.ManifestIntegrityError("not a whole sealed chunk", path=key, chunk_index=index)
    return data, chunk
