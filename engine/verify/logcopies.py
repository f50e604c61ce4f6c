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

from collections.abc import Callable, Iterator
from pathlib import Path

from aof2.engine.audit.ranges import LogRange, cut_points
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.inspect.rows import MANIFEST_DIR
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.manifest.payloads import Payload, Tier2Deleted, Tier2DeleteQueued, UploadDone
from aof2.engine.manifest.snapshot import usable_snapshots
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.audit import AUDIT_CHUNK, AUDIT_LOGSEQ
from aof2.engine.replicate.auditmend import audit_path, rebuild_audit
from aof2.engine.replicate.reconcile import local_copy
from aof2.engine.replicate.stream import append_records
from aof2.engine.verify.context import Context
from aof2.engine.verify.findings import (
    DropLog,
    Finding,
    Fix,
    Kind,
    PutAudit,
    PutLog,
    RebuildAudit,
    Severity,
    finding,
)

# -- the manifest's objects --------------------------------------------------------------------------------------


def log_fix(ctx: Context, stream_id: int, key: str) -> Fix | None:
    """What mends a manifest object that is missing or damaged on the remote, if anything does."""
    directory = ctx.state_dir / MANIFEST_DIR / str(stream_id)
    if not ctx.safe(stream_id):
        return None
    if local_copy(directory, keys.parse_key(key)) is not None:
        return PutLog(stream_id=stream_id, key=key)
    return DropLog(stream_id=stream_id, key=key) if _covered(directory, key) else None


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


def check_audit_copies(ctx: Context, store: RemoteStore, stream_id: int, *, deep: bool) -> Iterator[Finding]:
    """The ranges there against the file here; `deep` reads them."""
    tenant, path = ctx.tenants.get(stream_id, ""), audit_path(ctx.state_dir, stream_id)
    parsed = {info.key: info for info in store.list(f"audit/{stream_id}/")}
    there = {k.first_logseq: parsed[key] for key in parsed if isinstance(k := keys.parse_key(key), keys.AuditRangeKey)}
    here = list(_ranges(path))
    known = {part.first_logseq for part in here}
    last_there = max(there, default=0)
    for part in here:
        key = keys.audit_range_key(stream_id, part.first_logseq)
        wrong = ""
        if part.first_logseq not in there:
            if part.first_logseq > last_there:
                continue  # goes up with the next mount
            wrong = "missing in the remote"
        elif there[part.first_logseq].size != part.end - part.start:
            wrong = f"{there[part.first_logseq].size} bytes in the remote, {part.end - part.start} here"
        elif deep:
            wrong = _differs(store, key, path, part)
        if wrong:
            fix = PutAudit(stream_id=stream_id, first_logseq=part.first_logseq)
            yield finding(Kind.AUDIT, Severity.ERROR, f"{key}: {wrong}", tenant=tenant, key=key, fix=fix)
    lost = [first for first in there if first not in known]
    if lost:
        key = keys.audit_range_key(stream_id, min(lost))
        message = f"{path}: {len(lost)} range(s) are in the remote, from {key} on, that the log here does not have"
        fix_here = RebuildAudit(stream_id=stream_id) if ctx.safe(stream_id) else None
        yield finding(Kind.AUDIT, Severity.ERROR, message, tenant=tenant, path=str(path), key=key, fix=fix_here)


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
    with open(path, "rb") as f:
        f.seek(part.start)
        ours = f.read(part.end - part.start)
    return "" if ours == theirs else f"not the bytes of {path} from {part.start} to {part.end}"


# -- mending -----------------------------------------------------------------------------------------------------


class CopyMender:
    """Fixes of this module, on an opened catalog."""

    def __init__(
        self,
        env: Env,
        state_dir: Path,
        store: RemoteStore | None,
        opened: Callable[[], tuple[Catalog, CatalogWriter]],
        fence: Callable[[], Fence],
    ) -> None:
        """`fence` is the right to write to the remote, claimed when first asked for."""
        self._env = env
        self._state_dir = state_dir
        self._store = store
        self._opened = opened
        self._fence = fence

    def put_log(self, fix: PutLog) -> None:
        data = local_copy(self._state_dir / MANIFEST_DIR / str(fix.stream_id), keys.parse_key(fix.key))
        if data is None:
            raise CorruptError("no whole copy here", path=fix.key)
        fence = self._fence()
        fence.delete([fix.key])
        etag = fence.put(fix.key, data)
        self._log(fix.stream_id, UploadDone(fix.key, etag))

    def drop_log(self, fix: DropLog) -> None:
        fence = self._fence()
        self._log(fix.stream_id, Tier2DeleteQueued(fix.key))
        fence.delete([fix.key])
        self._log(fix.stream_id, Tier2Deleted(fix.key))

    def put_audit(self, fix: PutAudit) -> None:
        path = audit_path(self._state_dir, fix.stream_id)
        part = next((p for p in _ranges(path) if p.first_logseq == fix.first_logseq), None)
        if part is None:
            raise CorruptError(f"range {fix.first_logseq} is not here", path=str(path))
        with open(path, "rb") as f:
            f.seek(part.start)
            data = f.read(part.end - part.start)
        fence, key = self._fence(), keys.audit_range_key(fix.stream_id, fix.first_logseq)
        fence.delete([key])
        metadata = {"last_logseq": str(part.after.logseq - 1), "last_hash": part.after.prev_hash.hex()}
        fence.put(key, data, metadata)

    def rebuild_audit(self, fix: RebuildAudit) -> None:
        catalog, writer = self._opened()
        last = rebuild_audit(self._env, self._store, self._state_dir, fix.stream_id)
        with catalog.view() as view:
            acknowledged = view.get(fix.stream_id, t.COUNTERS, AUDIT_LOGSEQ) or 0
        if last < acknowledged:
            writer.call(fix.stream_id, forget_derived, sync=True)

    def _log(self, stream_id: int, payload: Payload) -> None:
        batch = RecordBatch()
        batch.add(payload, segment_id=LOG_SEGMENT_ID)
        append_records(self._opened()[1], stream_id, batch)


def forget_derived(b: Batch) -> None:
    """The audit log is shorter than it was: what is missing is derived again."""
    for counter in (AUDIT_LOGSEQ, AUDIT_CHUNK):
        b.delete(t.COUNTERS, counter)


__all__ = ["CopyMender", "check_audit_copies", "log_fix"]
