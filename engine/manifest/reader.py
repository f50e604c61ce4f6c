"""Reading the log back: chunk checksum first, then each payload's, then the record.

Nothing is yielded from a chunk before the whole of it has been checked. A sealed chunk is right or it is damaged. The
last, unsealed chunk may end in a torn commit: it is read up to `committed_len` when its checksum holds, else up to the
last commit marker whose span does. Synced bytes are never given up that way: where a later marker says that more than
this had been synced, the chunk is damaged, not torn.

A `Stream` is a folder of chunks, bundles and snapshots; it is opened read-only and takes no lock beyond the one around
the header, so `manifest inspect` can look at a log that is being written.

Owner: stateless. A crash leaves nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from aof2 import native
from aof2.engine.errors import Aof2Error, UnsupportedError
from aof2.engine.fds import opened
from aof2.engine.manifest import payloads
from aof2.engine.manifest.format import (
    BUNDLE_NAME,
    CAPACITY_MAX,
    CHUNK_HEADER_LEN,
    CHUNK_NAME,
    SNAPSHOT_NAME,
    TYPE_COUNT,
    ChunkHeader,
    LogPosition,
    ManifestGapError,
    ManifestIntegrityError,
    RecordType,
    unpack_chunk_header,
)

_ZERO_HEADER: Final = bytes(CHUNK_HEADER_LEN)
# A chunk grows past its capacity only by what one commit holds; far beyond that it is not one of ours.
CHUNK_LEN_MAX: Final = CAPACITY_MAX + (256 << 20)


class Record(NamedTuple):
    """One verified record. `payload` is as stored, padding included; `decoded` gives it typed."""

    chunk_index: int
    chunk_offset: int
    ordinal: int
    type_id: int
    flags: int
    segment_id: int
    logical_offset: int
    timestamp_ms: int
    payload: bytes

    @property
    def known(self) -> bool:
        return self.type_id < TYPE_COUNT

    @property
    def type(self) -> str:
        return RecordType(self.type_id).label if self.known else f"Unknown{self.type_id}"

    def decoded(self) -> payloads.Payload:
        try:
            return payloads.decode(self.type_id, self.payload)
        except ManifestIntegrityError as e:
            raise ManifestIntegrityError(
                e.what, chunk_index=self.chunk_index, segment_id=self.segment_id, offset=self.chunk_offset
            ) from None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk whose every byte up to `end` is verified. `trimmed` counts the bytes of a torn commit after it."""

    path: str
    header: ChunkHeader
    data: bytes | memoryview
    rows: native.ManifestRows
    count: int
    end: int
    trimmed: int

    @property
    def index(self) -> int:
        return self.header.chunk_index

    @property
    def end_position(self) -> LogPosition:
        return LogPosition(self.index, self.end, self.header.base_record + self.count)

    def records(self, from_offset: int = CHUNK_HEADER_LEN) -> Iterator[Record]:
        """Records that start at or after `from_offset`, which must be where one starts (or the end)."""
        first = self.row_at(from_offset)
        rows = zip(*(column[first:] for column in self.rows), strict=True)
        base = self.header.base_record + first
        for i, (offset, kind, flags, length, segment_id, logical, stamp) in enumerate(rows):
            payload = bytes(self.data[offset + 40 : offset + 40 + length])
            yield Record(self.index, offset, base + i, kind, flags, segment_id, logical, stamp, payload)

    def goes_on_at(self, position: LogPosition | None) -> int:
        """The byte of this chunk at which a replay from `position` goes on."""
        here = position is not None and position.chunk_index == self.index
        return position.chunk_offset if position and here else CHUNK_HEADER_LEN

    def row_at(self, offset: int) -> int:
        """Which record starts there; `count` at the end."""
        row = bisect.bisect_left(self.rows.offset, offset)
        if offset != (self.end if row == self.count else self.rows.offset[row]):
            raise ManifestIntegrityError("no record starts here", path=self.path, chunk_index=self.index, offset=offset)
        return row


def parse_chunk(
    data: bytes | memoryview, *, path: str = "", last: bool, expect_index: int | None = None
) -> Chunk | None:
    """Verifies one chunk. `last`: it may be unsealed and torn; None then means that it holds no commit at all."""
    if last and bytes(data[:CHUNK_HEADER_LEN]) == _ZERO_HEADER[: len(data)]:
        # Its header never reached the disk: then it holds no marker that speaks of synced bytes.
        durable = native.manifest_probe_durable(data, min(CHUNK_HEADER_LEN, len(data)))
        if durable > CHUNK_HEADER_LEN:
            what = f"its header is lost, though {durable} bytes had been synced"
            raise ManifestIntegrityError(what, path=path, chunk_index=expect_index, offset=0)
        return None
    header = unpack_chunk_header(data, path=path)
    if expect_index is not None and header.chunk_index != expect_index:
        what = f"its header says chunk {header.chunk_index}"
        raise ManifestIntegrityError(what, path=path, chunk_index=expect_index, offset=16)
    end = header.committed_len
    scan = native.manifest_scan(data, CHUNK_HEADER_LEN, min(end, len(data)) if end >= CHUNK_HEADER_LEN else 64)
    whole = CHUNK_HEADER_LEN <= end <= len(data) and header.tail_offset >= end
    if whole and scan.outcome == native.Outcome.CLEAN and scan.crc64 == header.chunk_crc64:
        return _checked(data, header, path, scan, len(scan.rows.offset))
    if header.sealed or not last:
        raise _damage(data, header, path, scan, whole=whole)
    return _parse_torn(data, header, path)


def _parse_torn(data: bytes | memoryview, header: ChunkHeader, path: str) -> Chunk | None:
    """An unsealed chunk whose header and bytes did not land together: keep up to the last valid marker."""
    scan = native.manifest_scan(data, CHUNK_HEADER_LEN)
    keep = scan.marker_end
    durable = max(scan.durable_len, native.manifest_probe_durable(data, scan.pos & ~7))
    if durable > keep:
        what = f"damaged below byte {durable}, which had been synced"
        raise ManifestIntegrityError(what, path=path, chunk_index=header.chunk_index, offset=scan.pos)
    if scan.marker_count == 0:
        return None
    header = header._replace(tail_offset=keep, committed_len=keep, chunk_crc64=scan.marker_crc64)
    return _checked(data, header, path, scan, scan.marker_count)


def _checked(data: bytes | memoryview, header: ChunkHeader, path: str, scan: native.ManifestScan, count: int) -> Chunk:
    """The chunk with the first `count` records of the scan, which end where its header says."""
    rows = native.ManifestRows(*(column[:count] for column in scan.rows))
    if any(rows.flags):
        for kind, flags in zip(rows.type, rows.flags, strict=True):
            if flags and kind < TYPE_COUNT:
                raise UnsupportedError(f"{RecordType(kind).label} record with flags {flags:#x}", path=path)
    # The last marker knows its ordinal, so a header that lies about base_record is found out.
    if scan.marker_count == count > 0 and rows.logical_offset[-1] != header.base_record + count - 1:
        what = f"base_record {header.base_record} disagrees with its last commit marker"
        raise ManifestIntegrityError(what, path=path, chunk_index=header.chunk_index, offset=24)
    if header.uploaded and not header.sealed:
        raise ManifestIntegrityError("uploaded but not sealed", path=path, chunk_index=header.chunk_index, offset=56)
    return Chunk(path, header, data, rows, count, header.committed_len, len(data) - header.committed_len)


def _damage(
    data: bytes | memoryview, header: ChunkHeader, path: str, scan: native.ManifestScan, *, whole: bool
) -> ManifestIntegrityError:
    segment_id: int | None = None
    if not whole:
        what, offset = f"committed_len {header.committed_len} does not fit a file of {len(data)} bytes", 40
    elif scan.outcome == native.Outcome.CLEAN:
        what, offset = f"its checksum {scan.crc64:#018x} is not the recorded {header.chunk_crc64:#018x}", 48
    else:
        what, offset = f"record damaged ({scan.fault.name.lower().replace('_', ' ')})", scan.pos
        if offset + 16 <= len(data):
            segment_id = int.from_bytes(data[offset + 8 : offset + 16], "little")
    return ManifestIntegrityError(what, path=path, chunk_index=header.chunk_index, segment_id=segment_id, offset=offset)


def read_file(path: Path, *, start: int = 0, length: int | None = None) -> bytes:
    """A file or a part of it, read (not mapped: a writer may cut it) under the lock that header updates take."""
    with opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        status = os.fstat(fd)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise ManifestIntegrityError("not a file", path=str(path))
        if length is None and size > CHUNK_LEN_MAX:
            raise ManifestIntegrityError(f"{size} bytes are more than a chunk can have", path=str(path))
        fcntl.flock(fd, fcntl.LOCK_SH)
        with open(fd, "rb", closefd=False) as f:
            f.seek(start)
            return f.read(-1 if length is None else length)


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """Where one chunk is: a file of its own, or a part of a bundle."""

    index: int
    path: Path
    start: int = 0
    length: int | None = None

    def read(self) -> bytes:
        return read_file(self.path, start=self.start, length=self.length)


def split_bundle(
    size: int, header_at: Callable[[int], bytes], first: int, last: int, *, path: str
) -> Iterator[tuple[int, int, int]]:
    """(index, start, length) of each chunk in a bundle of `size` bytes: first to last, whole, sealed, nothing else."""
    index, pos = first, 0

    def error(what: str) -> ManifestIntegrityError:
        return ManifestIntegrityError(what, path=path, chunk_index=index, offset=pos)

    while pos < size:
        header = unpack_chunk_header(header_at(pos), path=path)
        length = header.committed_len
        if header.chunk_index != index or index > last:
            raise error(f"holds chunk {header.chunk_index} where {index} belongs")
        if not header.sealed or length < CHUNK_HEADER_LEN or pos + length > size:
            raise error("a bundle holds whole sealed chunks only")
        yield index, pos, length
        index, pos = index + 1, pos + length
    if index <= last:
        raise error(f"ends before chunk {last}, which its name promises")


class Folder:
    """What a stream's folder holds by name, listed once. `copies` are bundled chunks that are also elsewhere."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = frozenset(os.listdir(directory))  # noqa: PTH208
        self.bundles = 0
        self.copies: list[ChunkFile] = []
        self.errors: list[tuple[Path, Aof2Error | OSError]] = []  # of bundles: the chunks before the damage are listed
        self._bundled: dict[int, ChunkFile] = {}
        files: dict[int, ChunkFile] = {}
        for name in sorted(self.names):
            if match := CHUNK_NAME.fullmatch(name):
                files[int(match[1])] = ChunkFile(int(match[1]), directory / name)
            elif match := BUNDLE_NAME.fullmatch(name):
                self._open_bundle(directory / name, int(match[1]), int(match[2]))
        self.copies += [chunk for index, chunk in self._bundled.items() if index in files]
        # A chunk file and its copy in a bundle are the same bytes; the file is cheaper to read.
        everything = self._bundled | files
        self.chunks = [everything[index] for index in sorted(everything)]

    @property
    def snapshots(self) -> list[int]:
        """The ids of those there are, oldest first."""
        return sorted(int(match[1]) for name in self.names if (match := SNAPSHOT_NAME.fullmatch(name)))

    def _open_bundle(self, path: Path, first: int, last: int) -> None:
        """Only the headers of its chunks are read."""
        self.bundles += 1
        try:
            if not path.is_file():
                raise ManifestIntegrityError("not a file", path=str(path), chunk_index=first)
            with open(path, "rb") as f:
                fd = f.fileno()
                header_at = partial(os.pread, fd, CHUNK_HEADER_LEN)
                for index, start, length in split_bundle(os.fstat(fd).st_size, header_at, first, last, path=str(path)):
                    other = self._bundled.setdefault(index, ChunkFile(index, path, start, length))
                    if other.path != path:
                        self.copies.append(ChunkFile(index, path, start, length))
                        what = f"also in {other.path.name}"
                        self.errors.append((path, ManifestIntegrityError(what, path=str(path), chunk_index=index)))
        except (Aof2Error, OSError) as e:
            self.errors.append((path, e))


class Stream:
    """The chunks of one folder in order. Indexes may start anywhere but have no holes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        folder = Folder(directory)
        for _, error in folder.errors:
            raise error
        self.chunks = folder.chunks

    def read(self, position: LogPosition | None = None) -> Iterator[Chunk]:
        """Verified chunks from the one at `position` on. Raises at the first that is damaged or missing."""
        wanted = [c for c in self.chunks if position is None or c.index >= position.chunk_index]
        if position is not None and (not wanted or wanted[0].index != position.chunk_index):
            self._explain_missing(position)
        expected: tuple[int, int] | None = None
        for i, where in enumerate(wanted):
            if expected and where.index != expected[0]:
                raise ManifestGapError("chunk is missing", path=str(self.directory), chunk_index=expected[0])
            last = i == len(wanted) - 1
            chunk = parse_chunk(where.read(), path=str(where.path), last=last, expect_index=where.index)
            if chunk is None:
                return
            if expected and chunk.header.base_record != expected[1]:
                raise ManifestIntegrityError(
                    f"starts at record {chunk.header.base_record}, the one before ends at {expected[1]}",
                    path=str(where.path),
                    chunk_index=where.index,
                    offset=24,
                )
            yield chunk
            expected = (where.index + 1, chunk.end_position.ordinal)

    def _explain_missing(self, position: LogPosition) -> None:
        """A position at the start of a chunk that nothing was written to yet is the log's end; else there is a hole."""
        after_end = not self.chunks or self.chunks[-1].index < position.chunk_index
        if not after_end or position.chunk_offset > CHUNK_HEADER_LEN:
            raise ManifestGapError("chunk is missing", path=str(self.directory), chunk_index=position.chunk_index)

    def records(self, position: LogPosition | None = None) -> Iterator[Record]:
        for chunk in self.read(position):
            yield from chunk.records(chunk.goes_on_at(position))


def chunk_headers(directory: Path) -> list[tuple[ChunkFile, ChunkHeader]]:
    """The chunk files of the folder in order (parts of bundles left out)."""
    found = []
    for chunk in Stream(directory).chunks:
        if chunk.length is None:
            with contextlib.suppress(FileNotFoundError):
                head = read_file(chunk.path, length=CHUNK_HEADER_LEN)
                if any(head):
                    found.append((chunk, unpack_chunk_header(head, path=str(chunk.path))))
    return found
