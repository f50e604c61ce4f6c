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
from aof2.engine.inspect.rows import MANIFEST_DIR
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.check import check
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition, ManifestIntegrityError, RecordType
from aof2.engine.manifest.reader import Record, Stream
from aof2.engine.manifest.snapshot import Snapshot, usable_snapshots
from aof2.engine.remote.keys import ChunkBlobKey, parse_key
from aof2.engine.verify.context import Context
from aof2.engine.verify.findings import Finding, Kind, Severity, finding

_TIER_TYPES: Final = frozenset(
    (RecordType.UPLOAD_DONE, RecordType.TIER2_DELETE_QUEUED, RecordType.TIER2_DELETED, RecordType.LOCAL_EVICTED)
)
ATTEMPTS: Final = 3


def check_log(ctx: Context, stream_id: int) -> Iterator[Finding]:
    """What `manifest verify` says about the stream's folder."""
    tenant = ctx.tenants.get(stream_id, "")
    report = check(ctx.state_dir / MANIFEST_DIR / str(stream_id))
    ctx.out.count(streams=1, records=report.records)
    for found in report.damage:
        yield finding(Kind.LOG, Severity.ERROR, found.message, tenant=tenant, path=report.directory)
    for found in report.notes:
        yield finding(Kind.LOG, Severity.NOTE, found.message, tenant=tenant, path=report.directory)


class EvictionWalk:
    """What the tier records of one stream say, as far as evictions depend on it."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
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


def check_evictions(ctx: Context, stream_id: int) -> Iterator[Finding]:
    """Every LocalEvicted in the log on this disk follows a matching UploadDone."""
    directory = ctx.state_dir / MANIFEST_DIR / str(stream_id)
    for attempt in range(ATTEMPTS):
        try:
            found = list(_walk(ctx, directory, stream_id))
        except FileNotFoundError:  # retention at work
            if attempt == ATTEMPTS - 1:
                raise
            continue
        yield from found
        return


def _walk(ctx: Context, directory: Path, stream_id: int) -> Iterator[Finding]:
    tenant = ctx.tenants.get(stream_id, "")
    stream = Stream(directory) if stream_id not in ctx.damaged else None
    if stream is None or not stream.chunks:
        return
    snapshot, start, unproven = _start(directory, stream)
    if unproven:
        yield finding(Kind.EVICTION, Severity.NOTE, unproven, tenant=tenant, path=str(directory))
    walk = EvictionWalk(snapshot)
    try:
        for record in stream.records(start):
            if record.type_id not in _TIER_TYPES or record.segment_id == LOG_SEGMENT_ID:
                continue
            wrong, key = walk.feed(record)
            if not wrong and key:
                wrong = _mismatch(ctx, stream_id, record.segment_id, key)
            if wrong:
                at = f"record {record.ordinal} (chunk {record.chunk_index}, byte {record.chunk_offset})"
                message = f"{directory}: {at} evicts segment {record.segment_id}, and {wrong}"
                yield finding(
                    Kind.EVICTION, Severity.ERROR, message, tenant=tenant, chunk_id=record.segment_id, key=key
                )
    except ManifestIntegrityError:
        pass  # told by check_log, with its place
    ctx.out.count(evictions=walk.evictions)


def _mismatch(ctx: Context, stream_id: int, segment_id: int, key: str) -> str:
    """Whether the upload was of other content than was sealed, as far as the row is still there to tell."""
    parsed = parse_key(key)
    if not isinstance(parsed, ChunkBlobKey):
        return ""
    with ctx.rows.view() as view:
        chunk = view.get(stream_id, t.CHUNKS, segment_id)
    if chunk is not None and chunk.sha256 != parsed.sha256:
        return f"what was uploaded as {key} is not its content"
    return ""


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
