"""ManifestIndex: the records folded into the state of each segment.

The fold is deterministic and total: any sequence of records of known types gives a state, the same one every time, so
replay(log) = replay(snapshot + tail). A record that concerns a segment not opened yet (an upload whose SegmentOpened is
in a chunk still to come) makes an entry with `opened` False; those are the reconciliation queue, and SegmentOpened
takes them out of it with what they already learned. A segment that is retired leaves the state: so a snapshot is as
large as what there is, not as what there ever was.

Owner: the thread that replays or writes the log. Memory only; a crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Final

import msgspec

from aof2.engine.manifest import format as fmt
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import EVENT_SCHEMA_MIN, KNOWN_SCHEMAS, Event, EventAssembler
from aof2.engine.manifest.reader import Chunk
from aof2.engine.manifest.tier_events import SEGMENT_RETIRED, WARM_DROPPED, reclaimed_bytes


class Residency(IntFlag):
    """Which tiers hold the segment. Written to disk in snapshots. Never renumber."""

    TIER0 = 1
    TIER1 = 2
    TIER2 = 4


class Progress(IntEnum):
    """Of a compression, an upload or a hydration. Written to disk in snapshots. Never renumber."""

    NONE = 0
    STARTED = 1
    DONE = 2
    FAILED = 3


# As plain numbers: an operation on flags makes one, which costs more than the rest of a record.
_TIER0: Final = int(Residency.TIER0)
_TIER1: Final = int(Residency.TIER1)
_TIER2: Final = int(Residency.TIER2)
_NONE, _STARTED, _DONE, _FAILED = map(int, Progress)


class ManifestEntry(msgspec.Struct, gc=False, array_like=True):
    """What the log says about one segment."""

    opened: bool = False
    sealed: bool = False
    flush_failure: bool = False
    needs_repair: bool = False
    residency: int = 0
    compression: int = 0
    upload: int = 0
    hydration: int = 0
    base_offset: int = 0
    epoch: int = 0
    durable_bytes: int = 0
    segment_crc64: int = 0
    ext_id: int = 0
    coordinator_watermark: int = 0
    job_id: int = 0
    compressed_bytes: int = 0
    dictionary_id: int = 0
    source_tier: int = 0
    resident_bytes: int = 0
    reclaimed_bytes: int = 0
    reason_code: int = 0
    last_ms: int = 0
    key: str = ""
    etag: str = ""


EventHandler = Callable[[Event], None]


class ManifestIndex:
    """State per segment, pending remote work, and the log's own objects. `apply_chunk` is the fast way in."""

    def __init__(self) -> None:
        self.entries: dict[int, ManifestEntry] = {}
        # (segment, key) → last reason code, or -1 when the attempt has not failed
        self.pending_uploads: dict[tuple[int, str], int] = {}
        self.pending_deletes: set[tuple[int, str]] = set()
        # key → etag of the log's own chunks, bundles and snapshots on the remote
        self.log_objects: dict[str, str] = {}
        self.snapshot: tuple[int, int, int] | None = None
        self.unknown_schemas: dict[int, int] = {}
        self.on_event: EventHandler | None = None
        self._events = EventAssembler()
        self._foreign = EventAssembler()

    @property
    def needs_repair(self) -> list[int]:
        return [segment_id for segment_id, entry in self.entries.items() if entry.needs_repair]

    @property
    def incomplete_events(self) -> int:
        return self._events.incomplete + self._foreign.incomplete

    def apply_chunk(self, chunk: Chunk, from_offset: int = fmt.CHUNK_HEADER_LEN) -> None:
        """Folds a verified chunk in, from a record boundary on."""
        first = chunk.row_at(from_offset)
        data = bytes(chunk.data)
        handlers, unpackers = HANDLERS, p.DECODERS
        offset = kind = segment_id = 0
        try:
            for offset, kind, _, length, segment_id, _, stamp in zip(
                *(column[first:].tolist() for column in chunk.rows), strict=True
            ):
                if kind >= fmt.TYPE_COUNT:
                    continue
                payload = unpackers[kind](data[offset + 40 : offset + 40 + length])
                handlers[kind](self, segment_id, payload, stamp)
        except fmt.ManifestIntegrityError as e:
            raise fmt.ManifestIntegrityError(
                e.what, path=chunk.path, chunk_index=chunk.index, segment_id=segment_id, offset=offset
            ) from None

    def apply(self, kind: int, segment_id: int, timestamp_ms: int, payload: bytes) -> None:
        """Folds one record that was just written."""
        if kind >= fmt.TYPE_COUNT:
            return
        HANDLERS[kind](self, segment_id, p.decode(kind, payload), timestamp_ms)

    def same_state(self, other: ManifestIndex) -> bool:
        """Whether both came to the same conclusions (diagnostics, such as unknown events met, aside)."""
        return self._state() == other._state()

    def _state(self) -> tuple[object, ...]:
        return (self.entries, self.pending_uploads, self.pending_deletes, self.log_objects, self.snapshot)

    def _entry(self, segment_id: int, stamp: int) -> ManifestEntry:
        entry = self.entries.get(segment_id)
        if entry is None:
            entry = self.entries[segment_id] = ManifestEntry()
        entry.last_ms = stamp
        return entry

    def _segment_opened(self, segment_id: int, r: p.SegmentOpened, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        if entry.opened and r.epoch > entry.epoch:
            # A new life of the same segment: what an older epoch left on the remote stays known until deleted.
            entry = self.entries[segment_id] = ManifestEntry(key=entry.key, etag=entry.etag, last_ms=stamp)
        entry.opened = True
        entry.base_offset = r.base_offset
        entry.epoch = r.epoch
        entry.residency |= _TIER0

    def _seal_segment(self, segment_id: int, r: p.SealSegment, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.sealed = True
        entry.durable_bytes = entry.resident_bytes = r.durable_bytes
        entry.segment_crc64 = r.segment_crc64
        if r.ext_id is not None:
            entry.ext_id = r.ext_id
            entry.coordinator_watermark = r.coordinator_watermark
            entry.flush_failure = bool(r.flush_failure)

    def _compression_started(self, segment_id: int, r: p.CompressionStarted, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.compression = _STARTED
        entry.job_id = r.job_id

    def _compression_done(self, segment_id: int, r: p.CompressionDone, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.compression = _DONE
        entry.compressed_bytes = r.compressed_bytes
        entry.dictionary_id = r.dictionary_id
        entry.residency |= _TIER1

    def _compression_failed(self, segment_id: int, r: p.CompressionFailed, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.compression = _FAILED
        entry.reason_code = r.reason_code

    def _upload_started(self, segment_id: int, r: p.UploadStarted, stamp: int) -> None:
        self.pending_uploads[segment_id, r.key] = -1
        if segment_id != fmt.LOG_SEGMENT_ID:
            self._entry(segment_id, stamp).upload = _STARTED

    def _upload_done(self, segment_id: int, r: p.UploadDone, stamp: int) -> None:
        self.pending_uploads.pop((segment_id, r.key), None)
        if segment_id == fmt.LOG_SEGMENT_ID:
            self.log_objects[r.key] = r.etag
            return
        entry = self._entry(segment_id, stamp)
        entry.upload = _DONE
        entry.key = r.key
        entry.etag = r.etag
        entry.residency |= _TIER2
        entry.needs_repair = False

    def _upload_failed(self, segment_id: int, r: p.UploadFailed, stamp: int) -> None:
        # Still pending: a failed upload is work to resume, with the reason it stopped for.
        self.pending_uploads[segment_id, r.key] = r.reason_code
        if segment_id != fmt.LOG_SEGMENT_ID:
            entry = self._entry(segment_id, stamp)
            entry.upload = _FAILED
            entry.reason_code = r.reason_code

    def _tier2_delete_queued(self, segment_id: int, r: p.Tier2DeleteQueued, stamp: int) -> None:
        # Deletes come last in a segment's life, often after it was retired: they make no entry. One that is queued ends
        # the upload of that key, if it was still under way.
        self.pending_deletes.add((segment_id, r.key))
        self.pending_uploads.pop((segment_id, r.key), None)
        entry = self.entries.get(segment_id)
        if entry is not None:
            entry.last_ms = stamp

    def _tier2_deleted(self, segment_id: int, r: p.Tier2Deleted, stamp: int) -> None:
        self.pending_deletes.discard((segment_id, r.key))
        if segment_id == fmt.LOG_SEGMENT_ID:
            self.log_objects.pop(r.key, None)
            return
        entry = self.entries.get(segment_id)
        if entry is not None:
            entry.last_ms = stamp
        if entry is not None and entry.key == r.key:
            entry.key = entry.etag = ""
            entry.upload = _NONE
            entry.residency &= ~_TIER2

    def _hydration_started(self, segment_id: int, r: p.HydrationStarted, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.hydration = _STARTED
        entry.source_tier = r.source_tier

    def _hydration_done(self, segment_id: int, r: p.HydrationDone, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.hydration = _DONE
        entry.resident_bytes = r.resident_bytes
        entry.residency |= _TIER0
        entry.needs_repair = False

    def _hydration_failed(self, segment_id: int, r: p.HydrationFailed, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.hydration = _FAILED
        entry.reason_code = r.reason_code
        if r.reason_code == fmt.ReasonCode.OBJECT_MISSING:
            entry.needs_repair = True

    def _local_evicted(self, segment_id: int, r: p.LocalEvicted, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.residency &= ~_TIER0
        entry.reclaimed_bytes = (entry.reclaimed_bytes + r.reclaimed_bytes) & 0xFFFF_FFFF_FFFF_FFFF
        entry.resident_bytes = 0

    def _snapshot_marker(self, _segment_id: int, r: p.SnapshotMarker, _stamp: int) -> None:
        self.snapshot = (r.snapshot_id, r.chunk_index, r.chunk_offset)

    def _warm_dropped(self, segment_id: int, r: p.CustomEvent, stamp: int) -> None:
        entry = self._entry(segment_id, stamp)
        entry.residency &= ~_TIER1
        entry.compression = _NONE
        entry.compressed_bytes = 0
        entry.reclaimed_bytes = (entry.reclaimed_bytes + reclaimed_bytes(r)) & 0xFFFF_FFFF_FFFF_FFFF

    def _segment_retired(self, segment_id: int) -> None:
        """Its chunk is gone. An upload of it that has not ended yet is still to be cleared away: that keeps it."""
        if not self._is_uploading(segment_id):
            self.entries.pop(segment_id, None)

    def _is_uploading(self, segment_id: int) -> bool:
        return any(pending == segment_id for pending, _ in self.pending_uploads)

    def _custom_event(self, segment_id: int, r: p.CustomEvent, stamp: int) -> None:
        if r.schema_id < EVENT_SCHEMA_MIN:
            if r.schema_id == WARM_DROPPED:
                self._warm_dropped(segment_id, r, stamp)
            elif r.schema_id == SEGMENT_RETIRED:
                self._segment_retired(segment_id)
            return
        known = r.schema_id in KNOWN_SCHEMAS
        if not known:
            self.unknown_schemas[r.schema_id] = self.unknown_schemas.get(r.schema_id, 0) + 1
        try:
            event = (self._events if known else self._foreign).feed(r.schema_id, r.blob)
        except fmt.ManifestIntegrityError:
            if known:
                raise
            return  # nothing depends on it being understood
        if event is not None and self.on_event is not None:
            self.on_event(event)


# A method a record type, by its name.
HANDLERS: Final[tuple[Callable[..., None], ...]] = tuple(
    getattr(ManifestIndex, f"_{kind.name.lower()}") for kind in fmt.RecordType
)
