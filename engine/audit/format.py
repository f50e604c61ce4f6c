"""ENC/ASL-LOG/1, byte for byte: the header, the record envelope, the hash chain and the six payloads.

    LogHeader, 24 bytes         u8[8] magic "ASLLOG01" · u32 version · u32 header_size · u64 flags
    LogRecord, 48 + n bytes     u64 logseq · u32 record_type · u32 payload_len · u8[n] payload · u8[32] record_hash
    ArtifactRef, 8 + d bytes    u32 hash_id · u16 digest_len · u16 reserved0 · u8[d] digest

All integers little-endian, nothing padded. record_hash = SHA-256(previous record_hash · logseq · record_type ·
payload_len · payload); the first record's previous hash is 32 zero bytes.

Invariants
- Equal content gives equal bytes: there is one encoding of every value, and decoding accepts only that one.
- Decoding trusts no length: a payload with bytes left over, a digest_len that does not fit or a set reserved field is
  CorruptError, whatever its hash says.
- hash_id 1 is SHA-256 and its digests are 32 bytes (the StoreConfig rule). Other hash ids belong to other writers and
  carry any digest of at least one byte.

Versions. New record types need no new version: readers skip them by length and keep them in the chain. A new envelope
or header does: version above 1, or a flag, is UnsupportedError, and nothing of the file is read or trimmed. A file is
never rewritten in a newer version; the old one is closed by a SNAPSHOT_ANCHOR and kept, a new file starts after it.
A version-1 header longer than 24 bytes is skipped to header_size; this writer writes 24.

Owner: pure functions, any thread. A crash leaves nothing here.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum

import msgspec

from aof2.engine.errors import CorruptError, UnsupportedError

MAGIC = b"ASLLOG01"
VERSION = 1
HEADER = struct.Struct("<8sIIQ")
ENVELOPE = struct.Struct("<QII")
HASH_BYTES = 32
ZERO_HASH = bytes(HASH_BYTES)
RECORD_BYTES_MIN = ENVELOPE.size + HASH_BYTES
HASH_ID_SHA256 = 1
DIGEST_BYTES_MAX = 0xFFFF

_REF = struct.Struct("<IHH")
_U64 = struct.Struct("<Q")
_TWO_U32 = struct.Struct("<II")
_U64_HASH = struct.Struct("<Q32s")

PAYLOAD_BYTES_MAX = _REF.size + DIGEST_BYTES_MAX + 8
"""No payload of a known type is longer."""


class RecordType(IntEnum):
    """Written to disk. Never renumber."""

    SEGMENT_SEAL = 0x01
    TOMBSTONE = 0x10
    TOMBSTONE_LIFT = 0x11
    SNAPSHOT_ANCHOR = 0x20
    ARTIFACT_PUBLISH = 0x30
    ARTIFACT_UNPUBLISH = 0x31


class ArtifactRef(msgspec.Struct, frozen=True):
    """Names one artifact by its digest."""

    hash_id: int
    digest: bytes


class SegmentSeal(msgspec.Struct, frozen=True):
    """A segment (chunk) is complete; the hash is SHA-256 over its bytes."""

    segment_id: int
    segment_hash: bytes


class Tombstone(msgspec.Struct, frozen=True):
    """Hides an artifact until this record's logseq is lifted. `scope` and `reason_code` are opaque to the log."""

    artifact: ArtifactRef
    scope: int = 0
    reason_code: int = 0


class TombstoneLift(msgspec.Struct, frozen=True):
    """Takes back the tombstone that was written at `tombstone_logseq`."""

    artifact: ArtifactRef
    tombstone_logseq: int


class SnapshotAnchor(msgspec.Struct, frozen=True):
    """Commits to everything visible before it: `root_hash` is `VisibleState.root_hash()`."""

    snapshot_id: int
    root_hash: bytes


class ArtifactPublish(msgspec.Struct, frozen=True):
    """The artifact is durable in the remote."""

    artifact: ArtifactRef


class ArtifactUnpublish(msgspec.Struct, frozen=True):
    """The artifact was purged."""

    artifact: ArtifactRef


Payload = SegmentSeal | Tombstone | TombstoneLift | SnapshotAnchor | ArtifactPublish | ArtifactUnpublish


class ChainBrokenError(CorruptError):
    """The record at `offset`, due to be `logseq`, is not the one that was chained there. Nothing after it is trusted.

    Never trimmed away: quarantine the file and restore it from the remote ranges and the manifest log.
    """

    def __init__(self, what: str, *, logseq: int, offset: int, path: str = "") -> None:
        self.logseq = logseq
        super().__init__(f"audit chain broken at logseq {logseq}: {what}", path=path, offset=offset)


def encode_header() -> bytes:
    return HEADER.pack(MAGIC, VERSION, HEADER.size, 0)


def decode_header(data: bytes, file_size: int, *, path: str = "") -> int:
    """Checks the first 24 bytes of a file of `file_size` bytes; returns where its first record starts."""
    if len(data) < HEADER.size:
        raise CorruptError(f"audit log of {len(data)} bytes has no whole header", path=path, offset=0)
    magic, version, header_size, flags = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptError(f"not an audit log: magic {magic.hex()}", path=path, offset=0)
    if version > VERSION:
        raise UnsupportedError(f"audit log version {version}", path=path)
    if version != VERSION:
        raise CorruptError(f"audit log version {version}", path=path, offset=8)
    if flags:
        raise UnsupportedError(f"audit log flags {flags:#x}", path=path)
    if not HEADER.size <= header_size <= file_size:
        raise CorruptError(f"audit log header_size {header_size} in a file of {file_size}", path=path, offset=12)
    return int(header_size)


def encode_record(prev_hash: bytes, logseq: int, record_type: int, payload: bytes) -> bytes:
    """One envelope; its last 32 bytes are the next record's `prev_hash`."""
    body = ENVELOPE.pack(logseq, record_type, len(payload)) + payload
    return body + hashlib.sha256(prev_hash + body).digest()


def artifact_ref(tenant: str, object_id: int, generation: int, content_hash: bytes) -> ArtifactRef:
    """The artifact one generation of one object is: identical files stay distinct artifacts.

    digest = SHA-256(u32 len · tenant in UTF-8 · u64 object_id · u64 generation · u32 len · content_hash)
    """
    name = tenant.encode()
    digest = hashlib.sha256(
        struct.pack("<I", len(name))
        + name
        + struct.pack("<QQI", object_id, generation, len(content_hash))
        + content_hash
    ).digest()
    return ArtifactRef(HASH_ID_SHA256, digest)


def encode_ref(ref: ArtifactRef) -> bytes:
    if not 0 < len(ref.digest) <= DIGEST_BYTES_MAX:
        raise ValueError(f"a digest has 1 to {DIGEST_BYTES_MAX} bytes, not {len(ref.digest)}")
    if ref.hash_id == HASH_ID_SHA256 and len(ref.digest) != HASH_BYTES:
        raise ValueError(f"a SHA-256 digest has 32 bytes, not {len(ref.digest)}")
    return _REF.pack(ref.hash_id, len(ref.digest), 0) + ref.digest


def _decode_ref(payload: bytes, rest: int) -> ArtifactRef:
    """The ref that fills `payload` up to its last `rest` bytes."""
    if len(payload) < _REF.size + rest:
        raise CorruptError(f"payload of {len(payload)} bytes is too short for its artifact")
    hash_id, digest_len, reserved = _REF.unpack_from(payload)
    if digest_len == 0 or _REF.size + digest_len + rest != len(payload):
        raise CorruptError(f"digest_len {digest_len} in a payload of {len(payload)} bytes")
    if reserved:
        raise CorruptError(f"artifact reserved0 is {reserved}")
    if hash_id == HASH_ID_SHA256 and digest_len != HASH_BYTES:
        raise CorruptError(f"SHA-256 artifact with a digest of {digest_len} bytes")
    return ArtifactRef(hash_id, payload[_REF.size : _REF.size + digest_len])


def encode_payload(payload: Payload) -> tuple[RecordType, bytes]:
    """ValueError or struct.error for values the format cannot hold: those are the caller's bugs."""
    match payload:
        case SegmentSeal(segment_id, digest):
            return RecordType.SEGMENT_SEAL, _U64_HASH.pack(segment_id, _hash32(digest))
        case Tombstone(ref, scope, reason):
            return RecordType.TOMBSTONE, encode_ref(ref) + _TWO_U32.pack(scope, reason)
        case TombstoneLift(ref, logseq):
            return RecordType.TOMBSTONE_LIFT, encode_ref(ref) + _U64.pack(logseq)
        case SnapshotAnchor(snapshot_id, digest):
            return RecordType.SNAPSHOT_ANCHOR, _U64_HASH.pack(snapshot_id, _hash32(digest))
        case ArtifactPublish(ref):
            return RecordType.ARTIFACT_PUBLISH, encode_ref(ref)
        case ArtifactUnpublish(ref):
            return RecordType.ARTIFACT_UNPUBLISH, encode_ref(ref)


def _hash32(digest: bytes) -> bytes:
    if len(digest) != HASH_BYTES:
        raise ValueError(f"a SHA-256 hash has 32 bytes, not {len(digest)}")
    return digest


def decode_payload(record_type: int, payload: bytes) -> Payload | None:
    """The payload's value, None for a type this version does not know; CorruptError when it is not exactly one."""
    match record_type:
        case RecordType.ARTIFACT_PUBLISH:
            return ArtifactPublish(_decode_ref(payload, 0))
        case RecordType.ARTIFACT_UNPUBLISH:
            return ArtifactUnpublish(_decode_ref(payload, 0))
        case RecordType.SEGMENT_SEAL | RecordType.SNAPSHOT_ANCHOR:
            if len(payload) != _U64_HASH.size:
                raise CorruptError(f"payload of type {record_type:#x} has {len(payload)} bytes, not {_U64_HASH.size}")
            number, digest = _U64_HASH.unpack(payload)
            sealed = record_type == RecordType.SEGMENT_SEAL
            return SegmentSeal(number, digest) if sealed else SnapshotAnchor(number, digest)
        case RecordType.TOMBSTONE:
            ref = _decode_ref(payload, _TWO_U32.size)
            return Tombstone(ref, *_TWO_U32.unpack(payload[-_TWO_U32.size :]))
        case RecordType.TOMBSTONE_LIFT:
            ref = _decode_ref(payload, _U64.size)
            return TombstoneLift(ref, *_U64.unpack(payload[-_U64.size :]))
        case _:
            return None
