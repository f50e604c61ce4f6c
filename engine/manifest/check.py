"""Checking a stream's folder: `examine` reads it however damaged it is, `check` says everything that is wrong with it.

`reader.Stream` stops at the first damage, as replay must. This is the other half: a damaged chunk is described, what
can still be trusted of it is given out, and the next one is read. Tests, `manifest inspect` and `manifest verify` share
it.

Invariants
- Read-only, and without a lock beyond the one around chunk headers: the log may be written meanwhile. A folder that
  changed while it was found damaged is looked at again, so that retention at work is not taken for a hole.
- Of a damaged chunk only records before the damage are given out; where the damage cannot be placed (a commit whose
  checksum fails though each payload's holds), only those of the commits before it.
- One chunk is in memory at a time, and one folded state for each replay that is compared.

Owner: the calling thread. A crash leaves nothing.
"""

from __future__ import annotations

import bisect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from aof2 import native
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.manifest import retention
from aof2.engine.manifest.format import (
    BUNDLE_NAME,
    CHUNK_HEADER_LEN,
    CHUNK_NAME,
    SNAPSHOT_NAME,
    TYPE_COUNT,
    ChunkFlag,
    ChunkHeader,
    LogPosition,
    ManifestIntegrityError,
    RecordType,
    pad8,
    unpack_chunk_header,
)
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.quarantine import Quarantine, read_quarantine
from aof2.engine.manifest.reader import Chunk, ChunkFile, parse_chunk, read_file
from aof2.engine.manifest.snapshot import load_snapshot, snapshot_name

ATTEMPTS_MAX: Final = 3
# Older snapshots are checksummed and placed in the log, but not replayed from.
SNAPSHOTS_REPLAYED: Final = retention.SNAPSHOTS_KEPT

# Faults that are in the very record the scan stopped at. A failed marker only says "somewhere in this commit".
_PLACED: Final = frozenset(native.Fault) - {native.Fault.NONE, native.Fault.MARKER}

Progress = Callable[[int, int], None]
"""Called with (chunks done, chunks in all)."""


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
    INCOMPLETE_EVENT = "incomplete_event"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to say about the folder. `message` is a whole line: where and what."""

    kind: Kind
    message: str
    chunk_index: int | None = None
    segment_id: int | None = None
    offset: int | None = None


class CheckReport(msgspec.Struct, kw_only=True):
    """What `check` found. `damage` empty means clean; `notes` are no damage."""

    directory: str
    clean: bool = True
    chunks: int = 0
    bundles: int = 0
    snapshots: int = 0
    records: int = 0
    bytes: int = 0
    first_chunk: int | None = None
    last_chunk: int | None = None
    next_ordinal: int = 0
    sealed_chunks: int = 0
    uploaded_chunks: int = 0
    torn_bytes: int = 0
    types: dict[str, int] = {}
    unknown_types: dict[int, int] = {}
    incomplete_events: int = 0
    replay_ok: bool = False
    replayed_snapshot_id: int | None = None
    segments: int = 0
    pending_uploads: int = 0
    pending_deletes: int = 0
    needs_repair: int = 0
    quarantine: Quarantine | None = None
    damage: list[Finding] = []
    notes: list[Finding] = []


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
        return chunks, [_finding(e, Kind.BUNDLE, path)]
    return chunks, []


def _bundle_error(what: str, path: Path, index: int, offset: int) -> ManifestIntegrityError:
    return ManifestIntegrityError(what, path=str(path), chunk_index=index, offset=offset)


def _finding(error: Aof2Error | OSError, kind: Kind, path: Path) -> Finding:
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
        data = _read(where)
        chunk = parse_chunk(data, path=path, last=last, expect_index=where.index)
    except FileNotFoundError:
        raise
    except (Aof2Error, OSError) as e:
        header, part = _salvage(data, where)
        kind = Kind.CHUNK if where.length is None else Kind.BUNDLE
        return Examined(where, header, part, damage=_finding(e, kind, where.path))
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


def _read(where: ChunkFile) -> bytes:
    """The chunk's bytes; of a bundle only this part, which never changes and so needs no lock."""
    if where.length is None:
        return read_file(where.path)
    with open(where.path, "rb") as f:
        f.seek(where.start)
        return f.read(where.length)


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


def check(directory: Path, *, on_progress: Progress | None = None) -> CheckReport:
    """Every checksum, the order of chunks and records, what retention promises, and whether replay works.

    Raises OSError only where the folder itself cannot be listed.
    """
    for _ in range(ATTEMPTS_MAX):
        checker = _Checker(directory, on_progress)
        report = checker.run()
        if report.clean or survey(directory).names == checker.found.names:
            break
    return report


class _SnapshotMark(NamedTuple):
    snapshot_id: int
    position: LogPosition


class _Fold:
    """One replay under way, from the log's start or from a snapshot; over at the first thing that stops a replay."""

    def __init__(self, index: ManifestIndex, start: LogPosition, snapshot_id: int | None) -> None:
        self.index = index
        self.snapshot_id = snapshot_id
        self.ok = True
        self._start: LogPosition | None = start
        self.next_chunk = start.chunk_index

    def feed(self, chunk: Chunk) -> bool:
        """Whether the chunk's records were folded in. Raises ManifestIntegrityError where they cannot be."""
        if not self.ok or chunk.index < self.next_chunk:
            return False
        offset = self._start.chunk_offset if self._start else CHUNK_HEADER_LEN
        self.ok = chunk.index == self.next_chunk
        if not self.ok:
            return False
        self.ok = False
        self.index.apply_chunk(chunk, offset)
        self.ok = True
        self._start = None
        self.next_chunk += 1
        return offset == CHUNK_HEADER_LEN


class _Checker:
    """One look at a folder."""

    def __init__(self, directory: Path, on_progress: Progress | None) -> None:
        self.directory = directory
        self.found = survey(directory)
        self.report = CheckReport(directory=str(directory), types={}, unknown_types={}, damage=[], notes=[])
        self._on_progress = on_progress
        self._types: Counter[int] = Counter()
        self._headers: list[ChunkHeader] = []
        self._marks: list[_SnapshotMark] = []
        self._folds: list[_Fold] = []
        self._full: _Fold | None = None
        self._end: LogPosition | None = None
        self._unplaced: set[int] = set()

    def run(self) -> CheckReport:
        report = self.report
        report.chunks, report.bundles = len(self.found.chunks), self.found.bundles
        report.snapshots = len(self.found.snapshots)
        for finding in self.found.damage:
            self._damage(finding)
        self._load_snapshots()
        for done, examined in enumerate(examine(self.found), 1):
            self._take(examined)
            if self._on_progress:
                self._on_progress(done, report.chunks)
        self._check_copies()
        self._check_retention()
        self._check_snapshots()
        self._conclude()
        return report

    def _damage(self, finding: Finding) -> None:
        if finding not in self.report.damage:
            self.report.damage.append(finding)

    def _load_snapshots(self) -> None:
        for snapshot_id in reversed(self.found.snapshots):
            try:
                snapshot = load_snapshot(self.directory, snapshot_id)
            except (Aof2Error, OSError) as e:
                self._damage(_finding(e, Kind.SNAPSHOT, self.directory / snapshot_name(snapshot_id)))
                continue
            self._marks.append(_SnapshotMark(snapshot_id, snapshot.position))
            if len(self._folds) < SNAPSHOTS_REPLAYED:
                self._folds.append(_Fold(snapshot.index, snapshot.position, snapshot_id))

    def _take(self, examined: Examined) -> None:
        index = examined.where.index
        # An unreadable header is damage already; for retention's rules the chunk is there.
        self._headers.append(examined.header or ChunkHeader(index, 0, flags=int(ChunkFlag.SEALED)))
        for finding in (examined.gap, examined.damage):
            if finding:
                self._damage(finding)
        if examined.note:
            self.report.notes.append(examined.note)
        chunk = examined.chunk
        if chunk is None or not examined.whole:
            if examined.damage:
                self._unplaced.add(index)
                self._end = None
            return
        self._count(chunk, examined)
        if self._full is None and not self.report.records and chunk.header.base_record == 0:
            self._full = _Fold(ManifestIndex(), LogPosition(index, CHUNK_HEADER_LEN, 0), None)
        self.report.records += chunk.count
        self._replay(chunk)
        self._place_snapshots(chunk)
        self._end = chunk.end_position

    def _count(self, chunk: Chunk, examined: Examined) -> None:
        self.report.bytes += chunk.end
        self.report.sealed_chunks += chunk.header.sealed
        self.report.uploaded_chunks += chunk.header.uploaded
        self.report.torn_bytes += examined.torn_bytes
        self._types.update(chunk.rows.type.tolist())

    def _replay(self, chunk: Chunk) -> None:
        path = Path(chunk.path)
        decoded = False
        for fold in [*self._folds, *([self._full] if self._full else [])]:
            try:
                decoded |= fold.feed(chunk)
            except ManifestIntegrityError as e:
                decoded = True
                self._damage(_finding(e, Kind.REPLAY, path))
        if decoded:
            return
        try:
            for record in chunk.records():
                if record.known:
                    record.decoded()
        except ManifestIntegrityError as e:
            error = ManifestIntegrityError(e.what, path=chunk.path, offset=e.offset)
            self._damage(_finding(error, Kind.CHUNK, path))

    def _place_snapshots(self, chunk: Chunk) -> None:
        for mark in self._marks:
            position = mark.position
            if position.chunk_index != chunk.index:
                continue
            row = bisect.bisect_left(chunk.rows.offset, position.chunk_offset)
            starts = chunk.rows.offset[row] if row < chunk.count else chunk.end
            ordinal = chunk.header.base_record + row
            if starts != position.chunk_offset:
                self._misplaced(mark, "where no record starts")
            elif ordinal != position.ordinal:
                self._misplaced(mark, f"and says record {position.ordinal}, which is {ordinal} there")

    def _misplaced(self, mark: _SnapshotMark, how: str) -> None:
        position = mark.position
        path = self.directory / snapshot_name(mark.snapshot_id)
        message = f"{path}: points at chunk {position.chunk_index} byte {position.chunk_offset}, {how}"
        finding = Finding(
            kind=Kind.SNAPSHOT, message=message, chunk_index=position.chunk_index, offset=position.chunk_offset
        )
        self._damage(finding)

    def _check_copies(self) -> None:
        """Bundled copies of chunks that are also files: checked like them, and the same bytes."""
        headers = {header.chunk_index: header for header in self._headers}
        for where in self.found.copies:
            try:
                copy = parse_chunk(_read(where), path=str(where.path), last=False, expect_index=where.index)
            except FileNotFoundError:
                continue
            except (Aof2Error, OSError) as e:
                self._damage(_finding(e, Kind.BUNDLE, where.path))
                continue
            header = headers.get(where.index)
            same = header is None or copy is None or header[:5] == copy.header[:5]
            if not same and where.index not in self._unplaced:
                message = f"{where.path}: chunk {where.index} is not the same as the file {where.index}.mlog"
                self._damage(Finding(kind=Kind.BUNDLE, message=message, chunk_index=where.index))

    def _check_retention(self) -> None:
        covered = self._marks[0].position if self._marks else None
        for what in retention.violations(self._headers, 0, covered):
            if not what.endswith("are missing"):  # told already, as a gap
                self._damage(Finding(kind=Kind.RETENTION, message=f"{self.directory}: {what}"))

    def _check_snapshots(self) -> None:
        """Places past the end of the log, and older snapshots that the log no longer reaches back to."""
        first = self._headers[0].chunk_index if self._headers else None
        last = self._headers[-1].chunk_index if self._headers else -1
        for i, mark in enumerate(self._marks):
            position = mark.position
            next_chunk = self._end is not None and position == (self._end.chunk_index + 1, 64, self._end.ordinal)
            if next_chunk or position == (0, CHUNK_HEADER_LEN, 0):
                continue
            unreached = first is not None and position.chunk_index < first
            if unreached and i > 0:
                message = (
                    f"{self.directory / snapshot_name(mark.snapshot_id)}: the log starts after it; a newer one is used"
                )
                self.report.notes.append(Finding(kind=Kind.SNAPSHOT, message=message))
            elif self._past_end(position, last):
                self._misplaced(mark, "which is past the end of the log")

    def _past_end(self, position: LogPosition, last: int) -> bool:
        if position.chunk_index > last:
            return True
        # The last chunk may be there without a whole commit in it.
        return self._end is not None and position.chunk_index > self._end.chunk_index

    def _conclude(self) -> None:
        report = self.report
        self._compare()
        best = next((f for f in [*self._folds, self._full] if f and self._reached_end(f)), None)
        report.replay_ok = best is not None or not self.found.chunks
        if best:
            index = best.index
            report.replayed_snapshot_id = best.snapshot_id
            report.segments = len(index.entries)
            report.pending_uploads, report.pending_deletes = len(index.pending_uploads), len(index.pending_deletes)
            report.needs_repair = len(index.needs_repair)
        longest = self._full or best
        report.incomplete_events = longest.index.incomplete_events if longest else 0
        if self._headers:
            report.first_chunk, report.last_chunk = self._headers[0].chunk_index, self._headers[-1].chunk_index
        report.next_ordinal = self._end.ordinal if self._end else 0
        for kind, count in sorted(self._types.items()):
            known = kind < TYPE_COUNT
            report.types[RecordType(kind).label if known else f"Unknown{kind}"] = count
            if not known:
                report.unknown_types[kind] = count
        report.quarantine = read_quarantine(self.directory)
        self._note()
        report.clean = not report.damage

    def _reached_end(self, fold: _Fold) -> bool:
        return fold.ok and self._end is not None and fold.next_chunk == self._end.chunk_index + 1

    def _compare(self) -> None:
        """A replay from a snapshot must come to the same state as one from the start."""
        full = self._full
        if full is None or not self._reached_end(full):
            return
        for fold in self._folds:
            if self._reached_end(fold) and not fold.index.same_state(full.index):
                ours, theirs = fold.index.entries, full.index.entries
                differ = sum(ours.get(s) != theirs.get(s) for s in ours.keys() | theirs.keys())
                path = self.directory / snapshot_name(fold.snapshot_id or 0)
                message = f"{path}: replay from it and from the start of the log disagree, on {differ} segment(s)"
                self._damage(Finding(kind=Kind.SNAPSHOT, message=message))

    def _note(self) -> None:
        report, directory = self.report, self.directory
        notes: list[tuple[Kind, str]] = []
        if not self.found.chunks:
            notes.append((Kind.EMPTY, "no manifest chunks here; a stream's folder holds files such as 0.mlog"))
        for kind, count in report.unknown_types.items():
            notes.append((Kind.UNKNOWN_TYPE, f"{count} record(s) of type {kind}, which this version skips"))
        if report.incomplete_events:
            notes.append((Kind.INCOMPLETE_EVENT, f"{report.incomplete_events} event(s) without their last part"))
        if report.quarantine:
            notes.append((Kind.QUARANTINE, f"quarantined: {report.quarantine.what}"))
        report.notes += [Finding(kind=kind, message=f"{directory}: {what}") for kind, what in notes]
