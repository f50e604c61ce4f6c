"""Bytes of the manifest log: chunk header, record header, commit marker, file names.

All integers are little-endian, all structs packed. A chunk file is a ChunkHeader followed by records back to back; a
record is a header and a payload of a non-zero multiple of 8 bytes, so every record starts on a multiple of 8.

Version policy. A chunk of a newer `version`, with unknown chunk flag bits, or with record flags set on a known type is
refused whole (UnsupportedError): its writer meant something this reader would get wrong. New record types need no new
version: they are skipped by length, counted, and their flags kept for `manifest inspect`. A new version starts with a
new chunk; chunks already written are never rewritten.

The numbers in this file are on disks. Never renumber; a retired number stays as a comment.
"""

from __future__ import annotations

import re
from enum import IntEnum, IntFlag
from struct import Struct
from typing import Final, NamedTuple

from aof2.engine.errors import CorruptError, UnsupportedError

CHUNK_MAGIC: Final = 0x414F46324D4C4F47  # "AOF2MLOG"
CHUNK_VERSION: Final = 1
CHUNK_HEADER: Final = Struct("<QIIQQQQQQ")
CHUNK_HEADER_LEN: Final = 64
RECORD_HEADER: Final = Struct("<HHIQQQQ")
RECORD_HEADER_LEN: Final = 40

CAPACITY_MIN: Final = 16 << 10
CAPACITY_MAX: Final = 1 << 20
GROWTH_STEP: Final = 64 << 10
BLOB_LEN_MAX: Final = 0xFFFF

# Records about the log's own chunks carry this segment id and the chunk index as logical_offset, so that they are never
# taken for a data segment's.
LOG_SEGMENT_ID: Final = 0xFFFF_FFFF_FFFF_FFFF

# A commit ends with a CustomEvent of this schema: {u64 span_start; u64 span_crc64; u64 durable_len}, where the span is
# [end of the previous marker, this record) and durable_len is how much of the chunk was known to be synced before.
COMMIT_SCHEMA_ID: Final = 1
COMMIT_BLOB: Final = Struct("<QQQ")
COMMIT_PAYLOAD: Final = Struct("<IHQQQ2x")
COMMIT_RECORD_LEN: Final = RECORD_HEADER_LEN + COMMIT_PAYLOAD.size


class RecordType(IntEnum):
    """Written to disk. Never renumber."""

    SEGMENT_OPENED = 0
    SEAL_SEGMENT = 1
    COMPRESSION_STARTED = 2
    COMPRESSION_DONE = 3
    COMPRESSION_FAILED = 4
    UPLOAD_STARTED = 5
    UPLOAD_DONE = 6
    UPLOAD_FAILED = 7
    TIER2_DELETE_QUEUED = 8
    TIER2_DELETED = 9
    HYDRATION_STARTED = 10
    HYDRATION_DONE = 11
    HYDRATION_FAILED = 12
    LOCAL_EVICTED = 13
    SNAPSHOT_MARKER = 14
    CUSTOM_EVENT = 15

    @property
    def label(self) -> str:
        """The name the specification uses: `SegmentOpened`, `Tier2DeleteQueued` …"""
        return "".join(word.capitalize() for word in self.name.split("_"))


TYPE_COUNT: Final = len(RecordType)


class ReasonCode(IntEnum):
    """Why compression, upload or hydration failed. Written to disk. Never renumber."""

    TRANSIENT = 0
    CODEC = 1  # CompressionFailed: permanent, the segment is damaged
    AUTH = 2  # UploadFailed: an operator must act
    UNAVAILABLE = 3  # UploadFailed: bucket or network
    OBJECT_MISSING = 4  # HydrationFailed: starts repair


class ChunkFlag(IntFlag):
    """Written to disk. Never renumber."""

    SEALED = 1
    UPLOADED = 2


KNOWN_CHUNK_FLAGS: Final = int(ChunkFlag.SEALED | ChunkFlag.UPLOADED)


class ManifestIntegrityError(CorruptError):
    """The log is damaged here. Stop replay, quarantine the stream, restore the chunk from the remote copy."""

    def __init__(
        self,
        what: str,
        *,
        path: str = "",
        chunk_index: int | None = None,
        segment_id: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.chunk_index = chunk_index
        self.segment_id = segment_id
        chunk = "" if chunk_index is None else f"chunk {chunk_index}: "
        segment = "" if segment_id is None else f" (segment {segment_id})"
        super().__init__(f"{chunk}{what}{segment}", path=path, offset=offset)


class ManifestGapError(ManifestIntegrityError):
    """A chunk between two others is not here. It may be on the remote: fetch it and replay again."""


class LogPosition(NamedTuple):
    """A place in the log. `ordinal` is the number of records before it."""

    chunk_index: int
    chunk_offset: int
    ordinal: int


class ChunkHeader(NamedTuple):
    """The first 64 bytes of a chunk. `tail_offset` and `committed_len` are file offsets, header included."""

    chunk_index: int
    base_record: int
    tail_offset: int = CHUNK_HEADER_LEN
    committed_len: int = CHUNK_HEADER_LEN
    chunk_crc64: int = 0
    flags: int = 0

    def pack(self) -> bytes:
        return CHUNK_HEADER.pack(CHUNK_MAGIC, CHUNK_VERSION, CHUNK_HEADER_LEN, *self)

    @property
    def sealed(self) -> bool:
        return bool(self.flags & ChunkFlag.SEALED)

    @property
    def uploaded(self) -> bool:
        return bool(self.flags & ChunkFlag.UPLOADED)


def unpack_chunk_header(data: bytes | memoryview, *, path: str = "") -> ChunkHeader:
    """Checks everything a header can be checked for by itself."""
    if len(data) < CHUNK_HEADER_LEN:
        raise ManifestIntegrityError(f"{len(data)} bytes are too few for a chunk header", path=path, offset=len(data))
    magic, version, header_len, *fields = CHUNK_HEADER.unpack_from(data)
    if magic != CHUNK_MAGIC:
        raise ManifestIntegrityError(f"not a manifest chunk (magic {magic:#018x})", path=path, offset=0)
    if version > CHUNK_VERSION:
        raise UnsupportedError(f"manifest chunk version {version}, this reader knows {CHUNK_VERSION}", path=path)
    if version != CHUNK_VERSION:
        raise ManifestIntegrityError(f"manifest chunk version {version} never existed", path=path, offset=8)
    if header_len != CHUNK_HEADER_LEN:
        raise ManifestIntegrityError(f"header_len {header_len} is not {CHUNK_HEADER_LEN}", path=path, offset=12)
    header = ChunkHeader(*fields)
    if header.flags & ~KNOWN_CHUNK_FLAGS:
        raise UnsupportedError(f"manifest chunk flags {header.flags:#x}", path=path)
    return header


def pad8(length: int) -> int:
    return (length + 7) & ~7


def chunk_name(chunk_index: int) -> str:
    return f"{chunk_index}.mlog"


def chunk_key(stream_id: int, chunk_index: int) -> str:
    """Where a sealed chunk lives on the remote."""
    return f"manifest/{stream_id}/{chunk_index}.mlog"


def bundle_key(stream_id: int, first: int, last: int) -> str:
    return f"manifest/{stream_id}/bundle-{first}-{last}.mlogs"


# No leading zeros, so that one index has one name.
CHUNK_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,19})\.mlog")
TEMP_NAME: Final = re.compile(r"(0|[1-9][0-9]{0,19})\.mlog\.tmp")
BUNDLE_NAME: Final = re.compile(r"bundle-(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})\.mlogs")
SNAPSHOT_NAME: Final = re.compile(r"snapshot_(0|[1-9][0-9]{0,19})\.bin")
