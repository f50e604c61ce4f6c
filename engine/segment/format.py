"""The bytes of a segment: header, records, footer, and of the `current.sealed` pointer. All little-endian, packed.

    <segment_id>.seg = header · record[0] · record[1] · … · footer       (unsealed: zeros where the footer will be)

`durable_bytes` is the file offset at which the records end and the footer starts, so a sealed file is exactly
`durable_bytes` + footer long; `segment_crc64` is the crc64-nvme of [0, durable_bytes). `logical_offset` is a byte
position in the stream's payload and never goes backwards.

Version 2 checks less than version 3: its record crc32 covers the payload alone, so an unsealed v2 record's offset,
timestamp and flags are protected by nothing, and a v2 footer has neither magic nor checksum of its own.

Invariants
- Decoding is strict: wrong magic, a length other than the struct's or a failed checksum is CorruptError; a version
  above the known, or reserved bits under a valid checksum (v2: at all), is UnsupportedError.
- Encoding what was decoded gives the same bytes.

Owner: pure functions. Crash: nothing here touches a disk.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.native import crc32, crc64

Buffer = bytes | bytearray | memoryview

SEGMENT_MAGIC: Final = 0x414F46325345474D  # "AOF2SEGM"
FOOTER_MAGIC: Final = 0x414F4632464F4F54  # "AOF2FOOT"
POINTER_MAGIC: Final = 0x414F463243535054  # "AOF2CSPT"
POINTER_VERSION: Final = 1

U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
TIMESTAMP_MS_MAX: Final = 2**63 - 1  # the v3 footer keeps it signed


class Version(IntEnum):
    """Layouts of a segment. Written to disk. Never renumber."""

    # 1 was never released.
    V2 = 2
    V3 = 3


class RecordFlag(IntFlag):
    """Flags of one record. Written to disk. Never renumber."""

    SNAPSHOT_BOUNDARY = 1 << 0
    CONTROL_FRAME = 1 << 1


class FooterFlag(IntFlag):
    """Flags of a sealed segment. Written to disk. Never renumber."""

    SEALED = 1 << 0
    COMPACTED = 1 << 1
    PARTIAL = 1 << 2


RECORD_FLAGS_KNOWN: Final = int(RecordFlag.SNAPSHOT_BOUNDARY | RecordFlag.CONTROL_FRAME)
FOOTER_FLAGS_KNOWN: Final = int(FooterFlag.SEALED | FooterFlag.COMPACTED | FooterFlag.PARTIAL)

_PREFIX = struct.Struct("<QI")  # magic, version
_HEADER_V2 = struct.Struct("<QIQQQQQ")
_HEADER_V3 = struct.Struct("<QIIQQQQQIIQQQQ")
_RECORD_V2 = struct.Struct("<IIQQI")
_RECORD_V3 = struct.Struct("<IIQQIQ")
_FOOTER_V2 = struct.Struct("<QQQQQ")
_FOOTER_V3 = struct.Struct("<QIIQQQQQQqQB7sQ")
_POINTER = struct.Struct("<QIIQQQQ")
_CRC64 = struct.Struct("<Q")

HEADER_BYTES: Final = {Version.V2: _HEADER_V2.size, Version.V3: _HEADER_V3.size}
RECORD_BYTES: Final = {Version.V2: _RECORD_V2.size, Version.V3: _RECORD_V3.size}
FOOTER_BYTES: Final = {Version.V2: _FOOTER_V2.size, Version.V3: _FOOTER_V3.size}
HEADER_BYTES_MAX: Final = max(HEADER_BYTES.values())
POINTER_BYTES: Final = _POINTER.size

if (*HEADER_BYTES.values(), *RECORD_BYTES.values(), *FOOTER_BYTES.values(), POINTER_BYTES) != (
    *(52, 96),
    *(28, 36),
    *(40, 96),
    48,
):
    raise RuntimeError("the structs no longer have the sizes the format fixes")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Written with the first record; `creation_ts_ms` is that record's. v2 keeps only the first four fields."""

    version: int
    stream_id: int
    segment_id: int
    creation_ts_ms: int
    base_offset: int = 0  # logical_offset of the first record
    base_record_count: int = 0  # records of the stream before this segment
    max_size: int = 0  # the sealed file is at most this long
    ext_id: int = 0


@dataclass(frozen=True, slots=True)
class SegmentFooter:
    """Written exactly once, by the seal. v2 keeps record_count, durable_bytes, segment_crc64, ext_id and flags."""

    version: int
    record_count: int
    durable_bytes: int
    segment_crc64: int
    ext_id: int = 0
    flags: int = int(FooterFlag.SEALED)
    segment_id: int = 0
    last_record_ts_ms: int = 0
    coordinator_watermark: int = 0
    flush_failure: bool = False


@dataclass(frozen=True, slots=True)
class Pointer:
    """Content of `current.sealed`: the newest sealed segment of the stream."""

    segment_id: int
    coordinator_watermark: int
    durable_bytes: int


def known_version(version: int, *, path: str = "") -> Version:
    if version > max(Version):
        raise UnsupportedError(f"segment version {version} (this AOF2 reads 2 and 3)", path=path)
    if version < min(Version):
        raise CorruptError(f"segment version {version} was never written", path=path, offset=8)
    return Version(version)


def encode_header(header: SegmentHeader) -> bytes:
    h = header
    if h.version == Version.V2:
        return _HEADER_V2.pack(SEGMENT_MAGIC, h.version, h.stream_id, h.segment_id, h.creation_ts_ms, 0, 0)
    fields = (h.stream_id, h.segment_id, h.creation_ts_ms, h.base_offset, h.base_record_count)
    body = _HEADER_V3.pack(
        *(SEGMENT_MAGIC, h.version, _HEADER_V3.size), *fields, *(h.max_size, 0, h.ext_id), *(0, 0), 0
    )[: -_CRC64.size]
    return body + _CRC64.pack(crc64(body))


def decode_header(data: Buffer, *, path: str = "") -> SegmentHeader:
    """The header at the start of `data`, which may be longer."""
    if len(data) < _PREFIX.size:
        raise CorruptError(f"{len(data)} bytes are too few for a segment header", path=path, offset=0)
    magic, number = _PREFIX.unpack_from(data)
    if magic != SEGMENT_MAGIC:
        raise CorruptError("not a segment (magic)", path=path, offset=0)
    version = known_version(number, path=path)
    if len(data) < HEADER_BYTES[version]:
        raise CorruptError(f"{len(data)} bytes are too few for a segment header", path=path, offset=0)
    return _decode_header_v2(data, path) if version == Version.V2 else _decode_header_v3(data, path)


def _decode_header_v2(data: Buffer, path: str) -> SegmentHeader:
    _, version, stream_id, segment_id, creation_ts_ms, *reserved = _HEADER_V2.unpack_from(data)
    if any(reserved):
        raise UnsupportedError("reserved fields of the segment header are set", path=path)
    return SegmentHeader(version, stream_id, segment_id, creation_ts_ms)


def _decode_header_v3(data: Buffer, path: str) -> SegmentHeader:
    fields = _HEADER_V3.unpack_from(data)
    _, version, header_len, stream_id, segment_id, creation_ts_ms, base_offset, base_record_count = fields[:8]
    max_size, reserved0, ext_id, reserved1, reserved2, header_crc64 = fields[8:]
    if header_len != _HEADER_V3.size:
        raise CorruptError(f"header_len is {header_len}, not {_HEADER_V3.size}", path=path, offset=12)
    if header_crc64 != crc64(memoryview(data)[: _HEADER_V3.size - _CRC64.size]):
        raise CorruptError("checksum of the segment header", path=path, offset=0)
    if reserved0 or reserved1 or reserved2:
        raise UnsupportedError("reserved fields of the segment header are set", path=path)
    if max_size < _HEADER_V3.size + _FOOTER_V3.size:
        raise CorruptError(f"max_size {max_size} does not hold a header and a footer", path=path, offset=56)
    return SegmentHeader(
        *(version, stream_id, segment_id, creation_ts_ms), *(base_offset, base_record_count, max_size, ext_id)
    )


def encode_record(
    version: int, payload: Buffer, logical_offset: int, timestamp_ms: int, ext_id: int = 0, flags: int = 0
) -> bytes:
    """One record, header and payload. `native.segment_encode` does many."""
    length = len(payload)
    if version == Version.V2:
        return _RECORD_V2.pack(length, crc32(payload), logical_offset, timestamp_ms, flags) + bytes(payload)
    crc = crc32(payload, crc32(_RECORD_V3.pack(length, 0, logical_offset, timestamp_ms, flags, ext_id)))
    return _RECORD_V3.pack(length, crc, logical_offset, timestamp_ms, flags, ext_id) + bytes(payload)


def encode_footer(footer: SegmentFooter) -> bytes:
    f = footer
    if f.version == Version.V2:
        return _FOOTER_V2.pack(f.record_count, f.durable_bytes, f.segment_crc64, f.ext_id, f.flags)
    body = _FOOTER_V3.pack(
        *(FOOTER_MAGIC, f.version, _FOOTER_V3.size, f.segment_id, f.record_count, f.durable_bytes),
        *(f.segment_crc64, f.ext_id, f.flags, f.last_record_ts_ms, f.coordinator_watermark, f.flush_failure),
        *(bytes(7), 0),
    )[: -_CRC64.size]
    return body + _CRC64.pack(crc64(body))


def decode_footer(version: int, data: Buffer, *, path: str = "", offset: int | None = None) -> SegmentFooter:
    """The footer that is all of `data`. `offset` is where it came from, for messages."""
    size = FOOTER_BYTES[known_version(version, path=path)]
    if len(data) != size:
        raise CorruptError(f"a v{version} footer is {size} bytes, not {len(data)}", path=path, offset=offset)
    footer = footer_v2(data) if version == Version.V2 else _decode_footer_v3(data, path, offset)
    if footer.flags & ~FOOTER_FLAGS_KNOWN:
        raise UnsupportedError(f"reserved flags {footer.flags:#x} of the segment footer are set", path=path)
    if not footer.flags & FooterFlag.SEALED:
        raise CorruptError("a footer without the sealed flag was never written", path=path, offset=offset)
    return footer


def footer_v2(data: Buffer) -> SegmentFooter:
    """The fields of a v2 footer, unchecked: it has no checksum, only the records can tell whether it is one."""
    record_count, durable_bytes, segment_crc64, ext_id, flags = _FOOTER_V2.unpack(data)
    return SegmentFooter(Version.V2, record_count, durable_bytes, segment_crc64, ext_id, flags)


def _decode_footer_v3(data: Buffer, path: str, offset: int | None) -> SegmentFooter:
    fields = _FOOTER_V3.unpack(data)
    magic, version, footer_len, segment_id, record_count, durable_bytes, segment_crc64 = fields[:7]
    ext_id, flags, last_ts_ms, watermark, flush_failure, reserved, footer_crc64 = fields[7:]
    if magic != FOOTER_MAGIC:
        raise CorruptError("not a segment footer (magic)", path=path, offset=offset)
    if version != Version.V3 and known_version(version, path=path) != Version.V3:
        raise CorruptError(f"footer version {version} after a v3 header", path=path, offset=offset)
    if footer_len != _FOOTER_V3.size:
        raise CorruptError(f"footer_len is {footer_len}, not {_FOOTER_V3.size}", path=path, offset=offset)
    if footer_crc64 != crc64(memoryview(data)[: -_CRC64.size]):
        raise CorruptError("checksum of the segment footer", path=path, offset=offset)
    if any(reserved) or flush_failure > 1:
        raise UnsupportedError("reserved fields of the segment footer are set", path=path)
    if last_ts_ms < 0:
        raise CorruptError(f"last_record_ts_ms {last_ts_ms} is negative", path=path, offset=offset)
    return SegmentFooter(
        *(version, record_count, durable_bytes, segment_crc64, ext_id, flags),
        *(segment_id, last_ts_ms, watermark, bool(flush_failure)),
    )


def footer_claim(version: int, data: Buffer, at: int) -> bool:
    """Whether `data`, the last bytes of a file from offset `at` on, was meant as a footer, damaged or not.

    v3: it starts with the magic. v2 has none: `durable_bytes` is `at` and the sealed flag is set.
    """
    if len(data) != FOOTER_BYTES[Version(version)]:
        return False
    if version == Version.V3:
        return bytes(data[:8]) == FOOTER_MAGIC.to_bytes(8, "little")
    footer = footer_v2(data)
    return footer.durable_bytes == at and bool(footer.flags & FooterFlag.SEALED)


def encode_pointer(pointer: Pointer) -> bytes:
    fields = (pointer.segment_id, pointer.coordinator_watermark, pointer.durable_bytes)
    body = _POINTER.pack(POINTER_MAGIC, POINTER_VERSION, POINTER_BYTES, *fields, 0)[: -_CRC64.size]
    return body + _CRC64.pack(crc64(body))


def decode_pointer(data: Buffer, *, path: str = "") -> Pointer:
    if len(data) < _PREFIX.size or _PREFIX.unpack_from(data)[0] != POINTER_MAGIC:
        raise CorruptError("not a sealed pointer (magic)", path=path, offset=0)
    version = _PREFIX.unpack_from(data)[1]
    if version > POINTER_VERSION:
        raise UnsupportedError(f"pointer version {version}", path=path)
    if version != POINTER_VERSION or len(data) != POINTER_BYTES:
        raise CorruptError(f"a pointer of version {version} and {len(data)} bytes", path=path, offset=0)
    _, _, length, segment_id, watermark, durable_bytes, pointer_crc64 = _POINTER.unpack(data)
    if length != POINTER_BYTES or pointer_crc64 != crc64(memoryview(data)[: -_CRC64.size]):
        raise CorruptError("length or checksum of the pointer", path=path, offset=0)
    return Pointer(segment_id, watermark, durable_bytes)
