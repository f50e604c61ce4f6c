"""The remote against the rows: every blob there, as long as it should be, and, when asked, read and proven.

Without reading, one listing answers: what is missing, what has another size, what no row names. With reading, each blob
is streamed: footer, frames, SHA-256, and that its blocks are those that were sealed. The log's own objects are listed
likewise, and compared with the chunks on this disk.

An object that no row names is reported only when it is older than `purge_after`: uploads come before their rows.

Invariants
- Reads only. A few blocks of each blob under way are in memory. No quota is asked for: nothing lands.

Owner: `check_blob` and `check_chunk_blob` run on worker threads, the rest on the calling one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import StreamFold
from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.inspect.rows import MANIFEST_DIR
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, ChunkFlag, chunk_name, unpack_chunk_header
from aof2.engine.manifest.reader import parse_chunk, read_file
from aof2.engine.manifest.snapshot import decode_snapshot
from aof2.engine.objects import full_mask
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import ManifestChunkKey, ManifestSnapshotKey, parse_key
from aof2.engine.remote.prover import check_size, prove
from aof2.engine.remote.store import BlobInfo, RemoteStore
from aof2.engine.verify.context import Context
from aof2.engine.verify.findings import Finding, Kind, Severity, Upload, finding
from aof2.engine.verify.index import Expected, Index
from aof2.engine.verify.logcopies import log_fix

BLOB_PREFIX: Final = "checkpoints/"
LOG_PREFIX: Final = "manifest/"
SNAPSHOT_PREFIX: Final = "snapshots/"  # listings of what users took


# -- what should be there ----------------------------------------------------------------------------------------


def expect(ctx: Context, view: View, stream_id: int, index: Index) -> None:
    """Every key the stream's rows and log name, into the index."""
    index.expect(_expected(view, stream_id))


def _expected(view: View, stream_id: int) -> Iterator[Expected]:
    for sha256, blob in view.scan(stream_id, t.BLOBS):
        yield Expected(blob.key, stream_id, sha256, blob.location, True, False)
    for _, delta in view.scan(stream_id, t.DELTAS):
        if delta.key:
            yield Expected(delta.key, stream_id, b"", None, True, False)
    for _, snapshot in view.scan(stream_id, t.SNAPSHOTS):
        if snapshot.key:
            yield Expected(snapshot.key, stream_id, b"", None, True, False)
    fold = StreamFold(stream_id)
    fold.reload(view)
    for key in fold.log_objects:
        yield Expected(key, stream_id, b"", None, True, False)
    for _, key in (*fold.pending_uploads, *fold.pending_deletes):
        yield Expected(key, stream_id, b"", None, False, False)


# -- listing -----------------------------------------------------------------------------------------------------


def check_listing(ctx: Context, remote: RemoteStore, index: Index, *, deep: bool) -> Iterator[Finding]:
    """Missing and unknown objects, and sizes that differ (unless everything is read anyway)."""
    recent_ms = ctx.env.now_ms() - int(ctx.settings.retention.purge_after_s * 1000)
    for prefix in (BLOB_PREFIX, LOG_PREFIX, SNAPSHOT_PREFIX):
        listed = ((info.key, info) for info in remote.list(prefix))
        for info, expected in index.meet(listed):
            found = _listed(ctx, info, expected, index, recent_ms, deep=deep)
            if found is not None:
                yield found
    for missing in index.unseen():
        yield _missing(ctx, index, missing)


def _listed(
    ctx: Context, info: BlobInfo, expected: Expected | None, index: Index, recent_ms: int, *, deep: bool
) -> Finding | None:
    if expected is None:
        if info.modified_ms > recent_ms or not info.key.startswith(BLOB_PREFIX):
            return None  # the log's own: its uploader goes on where it stopped
        tenant = info.key.removeprefix(BLOB_PREFIX).split("/")[0]
        message = f"{info.key}: orphan of {info.size} bytes: no chunk has it; aof2 gc removes it"
        return finding(Kind.REMOTE_ORPHAN, Severity.WARNING, message, tenant=tenant, key=info.key)
    if deep or expected.location is None or expected.location.fits(info.size):
        return None
    message = f"{info.key}: {info.size} bytes in the remote, its row says {expected.location.end}"
    return _blob_finding(ctx, Kind.REMOTE_DAMAGED, message, index, expected)


def _missing(ctx: Context, index: Index, expected: Expected) -> Finding:
    if expected.key.startswith(LOG_PREFIX):
        message = f"{expected.key}: missing in the remote, the log says it was uploaded"
        tenant = ctx.tenants.get(expected.stream_id, "")
        fix = log_fix(ctx, expected.stream_id, expected.key)
        return finding(Kind.REMOTE_LOG, Severity.ERROR, message, tenant=tenant, key=expected.key, fix=fix)
    return _blob_finding(ctx, Kind.REMOTE_MISSING, f"{expected.key}: missing in the remote", index, expected)


def _blob_finding(ctx: Context, kind: Kind, message: str, index: Index, expected: Expected) -> Finding:
    resident = index.refs(expected.stream_id, expected.sha256).resident_chunk if expected.sha256 else 0
    return blob_finding(ctx, kind, message, expected.stream_id, expected.key, resident)


def blob_finding(ctx: Context, kind: Kind, message: str, stream_id: int, key: str, resident: int) -> Finding:
    """`resident`: a chunk with that content that is whole on this disk, 0 for none."""
    fix = Upload(stream_id=stream_id, chunk_id=resident) if resident and ctx.safe(stream_id) else None
    rest = "" if resident else "; this disk does not have all of it"
    tenant = ctx.tenants[stream_id]
    return finding(kind, Severity.ERROR, message + rest, fix=fix, tenant=tenant, key=key, chunk_id=resident or None)


# -- reading -----------------------------------------------------------------------------------------------------


def check_blob(
    ctx: Context,
    remote: RemoteStore,
    stream_id: int,
    blob: BlobRow,
    chunk: ChunkRow | None,
    sha256: bytes,
    index: Index,
) -> None:
    """Reads one blob whole. On a worker thread. A missing one is told by the listing."""
    try:
        prove(remote, blob, sha256, chunk)
    except RemoteMissingError:
        return
    except (CorruptError, UnsupportedError) as e:
        resident = index.refs(stream_id, sha256).resident_chunk
        ctx.out.add(blob_finding(ctx, Kind.REMOTE_DAMAGED, f"{e}", stream_id, blob.key, resident))
        return
    ctx.out.count(blobs=1, remote_bytes=blob.stored_bytes)


# -- the log's copies --------------------------------------------------------------------------------------------


def check_log_copies(ctx: Context, remote: RemoteStore, view: View, stream_id: int) -> Iterator[Finding]:
    """Reads the stream's chunks and snapshots in the remote; chunks that are here too must be the same bytes."""
    tenant = ctx.tenants.get(stream_id, "")
    fold = StreamFold(stream_id)
    fold.reload(view)
    for key in sorted(fold.log_objects):
        try:
            wrong = _log_copy(ctx, remote, stream_id, key)
        except RemoteMissingError:
            continue  # told by the listing, or bundled since
        except (CorruptError, UnsupportedError) as e:
            wrong = str(e)
        if wrong:
            fix = log_fix(ctx, stream_id, key)
            yield finding(Kind.REMOTE_LOG, Severity.ERROR, wrong, tenant=tenant, key=key, fix=fix)


def _log_copy(ctx: Context, remote: RemoteStore, stream_id: int, key: str) -> str:
    _, data = remote.get_blob(key)
    match parse_key(key):
        case ManifestChunkKey(_, index):
            parse_chunk(data, path=key, last=False, expect_index=index)
            path = ctx.state_dir / MANIFEST_DIR / str(stream_id) / chunk_name(index)
            try:
                here = read_file(path)
            except FileNotFoundError:
                return ""
            return "" if _same_chunk(here, data) else f"{key}: diverges from {path}"
        case ManifestSnapshotKey():
            decode_snapshot(data, path=key)
    return ""


def _same_chunk(here: bytes, there: bytes) -> bool:
    """The same but for the `uploaded` flag, which is set on this disk once the copy is there."""
    a, b = (unpack_chunk_header(data[:CHUNK_HEADER_LEN]) for data in (here, there))
    flags = ~int(ChunkFlag.UPLOADED)
    same_header = a._replace(flags=a.flags & flags) == b._replace(flags=b.flags & flags)
    end = a.committed_len
    return same_header and here[CHUNK_HEADER_LEN:end] == there[CHUNK_HEADER_LEN:end]


# -- by name -----------------------------------------------------------------------------------------------------


def check_chunk_blob(ctx: Context, remote: RemoteStore, stream_id: int, chunk_id: int, *, deep: bool) -> None:
    """The blob of one chunk of a file that was asked for by name. On a worker thread."""
    with ctx.rows.view() as view:
        chunk = view.get(stream_id, t.CHUNKS, chunk_id)
        blob = view.get(stream_id, t.BLOBS, chunk.sha256) if chunk is not None and chunk.key else None
        here = view.get(stream_id, t.RESIDENCY, chunk_id)
    if chunk is None or blob is None:
        return
    whole = here is not None and here.mask == full_mask(chunk.length, ctx.block_bytes)
    try:
        if deep:
            prove(remote, blob, chunk.sha256, chunk)
        else:
            check_size(remote, blob)
        ctx.out.count(blobs=1, remote_bytes=blob.stored_bytes if deep else 0)
    except (RemoteMissingError, CorruptError, UnsupportedError) as e:
        missing = isinstance(e, RemoteMissingError)
        kind = Kind.REMOTE_MISSING if missing else Kind.REMOTE_DAMAGED
        message = f"{blob.key}: missing in the remote" if missing else str(e)
        ctx.out.add(blob_finding(ctx, kind, message, stream_id, blob.key, chunk_id if whole else 0))
