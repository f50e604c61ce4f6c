"""Where rows live: named tables inside LMDB databases, keyed so that one stream's rows are one range.

A key is u32 stream id (big-endian), one tag byte of the table, then the table's own key, also big-endian: rows sort by
their numbers, and everything that belongs to a stream can be dumped, compared or deleted by prefix. The databases are
the specification's five plus namespace, jobs and quota, plus `segments` (the folded tier records), `blobs` and `meta`.

Tags and database numbers are in logs and snapshots. Never renumber.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, Generic, TypeVar

import msgspec

from aof2.engine.catalog import rows

R = TypeVar("R")
K = TypeVar("K")

DATABASES: Final = (
    "chunk_catalog",
    "chunk_delta_index",
    "wal_catalog",
    "change_log",
    "change_cursors",
    "namespace",
    "jobs",
    "quota",
    "segments",
    "blobs",
    "meta",
)
DB_NUMBER: Final = {name: number for number, name in enumerate(DATABASES)}
# Rebuilt from the tier records themselves, so their rows are not in the log's events nor in `db:` sections.
DERIVED: Final = frozenset(("segments",))

STREAM: Final = Struct(">I")
_U64: Final = Struct(">Q")
_U64X2: Final = Struct(">QQ")
_U64X3: Final = Struct(">QQQ")
NAME_LEN_MAX: Final = 255


def _pair(key: tuple[int, int]) -> bytes:
    return _U64X2.pack(*key)


def _triple(key: tuple[int, int, int]) -> bytes:
    return _U64X3.pack(*key)


def _dentry(key: tuple[int, bytes]) -> bytes:
    return _U64.pack(key[0]) + key[1]


def _link(key: tuple[int, int, bytes]) -> bytes:
    return _U64X2.pack(key[0], key[1]) + key[2]


class Table(Generic[K, R]):
    """A typed slice of a database."""

    __slots__ = ("database", "decode", "name", "number", "pack_key", "tag", "unpack_key")

    def __init__(
        self,
        database: str,
        tag: bytes,
        name: str,
        row: type[R],
        pack_key: Callable[[K], bytes],
        unpack_key: Callable[[bytes], K],
    ) -> None:
        self.database = database
        self.number = DB_NUMBER[database]
        self.tag = tag
        self.name = name
        self.pack_key = pack_key
        self.unpack_key = unpack_key
        self.decode: Callable[[bytes], R] = msgspec.msgpack.Decoder(row).decode

    def key(self, key: K) -> bytes:
        """The key without its stream."""
        return self.tag + self.pack_key(key)


encode: Final = msgspec.msgpack.Encoder().encode


def _un_u64(key: bytes) -> int:
    return int(_U64.unpack(key)[0])


def _un_dentry(key: bytes) -> tuple[int, bytes]:
    return _un_u64(key[:8]), key[8:]


def _un_link(key: bytes) -> tuple[int, int, bytes]:
    parent, ino = _U64X2.unpack(key[:16])
    return parent, ino, key[16:]


CHUNKS: Final = Table("chunk_catalog", b"c", "chunks", rows.ChunkRow, _U64.pack, _un_u64)
RESIDENCY: Final = Table("chunk_catalog", b"r", "residency", rows.ResidencyRow, _U64.pack, _un_u64)
WARM: Final = Table("chunk_catalog", b"w", "warm", int, _U64.pack, _un_u64)  # chunks with a warm blob → its length
# chunks → crc64 of each 64 KiB of theirs, 8 bytes little-endian each: what may be fetched and checked alone
PIECES: Final = Table("chunk_catalog", b"p", "pieces", bytes, _U64.pack, _un_u64)
DELTAS: Final = Table("chunk_delta_index", b"d", "deltas", rows.DeltaRow, _triple, _U64X3.unpack)
WALS: Final = Table("wal_catalog", b"w", "wals", rows.WalRow, _pair, _U64X2.unpack)
CHANGES: Final = Table("change_log", b"l", "changes", rows.ChangeRow, _U64.pack, _un_u64)
CURSORS: Final = Table("change_cursors", b"u", "cursors", rows.CursorRow, str.encode, bytes.decode)
TENANTS: Final = Table("namespace", b"t", "tenants", rows.TenantRow, _U64.pack, _un_u64)
INODES: Final = Table("namespace", b"i", "inodes", rows.InodeRow, _U64.pack, _un_u64)
DENTRIES: Final = Table("namespace", b"e", "dentries", rows.DentryRow, _dentry, _un_dentry)
XATTRS: Final = Table("namespace", b"x", "xattrs", bytes, _dentry, _un_dentry)
OBJECTS: Final = Table("namespace", b"o", "objects", rows.ObjectRow, _pair, _U64X2.unpack)
TOMBSTONES: Final = Table("namespace", b"z", "tombstones", int, _pair, _U64X2.unpack)  # (when, ino) → generation
DIRTY: Final = Table("namespace", b"y", "dirty", rows.DirtyRow, _U64.pack, _un_u64)  # inodes that are being written
NAMELESS: Final = Table("namespace", b"n", "orphans", int, _U64.pack, _un_u64)  # inodes without a name, still open → 1
# (ino, parent, name) → 1: the names of files with more than one
LINKS: Final = Table("namespace", b"l", "links", int, _link, _un_link)
PINS: Final = Table("namespace", b"p", "pins", int, _U64.pack, _un_u64)  # inodes kept on this disk → since when
JOBS: Final = Table("jobs", b"j", "jobs", rows.JobRow, _U64.pack, _un_u64)
UNPUBLISHED: Final = Table("jobs", b"o", "unpublished", int, _pair, _U64X2.unpack)  # sealed objects → their bytes
JOB_TOKENS: Final = Table("jobs", b"k", "job_tokens", int, str.encode, bytes.decode)
# jobs that came by the inbox, by their ids
DELIVERIES: Final = Table("jobs", b"d", "deliveries", rows.DeliveryRow, str.encode, bytes.decode)
BLOBS: Final = Table("blobs", b"b", "blobs", rows.BlobRow, bytes, bytes)
PACKS: Final = Table("blobs", b"k", "packs", rows.PackRow, str.encode, bytes.decode)  # by their keys
COUNTERS: Final = Table("meta", b"n", "counters", int, str.encode, bytes.decode)
SNAPSHOTS: Final = Table("meta", b"s", "snapshots", rows.SnapshotRow, _U64.pack, _un_u64)
WATERMARKS: Final = Table("meta", b"g", "watermarks", int, str.encode, bytes.decode)

# Tags inside `segments`, which holds the folded tier records as they are in ManifestIndex.
SEGMENT_ENTRY: Final = b"s"
SEGMENT_PENDING_UPLOAD: Final = b"p"
SEGMENT_PENDING_DELETE: Final = b"d"
SEGMENT_LOG_OBJECT: Final = b"o"
SEGMENT_LAST_SNAPSHOT: Final = b"m"

# In `meta`, outside any stream: where each stream's log had got to when the rows were written.
POSITION_PREFIX: Final = b"\xff\xff\xff\xffp"
