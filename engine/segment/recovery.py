"""recover_stream: what a stream's folder holds after a stop of any kind, with torn tails cut.

1. Read `current.sealed`. If the segment it names is there and agrees, only that one and newer files are opened.
   A missing, damaged or stale pointer is a warning and a slower start: header and footer of every file.
2. Sort the files: sealed, unsealed, damaged, and those without a header, which never held anything durable.
3. The newest file, if unsealed, is the active one: scanned, trimmed to its last whole record, synced. If instead the
   newest is sealed, it is scanned for where the payload ends (footers do not say), and so is a sealed segment before
   the pointer moves on to it: the pointer only ever names what was verified.
4. Move the pointer forward if the crash came between a seal and its publication.

Decisions
- An unsealed segment that is not the newest is reported in `unsealed`, with its end, and left as it is: writers seal
  before they flush into the next segment, so it takes a caller that does not, and only that caller knows whether to
  seal it (`trim`, then `SegmentWriter.reopen(…).seal`) or to distrust what came after.
- Without whole records there is no segment: such a file is removed, or put aside as `.torn` if records lie beyond the
  tear. A header that is neither whole nor all zeros is damage, since disks write sectors whole.
- A segment named by the pointer was sealed; without a whole footer it is damaged, not torn.
- Damage never stops the rest: the file is listed and left alone. Its header and footer still count if they are whole.
- v2 keeps no base counts and no watermark: a stream whose pointer names a v2 segment takes the slower start, and its
  watermark is the pointer's.

Invariants
- What was flushed is found; what is found is a prefix of what was appended.
- Recovering twice is the same as recovering once.

Owner: the thread that opens the stream, before anything else does.

What a crash leaves behind: a folder on which recovery starts again (repair.py has the steps).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.segment import model, repair, state
from aof2.engine.segment import pointer as pointers
from aof2.engine.segment.format import HEADER_BYTES_MAX, Pointer, Version
from aof2.engine.segment.pointer import NoPointer, load_pointer, store_pointer
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.scan import Tail

CRASH_POINTS: Final = (*repair.CRASH_POINTS, *pointers.CRASH_POINTS)

log = logging.getLogger(__name__)


def recover_stream(
    env: Env,
    directory: Path,
    *,
    stream_id: int | None = None,
    durable_hints: Mapping[int, int] | None = None,
    locate: Callable[[int], Path | None] | None = None,
    full: bool = False,
    expects: Collection[state.WarningKind] = (),
) -> state.StreamState:
    """Recovers the stream in `directory`.

    `stream_id`: files of another stream are damage. `durable_hints`: segment id → file offset up to which its records
    are known to be durable; a fault below it is damage, not a torn write. `locate`: where a sealed segment went that
    is no longer in the folder. `full`: open every file, whatever the pointer says. `expects`: what is nothing to warn
    of, because the caller's streams look so after any stop.
    """
    return _Recovery(env, directory, stream_id, durable_hints or {}, locate, full, expects).run()


@dataclass
class _Recovery:
    """One run of recovery: the lists it fills, and the steps that fill them."""

    env: Env
    directory: Path
    stream_id: int | None
    durable_hints: Mapping[int, int]
    locate: Callable[[int], Path | None] | None
    full: bool
    expects: Collection[state.WarningKind] = ()
    pointer: Pointer | NoPointer = NoPointer.MISSING
    agrees: bool = False  # the pointer's segment is there and tells the same
    older_ids: tuple[int, ...] = ()
    sealed: dict[int, model.SealedSegment] = field(default_factory=dict)
    footers: dict[int, model.SealedSegment] = field(default_factory=dict)  # the sealed, and those with damaged records
    unsealed: dict[int, model.ActiveSegment] = field(default_factory=dict)
    tails: dict[int, tuple[Tail, bytes]] = field(default_factory=dict)  # of the unsealed: and the records beyond a tear
    damaged: dict[int, model.DamagedSegment] = field(default_factory=dict)
    active: model.ActiveSegment | None = None
    recordless: dict[int, str] = field(default_factory=dict)  # files without a whole record: what is wrong with them
    warnings: list[state.RecoveryWarning] = field(default_factory=list)

    def run(self) -> state.StreamState:
        repair.sweep_temps(self.env, self.directory)
        ids = self._list()
        self.pointer = load_pointer(self.directory)
        for segment_id in self._start(ids):
            self._examine(segment_id)
        self._judge_recordless()
        self._check_hints(ids)
        self._choose_active()
        self._check_newest_sealed()
        self._move_pointer()
        return self._state(ids)

    # -- 1. the folder and its pointer

    def _list(self) -> list[int]:
        ids = []
        for path in sorted(self.directory.iterdir()):
            segment_id = model.parse_segment_name(path.name)
            if segment_id is not None:
                ids.append(segment_id)
            elif path.suffix == ".seg":
                self._warn(state.WarningKind.UNKNOWN_FILE, f"{path.name} is not the name of a segment; left alone")
        return sorted(ids)

    def _start(self, ids: list[int]) -> list[int]:
        """The segments to open: from the pointer's on if it can be trusted, else all."""
        if self.pointer in (NoPointer.DAMAGED, NoPointer.UNSUPPORTED):
            self._warn(state.WarningKind.POINTER_DAMAGED, f"current.sealed is {self.pointer}; every segment is opened")
        if not isinstance(self.pointer, Pointer):
            return ids
        named = self.pointer.segment_id
        self._examine(named)
        self.agrees = self._pointer_agrees(self.pointer)
        others = [i for i in ids if i != named]
        anchor = self.sealed.get(named)
        if self.full or not self.agrees or anchor is None or anchor.header.version == Version.V2:
            return others
        self.older_ids = tuple(i for i in others if i < named)
        return [i for i in others if i > named]

    def _pointer_agrees(self, pointer: Pointer) -> bool:
        segment = self.sealed.get(pointer.segment_id)
        if segment is None:
            reason = "is damaged" if pointer.segment_id in self.damaged else "is missing"
        elif segment.durable_bytes != pointer.durable_bytes:
            reason = f"ends at {segment.durable_bytes}, not at {pointer.durable_bytes}"
        elif segment.header.version != Version.V2 and segment.pointer != pointer:
            reason = "tells another watermark"
        else:
            return True
        message = f"current.sealed names segment {pointer.segment_id}, which {reason}; every segment is opened"
        self._warn(state.WarningKind.POINTER_STALE, message, pointer.segment_id)
        return False

    # -- 2. one file

    def _path(self, segment_id: int) -> Path | None:
        path = model.segment_path(self.directory, segment_id)
        if path.exists() or self.locate is None:
            return path if path.exists() else None
        return self.locate(segment_id)

    def _examine(self, segment_id: int) -> None:
        """Puts one file where it belongs. Only files that hold no records are changed here."""
        path = self._path(segment_id)
        if path is None:
            return
        try:
            if self._headless(path, segment_id):
                self.recordless[segment_id] = "its header is lost"
            else:
                self._open(path, segment_id)
        except (CorruptError, UnsupportedError) as e:
            self._damage(path, segment_id, e)
        except OSError as e:
            self._damage(path, segment_id, CorruptError(f"cannot be read ({e.strerror})", path=str(path)))

    def _headless(self, path: Path, segment_id: int) -> bool:
        """Its header never reached the disk: nothing or zeros where it belongs. Not so for what the pointer or a hint
        says was durable. A crash leaves no part of a header: the file takes its reserve before its first byte."""
        if self.durable_hints.get(segment_id, 0) or self._named_sealed(segment_id):
            return False
        with path.open("rb") as f:
            return not any(f.read(HEADER_BYTES_MAX))

    def _named_sealed(self, segment_id: int) -> bool:
        return isinstance(self.pointer, Pointer) and self.pointer.segment_id == segment_id

    def _judge_recordless(self) -> None:
        """Files without a record are what a crash leaves at the end of a stream; before a sealed one they are damage,
        because a segment is sealed, durably, before the next one is flushed into."""
        newest_sealed = max(self.footers, default=-1)
        for segment_id, why in self.recordless.items():
            path = model.segment_path(self.directory, segment_id)
            if segment_id < newest_sealed:
                self._damage(path, segment_id, CorruptError(f"{why}, though newer segments are sealed", path=str(path)))
            elif any(path.read_bytes()):
                self._put_aside(path, segment_id, why, path.stat().st_size)
            else:
                repair.remove(self.env, path)

    def _put_aside(self, path: Path, segment_id: int, why: str, size_bytes: int) -> None:
        kept = repair.put_aside(self.env, path)
        message = f"segment {segment_id}: {why}; {size_bytes} bytes are kept as {kept.name}"
        self._warn(state.WarningKind.TORN_HEADER, message, segment_id, size_bytes)

    def _open(self, path: Path, segment_id: int) -> None:
        hint = self.durable_hints.get(segment_id, 0)
        with SegmentReader(self.env, path, durable=hint) as reader:
            self._check_identity(reader, segment_id)
            if reader.footer:
                if reader.footer.durable_bytes < hint:
                    raise CorruptError(f"sealed before {hint}, where it was durable", path=str(path))
                self.sealed[segment_id] = self.footers[segment_id] = reader.sealed_segment()
                return
            if self._named_sealed(segment_id):
                raise reader.footer_error or CorruptError("sealed by the pointer, but without footer", path=str(path))
            tail = reader.tail
            torn = reader.torn_records()
        if tail.record_count:
            self.tails[segment_id] = tail, torn
            self.unsealed[segment_id] = model.ActiveSegment(
                *(path, reader.header, tail.end_offset, tail.crc64, tail.record_count),
                *(tail.next_logical_offset, tail.last_record_ts_ms),
            )
        else:
            self.recordless[segment_id] = "its first record is torn"

    def _check_identity(self, reader: SegmentReader, segment_id: int) -> None:
        header, path = reader.header, str(reader.path)
        if header.segment_id != segment_id:
            raise CorruptError(f"the header is segment {header.segment_id}'s", path=path, offset=0)
        if self.stream_id is not None and header.stream_id != self.stream_id:
            raise CorruptError(f"the header is stream {header.stream_id}'s", path=path, offset=0)

    def _check_hints(self, ids: list[int]) -> None:
        for segment_id, hint in self.durable_hints.items():
            if hint and segment_id not in ids and segment_id not in self.sealed:
                path = model.segment_path(self.directory, segment_id)
                self._damage(path, segment_id, CorruptError("was durable and is missing", path=str(path)))

    # -- 3. the newest

    def _choose_active(self) -> None:
        """The newest file, if unsealed, becomes the active one, cut and synced. Older unsealed ones are reported."""
        newest = max((*self.sealed, *self.unsealed, *self.damaged), default=-1)
        self.active = self.unsealed.pop(newest, None)
        for segment_id, older in self.unsealed.items():
            message = f"segment {segment_id} is not sealed and not the newest; {older.record_count} records, untouched"
            self._warn(state.WarningKind.UNSEALED_OLDER, message, segment_id)
        if self.active is None:
            return
        tail, torn = self.tails[newest]
        if not tail.torn:
            repair.make_durable(self.env, self.active.path, sealed=False)
            return
        kept = f", kept as {repair.save_torn(self.env, self.active.path, torn).name}" if torn else ""
        repair.trim(self.env, self.active)
        cut_bytes = tail.torn_end - tail.end_offset
        message = f"segment {newest} trimmed at {tail.end_offset}: {cut_bytes} bytes of torn tail{kept}"
        self._warn(state.WarningKind.TORN_TAIL, message, newest, cut_bytes)

    def _check_newest_sealed(self) -> None:
        """Verifies the newest sealed segment where its end is needed or the pointer does not name it yet."""
        while self.sealed:
            newest = self.sealed[max(self.sealed)]
            known = self.agrees and self._named_sealed(newest.segment_id)
            if known and self.active:
                return
            try:
                with SegmentReader(self.env, newest.path) as reader:
                    reader.verify()
                    self.sealed[newest.segment_id] = self.footers[newest.segment_id] = reader.sealed_segment()
            except (CorruptError, UnsupportedError) as e:
                del self.sealed[newest.segment_id]
                self._damage(newest.path, newest.segment_id, e)
                continue
            if not known:
                repair.make_durable(self.env, newest.path, sealed=True)
            return

    # -- 4. the pointer and the counters

    def _move_pointer(self) -> None:
        if not self.sealed:
            return
        newest = self.sealed[max(self.sealed)]
        if self.pointer is NoPointer.MISSING:
            self._warn(state.WarningKind.POINTER_MISSING, "current.sealed is missing; every segment was opened")
        if isinstance(self.pointer, Pointer):
            if self.pointer.segment_id > newest.segment_id or (self.agrees and self._named_sealed(newest.segment_id)):
                return
            if self.pointer.segment_id < newest.segment_id:
                message = f"current.sealed named {self.pointer.segment_id}, segment {newest.segment_id} is sealed too"
                self._warn(state.WarningKind.POINTER_STALE, message, newest.segment_id)
        try:
            store_pointer(self.env, self.directory, Pointer(newest.segment_id, self._watermark(), newest.durable_bytes))
        except IsADirectoryError:
            self._warn(state.WarningKind.POINTER_DAMAGED, "a folder stands where current.sealed belongs; remove it")

    def _watermark(self) -> int:
        """Of the newest sealed segment that keeps one; a v2 segment's is known to the pointer alone."""
        for segment_id in sorted(self.footers, reverse=True):
            segment = self.footers[segment_id]
            if segment.header.version != Version.V2:
                return segment.footer.coordinator_watermark
            if isinstance(self.pointer, Pointer) and self.agrees and self._named_sealed(segment_id):
                return self.pointer.coordinator_watermark
        return 0

    def _state(self, ids: list[int]) -> state.StreamState:
        sealed = tuple(self.sealed[i] for i in sorted(self.sealed))
        unsealed = tuple(self.unsealed[i] for i in sorted(self.unsealed))
        counted: list[state.AnySegment] = [*self.footers.values(), *unsealed]
        if self.active:
            counted.append(self.active)
        counted.sort(key=lambda s: s.segment_id)
        named = self.pointer.segment_id if isinstance(self.pointer, Pointer) else -1
        return state.StreamState(
            sealed=sealed,
            older_ids=self.older_ids,
            active=self.active,
            unsealed=unsealed,
            damaged=tuple(self.damaged[i] for i in sorted(self.damaged)),
            next_segment_id=max((*ids, *self.damaged, named), default=-1) + 1,
            next_logical_offset=state.next_logical_offset(counted),
            total_record_count=state.count_records(counted),
            coordinator_watermark=self._watermark(),
            flush_failure=bool(sealed) and sealed[-1].footer.flush_failure,
            warnings=tuple(self.warnings),
        )

    # -- telling

    def _damage(self, path: Path, segment_id: int, error: Aof2Error) -> None:
        self.damaged[segment_id] = model.DamagedSegment(path, segment_id, error)
        self._warn(state.WarningKind.DAMAGED_SEGMENT, f"segment {segment_id} is left alone: {error}", segment_id)

    def _warn(self, kind: state.WarningKind, message: str, segment_id: int | None = None, size_bytes: int = 0) -> None:
        self.warnings.append(state.RecoveryWarning(kind, message, segment_id, size_bytes))
        where = {"event": str(kind), "stream_dir": str(self.directory), "segment_id": segment_id}
        level = logging.INFO if kind in self.expects else logging.WARNING
        log.log(level, "%s: %s", self.directory.name, message, extra={**where, "size_bytes": size_bytes})
