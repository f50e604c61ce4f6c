"""Typed rows of the catalog. msgpack arrays: fields are positional, new ones are appended with a default.

Rows are frozen: a change is a new row (`msgspec.structs.replace`). Ids: a tenant's id is its manifest stream's;
inode numbers are `stream_id << 40 | n`, so they are unique in the volume without coordination; chunk ids are the
manifest's segment ids, one counter a tenant.

The fields are in snapshots and logs. Never reorder, never remove; retire a field by ignoring it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from aof2.engine.remote.location import Location

INO_STREAM_SHIFT: Final = 40
ROOT_INO: Final = 1


def stream_of(ino: int) -> int:
    """The stream of the tenant that an inode is of."""
    return ino >> INO_STREAM_SHIFT


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=False):
    """Base of all rows."""


class TenantRow(Row, frozen=True):
    tenant_id: int
    name: str
    kind: int  # `kinds.registry`
    created_ms: int


class InodeRow(Row, frozen=True):
    """One inode. `generation` names its content: the object row of that number; 0 is empty and never written.

    `hole_bytes` of its size take no room. `parent` and `last_name` are one of its names, and the last it had once it
    has none: where `undelete` puts it back.
    """

    ino: int
    mode: int
    uid: int = 0
    gid: int = 0
    size: int = 0
    nlink: int = 1
    mtime_ns: int = 0
    ctime_ns: int = 0
    atime_ns: int = 0
    rdev: int = 0
    generation: int = 0
    parent: int = 0
    target: bytes = b""
    last_name: bytes = b""
    hole_bytes: int = 0


class DentryRow(Row, frozen=True):
    """One name. Only the type bits of `mode` mean something: the inode has the rest."""

    ino: int
    mode: int


class ObjectState(IntEnum):
    """Written to disk. Never renumber."""

    DIRTY = 0  # being written, or written and not yet sealed
    SEALED = 1  # hashed and synced on the local disk
    PUBLISHED = 2  # all of it in the remote, manifest committed
    TOMBSTONED = 3  # unlinked; kept until the undelete window is over


class HashKind(IntEnum):
    """What an object's SHA-256 is of. Written to disk. Never renumber."""

    BYTES = 0
    CHUNKS = 1  # the SHA-256 of its chunks, one behind the other: most of it are holes


class ObjectRow(Row, frozen=True):
    """One file's bytes at one generation. `backing` is (inode, size, mtime_ns) of the file when last verified.

    While it is DIRTY, `chunks` names those that were uploaded already (pending parts), and 0 for the others. Sealed, 0
    is a chunk that is a hole: zeros, which are nowhere. `hole_bytes` are those of `size` that take no room.
    """

    ino: int
    generation: int
    state: ObjectState
    size: int = 0
    chunk_bytes: int = 64 << 20
    chunks: tuple[int, ...] = ()
    sha256: bytes = b""
    backing: tuple[int, int, int] | None = None
    checkpoint_id: int = 0
    created_ms: int = 0
    sealed_ms: int = 0
    published_ms: int = 0
    tombstoned_ms: int = 0
    hole_bytes: int = 0
    hashed: HashKind = HashKind.BYTES

    @property
    def data_chunks(self) -> tuple[int, ...]:
        """The ids of the chunks that are not holes."""
        return tuple(chunk_id for chunk_id in self.chunks if chunk_id) if 0 in self.chunks else self.chunks

    @property
    def data_bytes(self) -> int:
        return self.size - self.hole_bytes

    def length_of(self, index: int) -> int:
        """Of a chunk of a sealed object."""
        return max(0, min(self.chunk_bytes, self.size - index * self.chunk_bytes))


class DirtyRow(Row, frozen=True):
    """An object that is being written: `generation` of its inode. Where it writes on `base_generation`, or has pending
    parts, blocks below `base_len` that `present` (a mask a chunk) does not name are still the part's, or that one's; an
    empty `present` is all of them. `checkpoint_id` is in the keys of its parts. `segment_id` was opened with the object
    and waits for its first chunk; 0: a chunk has it."""

    generation: int
    base_generation: int = 0
    base_len: int = 0
    present: tuple[int, ...] = ()
    checkpoint_id: int = 0
    segment_id: int = 0


class ChunkRow(Row, frozen=True):
    """One chunk of an object. `block_crcs` is the crc64 of each block, 8 bytes little-endian each. `holes`: a bit for
    each block in which there never was a byte; it is zeros, here and in the remote, and takes no room.

    Its bytes in the remote are `stored_bytes` from `offset` on of the object under `key` ("": not there yet). Rows
    written before these two fields were say 0 stored bytes: all of the object.
    """

    chunk_id: int
    ino: int
    generation: int
    index: int
    length: int
    sha256: bytes = b""
    crc64: int = 0
    block_crcs: bytes = b""
    key: str = ""
    compression: str = ""
    superseded: bool = False
    purge_at_ms: int = 0
    offset: int = 0
    stored_bytes: int = 0
    holes: int = 0

    @property
    def location(self) -> Location:
        return Location(self.key, self.offset, self.stored_bytes)


class ResidencyRow(Row, frozen=True):
    """Where a chunk's bytes are on this machine: a bit a block in hot_cache, and the length of the warm blob. Where any
    bit is set, so are those of the chunk's holes."""

    mask: int = 0
    warm_bytes: int = 0


class BlobRow(Row, frozen=True):
    """The bytes in the remote that hold a chunk's content, shared by every chunk with that hash: `stored_bytes` from
    `offset` on of the object under `key`."""

    key: str
    stored_bytes: int
    raw_bytes: int
    refs: int
    etag: str = ""
    unreferenced_ms: int = 0
    verified_ms: int = 0
    offset: int = 0

    @property
    def location(self) -> Location:
        return Location(self.key, self.offset, self.stored_bytes)


class PackRow(Row, frozen=True):
    """A remote object that blobs share: how many BlobRows lie in it, what they are long together, how long it is, and
    when one that is needed was last moved elsewhere."""

    members: int
    member_bytes: int
    pack_bytes: int = 0
    moved_ms: int = 0


class DeltaRow(Row, frozen=True):
    base_chunk_id: int
    delta_id: int
    file: str
    residency: int
    byte_size: int
    key: str = ""


class WalRow(Row, frozen=True):
    """A WAL artifact or append segment with its local path and what a checkpoint absorbed of it."""

    segment_id: int
    path: str
    first_offset: int
    end_offset: int
    sealed: bool = False
    covered_by: int = 0


class JobType(IntEnum):
    """Written to disk. Never renumber."""

    CREATE_CHECKPOINT = 0
    VERIFY_MANIFEST = 1
    DOWNLOAD_CHECKPOINT = 2
    PRUNE_CHECKPOINT = 3
    TRUNCATE_APPEND_ONLY = 4
    REWRITE_PACKS = 5


class JobState(IntEnum):
    """Written to disk. Never renumber."""

    QUEUED = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    CANCELLED = 4


class JobRow(Row, frozen=True):
    job_id: int
    type: JobType
    tenant_id: int
    token: str
    state: JobState = JobState.QUEUED
    payload: bytes = b""
    done: int = 0
    total: int = 0
    attempts: int = 0
    reason_code: int = 0
    reason: str = ""
    created_ms: int = 0
    updated_ms: int = 0
    not_before_ms: int = 0
    lease_until_ms: int = 0


class DeliveryRow(Row, frozen=True):
    """A job that came by the inbox and was published. `swept_ms`: when the rest of what it staged was gone for good."""

    time_ms: int
    files: int = 0
    size_bytes: int = 0
    records: int = 0
    first_offset: int = 0
    next_offset: int = 0
    swept_ms: int = 0


class CursorRow(Row, frozen=True):
    """A subscriber of the change feed: everything up to `acknowledged` it has processed."""

    acknowledged: int
    registered_ms: int
    seen_ms: int


class SnapshotRow(Row, frozen=True):
    """A moment that retention keeps. `key` names the listing of its tree in the remote; "": not there (yet)."""

    snapshot_id: int
    name: str
    taken_ms: int
    key: str = ""
    files: int = 0
    size_bytes: int = 0


class ChangeRow(Row, frozen=True):
    """A ManifestChangeRecord: what one commit changed, and the generation watermarks after it."""

    sequence: int
    timestamp_ms: int
    ops: tuple[bytes, ...]
    watermarks: dict[str, int]
