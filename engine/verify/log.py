"""The logs: every checksum and the order of everything (`manifest.check`), and that evictions were safe.

Eviction safety is proven from the log alone: a LocalEvicted must come after an UploadDone of that segment, whose key
was not queued for deletion in between, and whose hash is the sealed content's. The walk starts with the log, or, where
retention took the beginning, with the oldest snapshot that is still here; what came before is not proven again.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.check import check
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition, ManifestIntegrityError, RecordType
from aof2.engine.manifest.reader import Record, Stream
from aof2.engine.manifest.snapshot import Snapshot, usable_snapshots
from aof2.engine.remote.keys import ChunkBlobKey, InboxBlobKey, parse_key
from aof2.engine.verify.context import OneStream
from aof2.engine.verify.findings import Finding, Kind, Severity

_TIER_TYPES: Final = frozenset(
    (RecordType.UPLOAD_DONE, RecordType.TIER2_DELETE_QUEUED, RecordType.TIER2_DELETED, RecordType.LOCAL_EVICTED)
)
ATTEMPTS: Final = 3


def check_log(s: OneStream) -> Iterator[Finding]:
    """What `manifest verify` says about the stream's folder."""
    report = check(s.log_dir)
    s.ctx.count(streams=1, records=report.records)
    for severity, said in ((Severity.ERROR, report.damage), (Severity.NOTE, report.notes)):
        for one in said:
            yield s.say(Kind.LOG, severity, one.message, path=report.directory)
    why = s.ctx.damaged.get(s.stream_id)
    if why is not None and not report.damage:  # the folder looks right, and the rows cannot be rebuilt from it
        yield s.say(Kind.LOG, Severity.ERROR, why)


class _EvictionWalk:
    """What the tier records of one stream say, as far as evictions depend on it."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self.evictions = 0
        self._key: dict[int, str] = {}
        self._deleted: set[str] = set()
        if snapshot is not None:
            self._key = {segment: entry.key for segment, entry in snapshot.index.entries.items() if entry.key}
            self._deleted = {key for _, key in snapshot.index.pending_deletes}

    def feed(self, record: Record) -> tuple[str, str]:
        """(what is wrong with this record, the key the evicted segment is under), both "" for most."""
        payload = record.decoded()
        match payload:
            case p.UploadDone(key):
                self._key[record.segment_id] = key
                self._deleted.discard(key)
            case p.Tier2DeleteQueued(key) | p.Tier2Deleted(key):
                self._deleted.add(key)
            case p.LocalEvicted():
                self.evictions += 1
                key = self._key.get(record.segment_id, "")
                if not key:
                    return "no upload of it was done before", ""
                if key in self._deleted:
                    return f"its remote copy {key} had been queued for deletion", key
                return "", key
        return "", ""


def check_evictions(s: OneStream) -> Iterator[Finding]:
    """Every LocalEvicted in the log on this disk follows a matching UploadDone."""
    for attempt in range(ATTEMPTS):
        try:
            found = list(_walk(s))
        except FileNotFoundError:  # retention at work
            if attempt == ATTEMPTS - 1:
                raise
            continue
        yield from found
        return


def _walk(s: OneStream) -> Iterator[Finding]:
    stream = Stream(s.log_dir) if s.is_safe else None
    if stream is None or not stream.chunks:
        return
    snapshot, start, unproven = _start(s.log_dir, stream)
    if unproven:
        yield s.say(Kind.EVICTION, Severity.NOTE, unproven, path=str(s.log_dir))
    walk = _EvictionWalk(snapshot)
    try:
        for record in stream.records(start):
            if record.type_id not in _TIER_TYPES or record.segment_id == LOG_SEGMENT_ID:
                continue
            wrong, key = walk.feed(record)
            if not wrong and key:
                wrong = _mismatch(s, record.segment_id, key)
            if wrong:
                at = f"record {record.ordinal} (chunk {record.chunk_index}, byte {record.chunk_offset})"
                message = f"{s.log_dir}: {at} evicts segment {record.segment_id}, and {wrong}"
                yield s.say(Kind.EVICTION, Severity.ERROR, message, chunk_id=record.segment_id, key=key)
    except ManifestIntegrityError:
        pass  # told by check_log, with its place
    s.ctx.count(evictions=walk.evictions)


def _mismatch(s: OneStream, segment_id: int, key: str) -> str:
    """Whether the upload was of other content than was sealed, as far as the row is still there to tell."""
    parsed = parse_key(key)
    if not isinstance(parsed, ChunkBlobKey | InboxBlobKey):
        return ""
    chunk = s.get(t.CHUNKS, segment_id)
    return "" if chunk is None or chunk.sha256 == parsed.sha256 else f"what was uploaded as {key} is not its content"


def _start(directory: Path, stream: Stream) -> tuple[Snapshot | None, LogPosition | None, str]:
    """Where a walk can begin: the start of the log, or the oldest snapshot that lies in what is here."""
    first = next(stream.read(), None)
    if first is None or first.header.base_record == 0:
        return None, None, ""
    usable = [one for one in usable_snapshots(directory) if one.position.chunk_index >= first.index]
    if usable:
        oldest = usable[-1]
        what = f"{directory}: evictions before record {oldest.position.ordinal} are history of the remote's log"
        return oldest, oldest.position, what
    return None, None, f"{directory}: no snapshot to start from; evictions are walked without what came before"
