"""What a caller may ask of a segment: the limits of the format, checked before anything is written.

Invariants: LimitError when a value can never fit; ValueError when a flag does not exist (a mistake in the code).

Owner: pure functions. Crash: nothing here touches a disk.
"""

from __future__ import annotations

from aof2.engine.errors import LimitError
from aof2.engine.segment import format as fmt


def check_u64(name: str, value: int) -> int:
    if not 0 <= value <= fmt.U64_MAX:
        raise LimitError(f"{name} {value} does not fit in 64 bits")
    return value


def check_header(header: fmt.SegmentHeader) -> None:
    """The capacity holds a record at least, the numbers fit."""
    version = fmt.Version(header.version)
    least = fmt.HEADER_BYTES[version] + fmt.RECORD_BYTES[version] + fmt.FOOTER_BYTES[version]
    if not least < header.max_size <= fmt.U32_MAX:
        raise LimitError(f"a segment of {header.max_size} bytes: it is more than {least} and at most {fmt.U32_MAX}")
    for name in ("stream_id", "segment_id", "base_offset", "base_record_count", "ext_id"):
        check_u64(name, getattr(header, name))


def check_record(version: int, length: int, logical_offset: int, timestamp_ms: int, ext_id: int, flags: int) -> None:
    if length > fmt.U32_MAX:
        raise LimitError(f"a record holds at most {fmt.U32_MAX} bytes, not {length}")
    if version == fmt.Version.V2 and (not length or ext_id):
        raise LimitError("a v2 record is not empty and has no ext_id; write version 3")
    if not 0 <= logical_offset <= fmt.U64_MAX - length:
        raise LimitError(f"logical_offset {logical_offset} and {length} bytes do not fit in 64 bits")
    if not 0 <= timestamp_ms <= fmt.TIMESTAMP_MS_MAX:
        raise LimitError(f"timestamp_ms {timestamp_ms} does not fit in 63 bits")
    check_u64("ext_id", ext_id)
    if flags & ~fmt.RECORD_FLAGS_KNOWN:
        raise ValueError(f"unknown record flags {flags:#x}")


def check_order(logical_offset: int, floor: int) -> None:
    if logical_offset < floor:
        raise LimitError(f"logical_offset {logical_offset} lies before {floor}, where the last record ended")


def check_footer_flags(flags: int) -> None:
    if flags & ~fmt.FOOTER_FLAGS_KNOWN:
        raise ValueError(f"unknown footer flags {flags:#x}")
