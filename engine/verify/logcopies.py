"""The copies of the logs on the remote: what is wrong with them, and mending it.

A manifest object that is missing or damaged there is put again from the one here, or, where a snapshot covers what it
held and no other copy is left, taken off the books: only history is lost. Ranges of an audit log are compared with the
file here, byte for byte, and each side can be made again from the other.

Invariants
- Nothing is put or deleted but as the volume's owner (`Fence`), which is claimed when the first fix needs it.
- A copy that is put again was checked here first.

Owner: the calling thread. A crash leaves an object missing there, and the log saying that it should be: found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from aof2.engine.audit.ranges import LogRange, cut_points
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.inspect.rows import MANIFEST_DIR
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.manifest.payloads import Payload, Tier2Deleted, Tier2DeleteQueued, UploadDone
from aof2.engine.manifest.snapshot import usable_snapshots
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate import auditmend
from aof2.engine.replicate.audit import AUDIT_CHUNK, AUDIT_LOGSEQ
from aof2.engine.replicate.auditmend import audit_path
from aof2.engine.replicate.reconcile import local_copy
from aof2.engine.replicate.stream import append_records
from aof2.engine.verify.context import OneStream
from aof2.engine.verify.findings import DropLog, Finding, Kind, PutAudit, PutLog, RebuildAudit, Severity, finding
from aof2.engine.verify.openvolume import OpenVolume

# -- the manifest's objects --------------------------------------------------------------------------------------


def log_fix(s: OneStream, key: str) -> PutLog | DropLog | None:
    """What mends a manifest object that is missing or damaged on the remote, if anything does."""
    if not s.is_safe:
        return None
    if local_copy(s.log_dir, keys.parse_key(key)) is not None:
        return PutLog(stream_id=s.stream_id, key=key)
    return DropLog(stream_id=s.stream_id, key=key) if _covered(s.log_dir, key) else None


def _covered(directory: Path, key: str) -> bool:
    """Whether a snapshot here stands for everything the object held."""
    newest = next(usable_snapshots(directory), None)
    if newest is None:
        return False
    match keys.parse_key(key):
        case keys.ManifestChunkKey(_, last) | keys.ManifestBundleKey(_, _, last):
            return last < newest.position.chunk_index
        case keys.ManifestSnapshotKey(_, number):
            return number != newest.snapshot_id
    return False


# -- the audit log's ranges --------------------------------------------------------------------------------------


def check_audit_copies(s: OneStream, store: RemoteStore, *, deep: bool) -> Iterator[Finding]:
    """The ranges there against the file here; `deep` reads them."""
    stream_id, path = s.stream_id, audit_path(s.ctx.state_dir, s.stream_id)
    there: dict[int, int] = {}
    for info in store.list(f"audit/{stream_id}/"):
        parsed = keys.parse_key(info.key)
        if isinstance(parsed, keys.AuditRangeKey):
            there[parsed.first_logseq] = info.size
    here = list(_ranges(path))
    last_there = max(there, default=0)
    for part in here:
        key = keys.audit_range_key(stream_id, part.first_logseq)
        size, wrong = there.get(part.first_logseq), ""
        if size is None:
            if part.first_logseq > last_there:
                continue  # goes up with the next mount
            wrong = "missing in the remote"
        elif size != part.end - part.start:
            wrong = f"{size} bytes in the remote, {part.end - part.start} here"
        elif deep:
            wrong = _differs(store, key, path, part)
        if wrong:
            fix = PutAudit(stream_id=stream_id, first_logseq=part.first_logseq)
            yield finding(Kind.AUDIT, Severity.ERROR, f"{key}: {wrong}", tenant=s.tenant, key=key, fix=fix)
    lost = there.keys() - {part.first_logseq for part in here}
    if lost:
        key = keys.audit_range_key(stream_id, min(lost))
        message = f"{path}: {len(lost)} range(s) are in the remote, from {key} on, that the log here does not have"
        fix_here = RebuildAudit(stream_id=stream_id)
        yield s.say(Kind.AUDIT, Severity.ERROR, message, path=str(path), key=key, fix=fix_here)


def _ranges(path: Path) -> Iterator[LogRange]:
    """The ranges of the file as far as its chain holds; what breaks it is told by `check_audit`."""
    try:
        yield from cut_points(path)
    except (CorruptError, UnsupportedError, FileNotFoundError):
        return


def _differs(store: RemoteStore, key: str, path: Path, part: LogRange) -> str:
    try:
        _, theirs = store.get_blob(key)
    except RemoteMissingError:
        return "missing in the remote"
    except CorruptError as e:
        return str(e)
    same = _bytes_of(path, part) == theirs
    return "" if same else f"not the bytes of {path} from {part.start} to {part.end}"


def _bytes_of(path: Path, part: LogRange) -> bytes:
    with open(path, "rb") as f:
        f.seek(part.start)
        return f.read(part.end - part.start)


# -- mending -----------------------------------------------------------------------------------------------------


def put_log(v: OpenVolume, fix: PutLog) -> None:
    data = local_copy(v.state_dir / MANIFEST_DIR / str(fix.stream_id), keys.parse_key(fix.key))
    if data is None:
        raise CorruptError("no whole copy here", path=fix.key)
    v.fence.delete([fix.key])
    etag = v.fence.put(fix.key, data)
    _record(v, fix.stream_id, UploadDone(fix.key, etag))


def drop_log(v: OpenVolume, fix: DropLog) -> None:
    fence = v.fence
    _record(v, fix.stream_id, Tier2DeleteQueued(fix.key))
    fence.delete([fix.key])
    _record(v, fix.stream_id, Tier2Deleted(fix.key))


def put_audit(v: OpenVolume, fix: PutAudit) -> None:
    path = audit_path(v.state_dir, fix.stream_id)
    part = next((p for p in _ranges(path) if p.first_logseq == fix.first_logseq), None)
    if part is None:
        raise CorruptError(f"range {fix.first_logseq} is not here", path=str(path))
    data, key = _bytes_of(path, part), keys.audit_range_key(fix.stream_id, fix.first_logseq)
    v.fence.delete([key])
    metadata = {"last_logseq": str(part.after.logseq - 1), "last_hash": part.after.prev_hash.hex()}
    v.fence.put(key, data, metadata)


def rebuild_audit(v: OpenVolume, fix: RebuildAudit) -> None:
    catalog = v.catalog
    last = auditmend.rebuild_audit(v.env, v.remote, v.state_dir, fix.stream_id)
    with catalog.view() as view:
        acknowledged = view.get(fix.stream_id, t.COUNTERS, AUDIT_LOGSEQ) or 0
    if last < acknowledged:
        v.commit(fix.stream_id, _forget_derived)


def _forget_derived(b: Batch) -> None:
    """The audit log is shorter than it was: what is missing is derived again."""
    for counter in (AUDIT_LOGSEQ, AUDIT_CHUNK):
        b.delete(t.COUNTERS, counter)


def _record(v: OpenVolume, stream_id: int, payload: Payload) -> None:
    batch = RecordBatch()
    batch.add(payload, segment_id=LOG_SEGMENT_ID)
    append_records(v.writer, stream_id, batch)
