"""Reading a stream's folder however damaged it is.

`reader.Stream` stops at the first damage, as replay must. This is the other half: a damaged chunk is described, what
can still be trusted of it is given out, and the next one is read. `manifest inspect` shows it, `check` concludes.

Invariants
- Read-only, and without a lock beyond the one around chunk headers: the log may be written meanwhile.
- Of a damaged chunk only records before the damage are given out; where the damage cannot be placed (a commit whose
  checksum fails though each payload's holds), only those of the commits before it.
- One chunk is in memory at a time.

Owner: the calling thread. A crash leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from aof2 import native
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.manifest.format import (
    BUNDLE_NAME,
    CHUNK_HEADER_LEN,
    CHUNK_NAME,
    SNAPSHOT_NAME,
    TYPE_COUNT,
    ChunkHeader,
    ManifestIntegrityError,
    pad8,
    unpack_chunk_header,
)
from aof2.engine.manifest.reader import Chunk, ChunkFile, parse_chunk

# Faults that are in the very record the scan stopped at. A failed marker only says "somewhere in this commit".
_PLACED: Final = frozenset(native.Fault) - {native.Fault.NONE, native.Fault.MARKER}


class Kind(StrEnum):
    """What a finding is about. Scripts see these names: they stay."""

    CHUNK = "chunk"
    GAP = "gap"
    BUNDLE = "bundle"
    SNAPSHOT = "snapshot"
    RETENTION = "retention"
    REPLAY = "replay"
    UNREADABLE = "unreadable"
    UNSUPPORTED = "unsupported"
    # The rest are notes.
    TORN = "torn"
    EMPTY = "empty"
    QUARANTINE = "quarantine"
    UNKNOWN_TYPE = "unknown_type"
    UNKNOWN_EVENT = "unknown_event"
    INCOMPLETE_EVENT = "incomplete_event"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to say about the folder. `message` is a whole line: where and what."""

    kind: Kind
    message: str
    chunk_index: int | None = None
    segment_id: int | None = None
    offset: int | None = None


class Survey(NamedTuple):
    """What a folder holds by name. `copies` are bundled chunks that are also files of their own."""

    names: frozenset[str]
    chunks: list[ChunkFile]
    copies: list[ChunkFile]
    bundles: int
    snapshots: list[int]
    damage: list[Finding]


@dataclass(frozen=True, slots=True)
class Examined:
    """One chunk as far as it can be trusted. In the order of telling: `gap`, the records of `chunk`, `damage`, `note`.

    `header` is None where it could not be read. `whole` is False when `chunk` is only the part before the damage.
    """

    where: ChunkFile
    header: ChunkHeader | None = None
    chunk: Chunk | None = None
    whole: bool = False
    torn_bytes: int = 0
    gap: Finding | None = None
    damage: Finding | None = None
    note: Finding | None = None


# -- the folder --------------------------------------------------------------------------------------------------


def survey(directory: Path) -> Survey:
    """Lists the folder once; bundles are opened up, damaged ones as far as their chunk headers lead."""
    names = frozenset(os.listdir(directory))  # noqa: PTH208
    files: dict[int, ChunkFile] = {}
    bundled: dict[int, ChunkFile] = {}
    copies: list[ChunkFile] = []
    damage: list[Finding] = []
    bundles = 0
    for name in sorted(names):
        path = directory / name
        if match := CHUNK_NAME.fullmatch(name):
            files[int(match[1])] = ChunkFile(int(match[1]), path)
        elif match := BUNDLE_NAME.fullmatch(name):
            bundles += 1
            chunks, found = _open_bundle(path, int(match[1]), int(match[2]))
            damage += found
            for chunk in chunks:
                if chunk.index in bundled:
                    message = f"{path}: chunk {chunk.index} is also in {bundled[chunk.index].path.name}"
                    damage.append(Finding(kind=Kind.BUNDLE, message=message, chunk_index=chunk.index))
                    copies.append(chunk)
                else:
                    bundled[chunk.index] = chunk
    copies += [chunk for index, chunk in bundled.items() if index in files]
    snapshots = sorted(int(match[1]) for name in names if (match := SNAPSHOT_NAME.fullmatch(name)))
    everything = bundled | files
    return Survey(names, [everything[i] for i in sorted(everything)], copies, bundles, snapshots, damage)


def _open_bundle(path: Path, first: int, last: int) -> tuple[list[ChunkFile], list[Finding]]:
    chunks: list[ChunkFile] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            pos, index = 0, first
            while pos < size:
                header = unpack_chunk_header(os.pread(fd, CHUNK_HEADER_LEN, pos), path=str(path))
                length = header.committed_len
                if header.chunk_index != index or index > last:
                    raise _bundle_error(f"holds chunk {header.chunk_index} where {index} belongs", path, index, pos)
                if not header.sealed or length < CHUNK_HEADER_LEN or pos + length > size:
                    raise _bundle_error("a bundle holds whole sealed chunks only", path, index, pos)
                chunks.append(ChunkFile(index, path, pos, length))
                pos, index = pos + length, index + 1
            if index <= last:
                raise _bundle_error(f"ends before chunk {last}, which its name promises", path, index, size)
        finally:
            os.close(fd)
    except (Aof2Error, OSError) as e:
        return chunks, [finding_of(e, Kind.BUNDLE, path)]
    return chunks, []


def _bundle_error(what: str, path: Path, index: int, offset: int) -> ManifestIntegrityError:
    return ManifestIntegrityError(what, path=str(path), chunk_index=index, offset=offset)


def finding_of(error: Aof2Error | OSError, kind: Kind, path: Path) -> Finding:
    if isinstance(error, OSError):
        return Finding(kind=Kind.UNREADABLE, message=f"{path}: {error.strerror or error}")
    if isinstance(error, UnsupportedError):
        return Finding(kind=Kind.UNSUPPORTED, message=str(error))
    if isinstance(error, ManifestIntegrityError):
        return Finding(
            kind=kind,
            message=str(error),
            chunk_index=error.chunk_index,
            segment_id=error.segment_id,
            offset=error.offset,
        )
    return Finding(kind=kind, message=str(error), offset=error.offset if isinstance(error, CorruptError) else None)


# -- chunks ------------------------------------------------------------------------------------------------------


def examine(found: Survey, from_chunk: int = 0) -> Iterator[Examined]:
    """Every chunk from `from_chunk` on, damaged or not. Chunks that retention removes meanwhile are passed over."""
    wanted = [c for c in found.chunks if c.index >= from_chunk]
    expected_index = from_chunk if len(wanted) < len(found.chunks) else None
    expected_ordinal: int | None = None
    for i, where in enumerate(wanted):
        try:
            examined = _examine_one(where, last=i == len(wanted) - 1)
        except FileNotFoundError:
            expected_index = expected_ordinal = None
            continue
        gap = _gap(where, expected_index)
        if gap is not None:
            expected_ordinal = None
        damage = examined.damage or _disorder(examined, expected_ordinal)
        yield replace(examined, gap=gap, damage=damage)
        expected_index = where.index + 1
        expected_ordinal = examined.chunk.end_position.ordinal if examined.chunk and examined.whole else None


def _gap(where: ChunkFile, expected_index: int | None) -> Finding | None:
    if expected_index is None or where.index == expected_index:
        return None
    last = where.index - 1
    which = f"chunk {last} is" if last == expected_index else f"chunks {expected_index} to {last} are"
    message = f"{where.path.parent}: {which} missing"
    return Finding(kind=Kind.GAP, message=message, chunk_index=expected_index)


def _disorder(examined: Examined, expected_ordinal: int | None) -> Finding | None:
    if examined.header is None or expected_ordinal is None or examined.header.base_record == expected_ordinal:
        return None
    what = f"starts at record {examined.header.base_record}, the one before ends at {expected_ordinal}"
    index, path = examined.where.index, examined.where.path
    return Finding(kind=Kind.CHUNK, message=f"{path}: chunk {index}: {what}", chunk_index=index, offset=24)


def _examine_one(where: ChunkFile, *, last: bool) -> Examined:
    path = str(where.path)
    data = b""
    try:
        data = where.read()
        chunk = parse_chunk(data, path=path, last=last, expect_index=where.index)
    except FileNotFoundError:
        raise
    except (Aof2Error, OSError) as e:
        header, part = _salvage(data, where)
        kind = Kind.CHUNK if where.length is None else Kind.BUNDLE
        return Examined(where, header, part, damage=finding_of(e, kind, where.path))
    if chunk is None:
        message = f"{path}: chunk {where.index} holds no whole commit yet; it is not part of the log"
        return Examined(where, note=Finding(kind=Kind.EMPTY, message=message, chunk_index=where.index))
    if chunk.header.sealed and chunk.header.tail_offset != chunk.end:
        message = f"{path}: chunk {where.index}: sealed, but its tail_offset {chunk.header.tail_offset} is not its end"
        damage = Finding(kind=Kind.CHUNK, message=message, chunk_index=where.index, offset=32)
        return Examined(where, chunk.header, chunk, damage=damage)
    torn = _torn_bytes(data, chunk.end)
    note = None
    if torn:
        message = f"{path}: chunk {where.index}: {torn} uncommitted bytes after byte {chunk.end} ignored"
        note = Finding(kind=Kind.TORN, message=message, chunk_index=where.index, offset=chunk.end)
    return Examined(where, chunk.header, chunk, whole=True, torn_bytes=torn, note=note)


def _torn_bytes(data: bytes, end: int) -> int:
    """What was written past the end of the log: whole records, then whatever is not the zeros of reserved space."""
    records_end = native.manifest_scan(data, end).pos
    written = len(data.rstrip(b"\0"))
    return max(records_end, min(len(data), pad8(written))) - end if written > end else 0


def _salvage(data: bytes, where: ChunkFile) -> tuple[ChunkHeader | None, Chunk | None]:
    """The header of a damaged chunk, and the chunk as far as it can be trusted."""
    try:
        header = unpack_chunk_header(data, path=str(where.path))
    except Aof2Error:
        return None, None
    if header.chunk_index != where.index:
        return None, None
    limit = header.committed_len if CHUNK_HEADER_LEN <= header.committed_len <= len(data) else len(data)
    scan = native.manifest_scan(data, CHUNK_HEADER_LEN, limit)
    placed = scan.fault in _PLACED
    count, end = (len(scan.rows.offset), scan.pos) if placed else (scan.marker_count, scan.marker_end)
    rows = native.ManifestRows(*(column[:count] for column in scan.rows))
    marker = scan.marker_count
    if marker and scan.rows.logical_offset[marker - 1] != header.base_record + marker - 1:
        return header, None  # base_record is what is damaged: the ordinals would be wrong
    if any(flags and kind < TYPE_COUNT for flags, kind in zip(rows.flags, rows.type, strict=True)):
        return header, None  # written by a newer AOF2: its records may mean something else
    return header, Chunk(str(where.path), header, data, rows, count, end, 0, len(data) - end)


# -- the whole of it ---------------------------------------------------------------------------------------------
