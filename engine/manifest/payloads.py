"""The sixteen payloads, typed. Fixed fields are packed, strings follow them in order, zeros pad to a multiple of 8.

`encode` gives (type, padded bytes); `decode` is its inverse and refuses, under a valid checksum, lengths that lie,
bytes that are not UTF-8 and padding that is not zero. SealSegment has two forms, told apart by length.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, NamedTuple

from aof2.engine.errors import LimitError
from aof2.engine.manifest.format import BLOB_LEN_MAX, ManifestIntegrityError, RecordType, pad8

KEY_LEN_MAX: Final = 1024  # S3's limit on a key


class SegmentOpened(NamedTuple):
    base_offset: int
    epoch: int


class SealSegment(NamedTuple):
    """With `ext_id` None the short form is written: 16 bytes, durable_bytes and segment_crc64 alone."""

    durable_bytes: int
    segment_crc64: int
    ext_id: int | None = 0
    coordinator_watermark: int = 0
    flush_failure: int = 0


class CompressionStarted(NamedTuple):
    job_id: int


class CompressionDone(NamedTuple):
    compressed_bytes: int
    dictionary_id: int


class CompressionFailed(NamedTuple):
    reason_code: int


class UploadStarted(NamedTuple):
    key: str


class UploadDone(NamedTuple):
    key: str
    etag: str


class UploadFailed(NamedTuple):
    key: str
    reason_code: int


class Tier2DeleteQueued(NamedTuple):
    key: str


class Tier2Deleted(NamedTuple):
    key: str


class HydrationStarted(NamedTuple):
    source_tier: int


class HydrationDone(NamedTuple):
    resident_bytes: int


class HydrationFailed(NamedTuple):
    reason_code: int


class LocalEvicted(NamedTuple):
    reclaimed_bytes: int


class SnapshotMarker(NamedTuple):
    chunk_index: int
    chunk_offset: int
    snapshot_id: int


class CustomEvent(NamedTuple):
    schema_id: int
    blob: bytes


Payload = (
    SegmentOpened
    | SealSegment
    | CompressionStarted
    | CompressionDone
    | CompressionFailed
    | UploadStarted
    | UploadDone
    | UploadFailed
    | Tier2DeleteQueued
    | Tier2Deleted
    | HydrationStarted
    | HydrationDone
    | HydrationFailed
    | LocalEvicted
    | SnapshotMarker
    | CustomEvent
)

_FIXED: Final[dict[type, tuple[RecordType, Struct]]] = {
    SegmentOpened: (RecordType.SEGMENT_OPENED, Struct("<QI")),
    CompressionStarted: (RecordType.COMPRESSION_STARTED, Struct("<I")),
    CompressionDone: (RecordType.COMPRESSION_DONE, Struct("<QI")),
    CompressionFailed: (RecordType.COMPRESSION_FAILED, Struct("<I")),
    HydrationStarted: (RecordType.HYDRATION_STARTED, Struct("<Q")),
    HydrationDone: (RecordType.HYDRATION_DONE, Struct("<Q")),
    HydrationFailed: (RecordType.HYDRATION_FAILED, Struct("<I")),
    LocalEvicted: (RecordType.LOCAL_EVICTED, Struct("<Q")),
    SnapshotMarker: (RecordType.SNAPSHOT_MARKER, Struct("<QQQ")),
}
# Those with a remote key: the struct has its length and what follows it; of an etag behind it (True), the length.
_KEYED: Final[dict[type, tuple[RecordType, Struct, bool]]] = {
    UploadStarted: (RecordType.UPLOAD_STARTED, Struct("<H"), False),
    UploadDone: (RecordType.UPLOAD_DONE, Struct("<HH"), True),
    UploadFailed: (RecordType.UPLOAD_FAILED, Struct("<HI"), False),
    Tier2DeleteQueued: (RecordType.TIER2_DELETE_QUEUED, Struct("<H"), False),
    Tier2Deleted: (RecordType.TIER2_DELETED, Struct("<H"), False),
}
SEAL_SHORT: Final = Struct("<QQ")
SEAL_LONG: Final = Struct("<QQQQB")
CUSTOM_EVENT: Final = Struct("<IH")

_PADS: Final = tuple(b"\0" * n for n in range(8))
# The same structs with their padding, so that packing one gives the stored bytes.
PADDED: Final[dict[type, tuple[RecordType, Struct]]] = {
    cls: (kind, Struct(f"{fixed.format}{-fixed.size & 7}x")) for cls, (kind, fixed) in _FIXED.items()
}


def _padded(data: bytes) -> bytes:
    return data + _PADS[-len(data) & 7]


def encode(payload: Payload) -> tuple[RecordType, bytes]:
    """The type and the padded payload bytes, as the log stores them."""
    fixed = PADDED.get(type(payload))
    if fixed is not None:
        return fixed[0], fixed[1].pack(*payload)
    match payload:
        case CustomEvent(schema_id, blob):
            return RecordType.CUSTOM_EVENT, encode_event(schema_id, blob)
        case SealSegment(durable, crc, None):
            return RecordType.SEAL_SEGMENT, SEAL_SHORT.pack(durable, crc)
        case SealSegment():
            return RecordType.SEAL_SEGMENT, _padded(SEAL_LONG.pack(*payload))
    if type(payload) not in _KEYED:
        raise TypeError(f"{type(payload).__name__} is not a manifest payload")
    kind, head, has_etag = _KEYED[type(payload)]
    fields: tuple[Any, ...] = payload
    key, etag = fields[0].encode(), fields[1].encode() if has_etag else b""
    if not 0 < len(key) <= KEY_LEN_MAX:
        raise LimitError(f"a remote key has 1 to {KEY_LEN_MAX} bytes, this one has {len(key)}")
    if len(etag) > KEY_LEN_MAX:
        raise LimitError(f"an etag has at most {KEY_LEN_MAX} bytes, this one has {len(etag)}")
    rest = (len(etag),) if has_etag else fields[1:]
    return kind, _padded(head.pack(len(key), *rest) + key + etag)


def encode_event(schema_id: int, blob: bytes) -> bytes:
    if len(blob) > BLOB_LEN_MAX:
        raise LimitError(f"a CustomEvent blob has at most {BLOB_LEN_MAX} bytes, this one has {len(blob)}; use a batch")
    return _padded(CUSTOM_EVENT.pack(schema_id, len(blob)) + blob)


def _check(data: bytes, used: int, what: str) -> None:
    if len(data) != pad8(used):
        raise ManifestIntegrityError(f"{what} payload has {len(data)} bytes, its fields take {pad8(used)}")
    if any(data[used:]):
        raise ManifestIntegrityError(f"{what} payload has bytes in its padding")


def _need(data: bytes, used: int, what: str) -> None:
    if len(data) < used:
        raise ManifestIntegrityError(f"{what} payload has {len(data)} bytes, its fields take {used}")


def _fixed_decoder(cls: Callable[..., Payload], fixed: Struct, what: str) -> Callable[[bytes], Payload]:
    def decode_fixed(data: bytes) -> Payload:
        _check(data, fixed.size, what)
        return cls(*fixed.unpack_from(data))

    return decode_fixed


def _key_decoder(cls: Callable[..., Payload], head: Struct, has_etag: bool, what: str) -> Callable[[bytes], Payload]:
    start = head.size

    def decode_key(data: bytes) -> Payload:
        _need(data, start, what)
        key_len, *rest = head.unpack_from(data)
        cut = start + key_len
        end = cut + rest[0] if has_etag else cut
        _check(data, end, what)
        try:
            key = data[start:cut].decode()
            return cls(key, data[cut:end].decode()) if has_etag else cls(key, *rest)
        except UnicodeDecodeError:
            raise ManifestIntegrityError(f"{what} holds a string that is not UTF-8") from None

    return decode_key


def _decode_seal(data: bytes) -> Payload:
    if len(data) == SEAL_SHORT.size:
        durable_bytes, crc64 = SEAL_SHORT.unpack(data)
        return SealSegment(durable_bytes, crc64, None)
    _check(data, SEAL_LONG.size, "SealSegment")
    return SealSegment(*SEAL_LONG.unpack_from(data))


def _decode_event(data: bytes) -> Payload:
    _need(data, 6, "CustomEvent")
    schema_id, blob_len = CUSTOM_EVENT.unpack_from(data)
    _check(data, 6 + blob_len, "CustomEvent")
    return CustomEvent(schema_id, data[6 : 6 + blob_len])


DECODERS: Final[dict[int, Callable[[bytes], Payload]]] = {
    **{int(t): _fixed_decoder(cls, fixed, t.label) for cls, (t, fixed) in _FIXED.items()},
    **{int(t): _key_decoder(cls, head, has_etag, t.label) for cls, (t, head, has_etag) in _KEYED.items()},
    RecordType.SEAL_SEGMENT: _decode_seal,
    RecordType.CUSTOM_EVENT: _decode_event,
}


def decode(type_id: int, data: bytes) -> Payload:
    """The typed payload of a known type (`type_id < TYPE_COUNT`); the bytes are already checksummed."""
    return DECODERS[type_id](data)
