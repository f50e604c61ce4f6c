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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from aof2 import native
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.manifest.format import (
    CHUNK_HEADER_LEN,
    TYPE_COUNT,
    ChunkHeader,
    ManifestIntegrityError,
    pad8,
    unpack_chunk_header,
)
from aof2.engine.manifest.reader import Chunk, ChunkFile, Folder, parse_chunk

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


class Survey(Folder):
    """The folder, with what is wrong with its bundles."""

    @property
    def damage(self) -> list[Finding]:
        return [finding_of(error, Kind.BUNDLE, path) for path, error in self.errors]


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


def survey(directory: Path) -> Survey:
    return Survey(directory)


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


def _salvage(data: bytes, where: ChunkFile, *, commits_only: bool = False) -> tuple[ChunkHeader | None, Chunk | None]:
    """The header of a damaged chunk, and the chunk as far as it can be trusted."""
    try:
        header = unpack_chunk_header(data, path=str(where.path))
    except Aof2Error:
        return None, None
    if header.chunk_index != where.index:
        return None, None
    limit = header.committed_len if CHUNK_HEADER_LEN <= header.committed_len <= len(data) else len(data)
    scan = native.manifest_scan(data, CHUNK_HEADER_LEN, limit)
    placed = scan.fault in _PLACED and not commits_only
    count, end = (len(scan.rows.offset), scan.pos) if placed else (scan.marker_count, scan.marker_end)
    rows = native.ManifestRows(*(column[:count] for column in scan.rows))
    marker = scan.marker_count
    if marker and scan.rows.logical_offset[marker - 1] != header.base_record + marker - 1:
        return header, None  # base_record is what is damaged: the ordinals would be wrong
    if any(flags and kind < TYPE_COUNT for flags, kind in zip(rows.flags, rows.type, strict=True)):
        return header, None  # written by a newer AOF2: its records may mean something else
    return header, Chunk(str(where.path), header, data, rows, count, end, len(data) - end)


def committed_part(where: ChunkFile) -> Chunk | None:
    """The whole commits before the damage of a chunk; None where its header cannot be trusted or there is none."""
    try:
        _, part = _salvage(where.read(), where, commits_only=True)
    except (Aof2Error, OSError):
        return None
    return part if part is not None and part.count else None
