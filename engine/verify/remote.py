"""The remote against the rows: every blob there, as long as it should be, and, when asked, read and proven.

Without reading, one listing answers: what is missing, what has another size, what no row names. With reading, each blob
is streamed: footer, frames, SHA-256, and that its blocks are those that were sealed. The log's own objects are listed
likewise, and compared with the chunks on this disk.

An object that no row names is reported only when it is older than `purge_after`: uploads come before their rows.

Invariants
- Reads only. A few blocks of each blob under way are in memory. No quota is asked for: nothing lands.

What is read is cut into pieces (`pieces.py`), which are checked wherever there is a hand free; `tell` says what was
found.

Owner: `check_chunk_blob` and `tell` run on worker threads, the rest on the calling one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import load_pending
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest.format import CHUNK_HEADER_LEN, chunk_name
from aof2.engine.objects import full_mask
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import (
    AnyPackKey,
    ManifestChunkKey,
    WholeBlobKey,
    is_pack,
    parse_key,
)
from aof2.engine.remote.prover import check_size, prove
from aof2.engine.remote.store import BlobInfo, RemoteStore
from aof2.engine.replicate.listing import list_stream
from aof2.engine.verify.context import Context, OneStream
from aof2.engine.verify.findings import Finding, Kind, Severity, Upload, finding
from aof2.engine.verify.index import Expected, Index
from aof2.engine.verify.logcopies import log_fix
from aof2.engine.verify.pieces import BlobPiece, Checked, LogPiece, Piece

BLOB_PREFIX: Final = "checkpoints/"
LOG_PREFIX: Final = "manifest/"
INBOX_PREFIX: Final = "inbox/"
SNAPSHOT_PREFIX: Final = "snapshots/"  # listings of what users took
GONE: Final = -1


# -- what should be there ----------------------------------------------------------------------------------------


def expected(s: OneStream) -> Iterator[Expected]:
    """Every key the stream's rows and log name."""
    for sha256, blob in s.scan(t.BLOBS):
        yield Expected(blob.key, s.stream_id, sha256, blob.location, True, False)
    for key, row in s.scan(t.PACKS):
        if not row.members:  # its members were moved elsewhere; it goes when it was kept for long enough
            yield Expected(key, s.stream_id, b"", None, False, False)
    pending = load_pending(s.view, s.stream_id)
    deltas, snapshots = (row.key for _, row in s.scan(t.DELTAS)), (row.key for _, row in s.scan(t.SNAPSHOTS))
    for key in filter(None, chain(deltas, snapshots, pending.log_objects)):
        yield Expected(key, s.stream_id, b"", None, True, False)
    for _, key in (*pending.pending_uploads, *pending.pending_deletes):
        yield Expected(key, s.stream_id, b"", None, False, False)


# -- listing -----------------------------------------------------------------------------------------------------


def check_listing(ctx: Context, remote: RemoteStore, index: Index, *, deep: bool) -> Iterator[Finding]:
    """Missing and unknown objects, and sizes that differ (unless everything is read anyway). Of a pack, each member."""
    packs: dict[int, dict[str, int]] = {}  # by stream: keys of those that may lack members → how long they are
    recent_ms = ctx.env.now_ms() - int(ctx.settings.retention.purge_after_s * 1000)
    waiting_ms = recent_ms - int(ctx.settings.follow.inbox_keep_s * 1000)  # of what was delivered
    for prefix in (BLOB_PREFIX, INBOX_PREFIX, LOG_PREFIX, SNAPSHOT_PREFIX):
        for info, meant in index.meet((info.key, info) for info in remote.list(prefix)):
            if meant is None:
                # The log's own are not told: its uploader goes on where it stopped.
                if (prefix == BLOB_PREFIX and info.modified_ms <= recent_ms) or (
                    prefix == INBOX_PREFIX and info.modified_ms <= waiting_ms and _holds_blobs(info.key)
                ):
                    yield _orphan(info, prefix)
            elif meant.must and is_pack(info.key):
                if not deep:
                    packs.setdefault(meant.stream_id, {})[info.key] = info.size
            elif not deep and meant.location is not None and not meant.location.fits(info.size):
                message = f"{info.key}: {info.size} bytes in the remote, its row says {meant.location.end}"
                yield _expected_blob(ctx, Kind.REMOTE_DAMAGED, message, index, meant)
    for missing in index.unseen():
        if is_pack(missing.key):
            packs.setdefault(missing.stream_id, {})[missing.key] = GONE
        else:
            yield _missing(ctx, index, missing)
    for stream_id, sizes in sorted(packs.items()):
        with ctx.stream(stream_id) as s:
            yield from _check_members(s, sizes, index)


def _check_members(s: OneStream, sizes: Mapping[str, int], index: Index) -> Iterator[Finding]:
    """Those that their pack is too short for, or that are gone with it."""
    for sha256, blob in s.scan(t.BLOBS):
        size = sizes.get(blob.key)
        if size is None or blob.location.fits(size):
            continue
        resident = index.refs(s.stream_id, sha256).resident_chunk
        if size == GONE:
            yield blob_finding(s, Kind.REMOTE_MISSING, f"{blob.key}: missing in the remote", blob.key, resident)
        else:
            message = f"{blob.key}: {size} bytes in the remote, a row says {blob.location.end}"
            yield blob_finding(s, Kind.REMOTE_DAMAGED, message, blob.key, resident)


def excuse_behind(s: OneStream, store: RemoteStore) -> None:
    """Of a follower that is behind the log: what its rows and the remote differ in is no damage, but is shown."""
    position = s.view.position(s.stream_id)
    first = 0 if position is None else position.chunk_index + (position.chunk_offset > CHUNK_HEADER_LEN)
    if max(list_stream(store, s.stream_id).chunk_indexes(), default=-1) < first:
        return
    findings, why = s.ctx.report.findings, "; the log goes on behind what this follower has: mount it, and verify again"
    for n, one in enumerate(findings):
        if one.kind in (Kind.REMOTE_MISSING, Kind.REMOTE_ORPHAN) and one.tenant == s.tenant:
            note = {"severity": Severity.NOTE, "message": one.message + why, "repairable": False, "fix": None}
            findings[n] = msgspec.structs.replace(one, **note)


def _holds_blobs(key: str) -> bool:
    """Commits of delivered jobs, and answers to them, are no orphans: the writer's sweep is what they wait for."""
    return isinstance(parse_key(key), WholeBlobKey | AnyPackKey)


def _orphan(info: BlobInfo, prefix: str) -> Finding:
    tenant = info.key.removeprefix(prefix).split("/")[0]
    who = "the sweep of the inbox" if prefix == INBOX_PREFIX else "aof2 gc"
    message = f"{info.key}: orphan of {info.size} bytes: no chunk has it; {who} removes it"
    return finding(Kind.REMOTE_ORPHAN, Severity.WARNING, message, tenant=tenant, key=info.key)


def _missing(ctx: Context, index: Index, meant: Expected) -> Finding:
    if not meant.key.startswith(LOG_PREFIX):
        return _expected_blob(ctx, Kind.REMOTE_MISSING, f"{meant.key}: missing in the remote", index, meant)
    message = f"{meant.key}: missing in the remote, the log says it was uploaded"
    with ctx.stream(meant.stream_id) as s:
        return s.say(Kind.REMOTE_LOG, Severity.ERROR, message, key=meant.key, fix=log_fix(s, meant.key))


def _expected_blob(ctx: Context, kind: Kind, message: str, index: Index, meant: Expected) -> Finding:
    resident = index.refs(meant.stream_id, meant.sha256).resident_chunk if meant.sha256 else 0
    with ctx.stream(meant.stream_id) as s:
        return blob_finding(s, kind, message, meant.key, resident)


def blob_finding(s: OneStream, kind: Kind, message: str, key: str, resident: int) -> Finding:
    """`resident`: a chunk with that content that is whole on this disk, 0 for none."""
    fix = Upload(stream_id=s.stream_id, chunk_id=resident) if resident else None
    rest = "" if resident else "; this disk does not have all of it"
    return s.say(kind, Severity.ERROR, message + rest, fix=fix, key=key, chunk_id=resident or None)


# -- reading -----------------------------------------------------------------------------------------------------


def blob_pieces(s: OneStream, index: Index) -> Iterator[BlobPiece]:
    """Every blob of the tenant, with what it must be."""
    for sha256, blob in s.scan(t.BLOBS):
        resident = index.refs(s.stream_id, sha256).resident_chunk
        yield BlobPiece(s.stream_id, blob, sha256, s.get(t.CHUNKS, resident) if resident else None, resident)


def log_pieces(s: OneStream) -> Iterator[LogPiece]:
    """The stream's chunks, bundles and snapshots; chunks that are here too must be the same bytes."""
    for key in sorted(load_pending(s.view, s.stream_id).log_objects):
        name = parse_key(key)
        here = str(s.log_dir / chunk_name(name.chunk_index)) if isinstance(name, ManifestChunkKey) else ""
        yield LogPiece(s.stream_id, key, here)


def tell(ctx: Context, piece: Piece | None, checked: Checked) -> None:
    """What the check of a piece found; without one, of many that were right. A missing object is told by the listing,
    or was bundled since."""
    ctx.count(blobs=checked.blobs, remote_bytes=checked.bytes)
    if piece is None or not checked.wrong:
        return
    with ctx.stream(piece.stream_id) as s:
        if isinstance(piece, BlobPiece):
            ctx.add(blob_finding(s, Kind.REMOTE_DAMAGED, checked.wrong, piece.key, piece.resident))
        else:
            ctx.add(s.say(Kind.REMOTE_LOG, Severity.ERROR, checked.wrong, key=piece.key, fix=log_fix(s, piece.key)))


# -- by name -----------------------------------------------------------------------------------------------------


def check_chunk_blob(ctx: Context, remote: RemoteStore, stream_id: int, chunk_id: int, *, deep: bool) -> None:
    """The blob of one chunk of a file that was asked for by name. On a worker thread."""
    with ctx.stream(stream_id) as s:
        chunk = s.get(t.CHUNKS, chunk_id)
        blob = s.get(t.BLOBS, chunk.sha256) if chunk is not None and chunk.key else None
        here = s.get(t.RESIDENCY, chunk_id)
    if chunk is None or blob is None:
        return
    whole = here is not None and here.mask == full_mask(chunk.length, ctx.block_bytes)
    try:
        if deep:
            prove(remote, blob, chunk.sha256, chunk)
        else:
            check_size(remote, blob)
        ctx.count(blobs=1, remote_bytes=blob.stored_bytes if deep else 0)
    except (RemoteMissingError, CorruptError, UnsupportedError) as e:
        missing = isinstance(e, RemoteMissingError)
        kind = Kind.REMOTE_MISSING if missing else Kind.REMOTE_DAMAGED
        message = f"{blob.key}: missing in the remote" if missing else str(e)
        ctx.add(blob_finding(s, kind, message, blob.key, chunk_id if whole else 0))
