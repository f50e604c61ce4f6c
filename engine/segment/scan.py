"""Judges a segment's records: how far they are whole, and whether what stops them is a torn write or damage.

In an unsealed file records end at the first thing that is not one. Zeros to the end of the file are reserved space: a
clean end. Anything else is a torn tail, an ordinary outcome of a crash. It is damage (CorruptError) when bytes known to
have been durable do not hold: below `durable`, or anywhere in front of a footer, since a footer is written only after
the records were synced. A record that goes backwards or carries unknown flags under a valid checksum was never torn.

Invariants
- A Tail describes only records whose checksums held.
- A sealed file is verified as a whole: record count, crc64, last timestamp and the exact end all match its footer.

Owner: pure functions over memory the caller keeps unchanged. Crash: nothing here touches a disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment.format import HEADER_BYTES, SegmentFooter, SegmentHeader, Version
from aof2.engine.segment.model import Position
from aof2.native import Fault, Outcome, SegmentScanner, crc64, segment_resync

_ZEROS = bytes(1 << 16)


@dataclass(frozen=True, slots=True)
class Tail:
    """The whole records at the front of a segment, and what follows them."""

    end_offset: int  # file offset after the last whole record: `trimmed at`
    crc64: int  # of [0, end_offset)
    record_count: int
    next_logical_offset: int
    last_record_ts_ms: int
    fault: Fault  # what the scan met at end_offset
    torn_end: int  # behind the last byte that is not zero; end_offset when the end is clean

    @property
    def torn(self) -> bool:
        return self.torn_end > self.end_offset

    def __str__(self) -> str:
        if not self.torn:
            return f"tail: clean at {self.end_offset}"
        return (
            f"tail: trimmed at {self.end_offset}, {self.torn_end - self.end_offset} bytes after it ({self.fault.name})"
        )


def scanner_of(
    view: memoryview,
    header: SegmentHeader,
    start: Position | None = None,
    *,
    end: int,
    durable: int = 0,
    rows_max: int = 65536,
) -> SegmentScanner:
    """A scanner over the records from `start` on. Over all of them, its crc64 becomes the segment's."""
    first = HEADER_BYTES[Version(header.version)]
    return SegmentScanner(
        view,
        start=start.offset if start else first,
        end=end,
        version=header.version,
        durable=durable,
        crc64=0 if start else crc64(view[:first]),
        next_logical=start.logical_offset if start else header.base_offset,
        rows_max=rows_max,
    )


def scan_unsealed(view: memoryview, header: SegmentHeader, *, path: str, durable: int = 0) -> Tail:
    """The whole records of a file without a valid footer. Damage below `durable` raises."""
    scanner = scanner_of(view, header, end=len(view), durable=durable).run()
    return tail_of(view, header, scanner, path=path, durable=durable)


def tail_of(view: memoryview, header: SegmentHeader, scanner: SegmentScanner, *, path: str, durable: int = 0) -> Tail:
    """What an exhausted scanner over an unsealed file says. Damage raises."""
    if scanner.outcome == Outcome.CORRUPT:
        raise damage(header.version, scanner, path)
    if scanner.pos < durable:
        raise CorruptError(f"records end before {durable}, where they were durable", path=path, offset=scanner.pos)
    return Tail(
        *(scanner.pos, scanner.crc64, scanner.total, scanner.next_logical, scanner.last_ts_ms, scanner.fault),
        torn_end=end_of_data(view, scanner.pos),
    )


def verify_sealed(view: memoryview, header: SegmentHeader, footer: SegmentFooter, *, path: str) -> Tail:
    """Every record and the footer agree, or an error says where they do not."""
    end = footer.durable_bytes
    scanner = scanner_of(view, header, end=end, durable=end).run()
    check_footer(header, footer, scanner, path)
    return Tail(end, scanner.crc64, scanner.total, scanner.next_logical, scanner.last_ts_ms, Fault.NONE, end)


def check_footer(header: SegmentHeader, footer: SegmentFooter, scanner: SegmentScanner, path: str) -> None:
    """An exhausted scanner over a sealed file found what its footer tells."""
    at = footer.durable_bytes
    if scanner.outcome != Outcome.CLEAN:
        raise damage(header.version, scanner, path)
    if scanner.crc64 != footer.segment_crc64:
        raise CorruptError("segment_crc64 does not match header and records", path=path, offset=at)
    if scanner.total != footer.record_count:
        raise CorruptError(f"{scanner.total} records, the footer tells {footer.record_count}", path=path, offset=at)
    if header.version != Version.V2 and scanner.last_ts_ms != footer.last_record_ts_ms:
        raise CorruptError("last_record_ts_ms is not the last record's", path=path, offset=at)


def damage(version: int, scanner: SegmentScanner, path: str) -> CorruptError | UnsupportedError:
    """The error for a scan that ended in a fault where there must be none."""
    if scanner.fault == Fault.FLAGS and version != Version.V2:  # under a checksum that holds
        return UnsupportedError(f"reserved flags of the record at byte {scanner.pos} are set", path=path)
    return CorruptError(f"record damaged ({scanner.fault.name})", path=path, offset=scanner.pos)


def records_beyond(view: memoryview, version: int, start: int, next_logical_offset: int) -> bool:
    """Whether a whole record lies somewhere past `start`: bytes worth keeping."""
    return segment_resync(view, start, len(view), version, next_logical_offset) is not None


def end_of_data(view: memoryview, start: int) -> int:
    """The offset behind the last byte at or after `start` that is not zero; `start` when all are."""
    end = len(view)
    while end > start:
        chunk = view[max(start, end - len(_ZEROS)) : end]
        if chunk != _ZEROS[: len(chunk)]:
            return end - len(chunk) + len(bytes(chunk).rstrip(b"\0"))
        end -= len(chunk)
    return start
