"""Checking a stream's folder: `check` says everything that is wrong with it, in one pass.

Every checksum, the order of chunks and records, bundles against their chunks, snapshots against the log, replay from
snapshots against replay of everything, and what retention promises to keep. Tests and `manifest verify` share it.

Invariants
- Read-only. A folder that changed while it was found damaged is looked at again, so that retention at work is not taken
  for a hole.
- One chunk is in memory at a time, and one folded state for each replay that is compared.

Owner: the calling thread. A crash leaves nothing.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.errors import Aof2Error
from aof2.engine.manifest import format as fmt
from aof2.engine.manifest import retention
from aof2.engine.manifest.examine import Examined, Finding, Kind, examine, finding_of, survey
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.quarantine import Quarantine, read_quarantine
from aof2.engine.manifest.reader import Chunk, parse_chunk
from aof2.engine.manifest.snapshot import load_snapshot, snapshot_name

ATTEMPTS_MAX: Final = 3
# Older snapshots are checksummed and placed in the log, but not replayed from.
SNAPSHOTS_REPLAYED: Final = retention.SNAPSHOTS_KEPT

Progress = Callable[[int, int], None]
"""Called with (chunks done, chunks in all)."""


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
    unknown_schemas: dict[int, int] = {}
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


class _Fold:
    """One replay under way, from the log's start or from a snapshot; over at the first thing that stops a replay."""

    def __init__(self, index: ManifestIndex, start: fmt.LogPosition, snapshot_id: int | None) -> None:
        self.index = index
        self.snapshot_id = snapshot_id
        self.ok = True
        self.next_chunk, self._offset = start.chunk_index, start.chunk_offset

    def feed(self, chunk: Chunk) -> bool:
        """Whether all of the chunk's records were folded in. Raises ManifestIntegrityError where they cannot be."""
        if not self.ok or chunk.index < self.next_chunk:
            return False
        self.ok = False
        if chunk.index != self.next_chunk:
            return False
        self.index.apply_chunk(chunk, self._offset)
        whole = self._offset == fmt.CHUNK_HEADER_LEN
        self.ok = True
        self.next_chunk, self._offset = chunk.index + 1, fmt.CHUNK_HEADER_LEN
        return whole


class _Checker:
    """One look at a folder."""

    def __init__(self, directory: Path, on_progress: Progress | None) -> None:
        self.directory = directory
        self.found = survey(directory)
        self.report = CheckReport(directory=str(directory))
        self._on_progress = on_progress
        self._types: Counter[int] = Counter()
        self._headers: list[fmt.ChunkHeader] = []
        self._marks: list[tuple[int, fmt.LogPosition]] = []  # snapshots that can be read, the newest first
        self._folds: list[_Fold] = []
        self._full: _Fold | None = None
        self._end: fmt.LogPosition | None = None
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
                self._damage(finding_of(e, Kind.SNAPSHOT, self.directory / snapshot_name(snapshot_id)))
                continue
            self._marks.append((snapshot_id, snapshot.position))
            if len(self._folds) < SNAPSHOTS_REPLAYED:
                self._folds.append(_Fold(snapshot.index, snapshot.position, snapshot_id))

    def _take(self, examined: Examined) -> None:
        index = examined.where.index
        # An unreadable header is damage already; for retention's rules the chunk is there.
        self._headers.append(examined.header or fmt.ChunkHeader(index, 0, flags=int(fmt.ChunkFlag.SEALED)))
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
        self.report.bytes += chunk.end
        self.report.sealed_chunks += chunk.header.sealed
        self.report.uploaded_chunks += chunk.header.uploaded
        self.report.torn_bytes += examined.torn_bytes
        self._types.update(chunk.rows.type.tolist())
        if self._full is None and not self.report.records and chunk.header.base_record == 0:
            self._full = _Fold(ManifestIndex(), fmt.LogPosition(index, fmt.CHUNK_HEADER_LEN, 0), None)
        self.report.records += chunk.count
        self._replay(chunk)
        self._place_snapshots(chunk)
        self._end = chunk.end_position

    def _replay(self, chunk: Chunk) -> None:
        path = Path(chunk.path)
        decoded = False
        for fold in [*self._folds, *([self._full] if self._full else [])]:
            try:
                decoded |= fold.feed(chunk)
            except fmt.ManifestIntegrityError as e:
                decoded = True
                self._damage(finding_of(e, Kind.REPLAY, path))
        if decoded:
            return
        try:
            for record in chunk.records():
                if record.known:
                    record.decoded()
        except fmt.ManifestIntegrityError as e:
            error = fmt.ManifestIntegrityError(e.what, path=chunk.path, offset=e.offset)
            self._damage(finding_of(error, Kind.CHUNK, path))

    def _place_snapshots(self, chunk: Chunk) -> None:
        for snapshot_id, position in self._marks:
            if position.chunk_index != chunk.index:
                continue
            row = bisect.bisect_left(chunk.rows.offset, position.chunk_offset)
            starts = chunk.rows.offset[row] if row < chunk.count else chunk.end
            ordinal = chunk.header.base_record + row
            if starts != position.chunk_offset:
                self._misplaced(snapshot_id, position, "where no record starts")
            elif ordinal != position.ordinal:
                what = f"and says record {position.ordinal}, which is {ordinal} there"
                self._misplaced(snapshot_id, position, what)

    def _misplaced(self, snapshot_id: int, position: fmt.LogPosition, how: str) -> None:
        index, offset, _ = position
        message = f"{self.directory / snapshot_name(snapshot_id)}: points at chunk {index} byte {offset}, {how}"
        self._damage(Finding(kind=Kind.SNAPSHOT, message=message, chunk_index=index, offset=offset))

    def _check_copies(self) -> None:
        """Bundled copies of chunks that are also files: checked like them, and the same bytes."""
        headers = {header.chunk_index: header for header in self._headers}
        for where in self.found.copies:
            try:
                copy = parse_chunk(where.read(), path=str(where.path), last=False, expect_index=where.index)
            except FileNotFoundError:
                continue
            except (Aof2Error, OSError) as e:
                self._damage(finding_of(e, Kind.BUNDLE, where.path))
                continue
            header = headers.get(where.index)
            same = header is None or copy is None or header[:5] == copy.header[:5]
            if not same and where.index not in self._unplaced:
                message = f"{where.path}: chunk {where.index} is not the same as the file {where.index}.mlog"
                self._damage(Finding(kind=Kind.BUNDLE, message=message, chunk_index=where.index))

    def _check_retention(self) -> None:
        covered = self._marks[0][1] if self._marks else None
        for what in retention.violations(self._headers, covered):
            if not what.endswith("are missing"):  # told already, as a gap
                self._damage(Finding(kind=Kind.RETENTION, message=f"{self.directory}: {what}"))

    def _check_snapshots(self) -> None:
        """Places past the end of the log, and older snapshots that the log no longer reaches back to."""
        first = self._headers[0].chunk_index if self._headers else None
        last = self._headers[-1].chunk_index if self._headers else -1
        for i, (snapshot_id, position) in enumerate(self._marks):
            next_chunk = self._end is not None and position == (self._end.chunk_index + 1, 64, self._end.ordinal)
            starts_there = not self._headers and position.chunk_offset == fmt.CHUNK_HEADER_LEN  # as behind a hole
            if next_chunk or starts_there or position == (0, fmt.CHUNK_HEADER_LEN, 0):
                continue
            # The last chunk may be there without a whole commit in it.
            end = last if self._end is None else min(last, self._end.chunk_index)
            if i > 0 and first is not None and position.chunk_index < first:
                path = self.directory / snapshot_name(snapshot_id)
                message = f"{path}: the log starts after it; a newer one is used"
                self.report.notes.append(Finding(kind=Kind.SNAPSHOT, message=message))
            elif position.chunk_index > end:
                self._misplaced(snapshot_id, position, "which is past the end of the log")

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
        report.unknown_schemas = dict(longest.index.unknown_schemas) if longest else {}
        if self._headers:
            report.first_chunk, report.last_chunk = self._headers[0].chunk_index, self._headers[-1].chunk_index
        report.next_ordinal = self._end.ordinal if self._end else 0
        for kind, count in sorted(self._types.items()):
            known = kind < fmt.TYPE_COUNT
            report.types[fmt.RecordType(kind).label if known else f"Unknown{kind}"] = count
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
        for schema, count in report.unknown_schemas.items():
            notes.append((Kind.UNKNOWN_EVENT, f"{count} event(s) of schema {schema}, which this version skips"))
        if report.incomplete_events:
            notes.append((Kind.INCOMPLETE_EVENT, f"{report.incomplete_events} event(s) without their last part"))
        if report.quarantine:
            notes.append((Kind.QUARANTINE, f"quarantined: {report.quarantine.text}"))
        report.notes += [Finding(kind=kind, message=f"{directory}: {what}") for kind, what in notes]
