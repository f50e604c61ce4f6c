"""Mending what is provably safe to mend; everything else stays listed.

- files and folders that nothing names go (a backing file only when no process has it open or mapped)
- blocks that are damaged or gone are said to be gone: the remote has them, the next read fetches them
- a blob that is missing or damaged is put again, from a chunk on this disk that passed every checksum before the old
  one is deleted
- a manifest object or a range of an audit log that is missing or damaged in the remote is put again from the one here,
  an audit log that is damaged here is made again from its ranges (`logcopies`); logs here were mended (`mendlogs`)
- counters and reference counts are set to what the rows add up to
- a catalog that is not what the logs say is thrown away; opening rebuilds it

Invariants
- The volume's lock is held: no daemon runs. Row changes go through the log, like a daemon's.
- Where any stream's log is damaged the catalog is left alone: its rows may be the only copy. Nothing of such a stream
  is touched (its findings carry no fix).
- Rows say that bytes are gone, durably, before files go.
- Nothing in the remote is deleted but under the fence: this folder claims the volume, or leaves the remote alone.

Owner: the calling thread. A crash leaves a volume as after any crash: some of it mended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from aof2 import native
from aof2.engine import objects, segments
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import entry_of
from aof2.engine.catalog.recovery import open_catalog
from aof2.engine.catalog.rows import ChunkRow
from aof2.engine.catalog.store import Catalog, discard
from aof2.engine.catalog.writer import CatalogTarget, CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, ReadOnlyError
from aof2.engine.inspect.rows import CATALOG_DIR, MANIFEST_DIR, tenant_names
from aof2.engine.local.hot import HotCache, read_exactly
from aof2.engine.manifest.index import ManifestEntry
from aof2.engine.opening import log_settings
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.prover import named
from aof2.engine.remote.source import FileSource
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.stale import take_checked_claim
from aof2.engine.settings import Settings
from aof2.engine.tiering.hashing import block_crc
from aof2.engine.verify.findings import (
    Clear,
    Cool,
    DropLog,
    Finding,
    Fix,
    PutAudit,
    PutLog,
    RebuildAudit,
    RebuildCatalog,
    Refold,
    Remove,
    SetCounter,
    SetRefs,
    Severity,
    Upload,
)
from aof2.engine.verify.logcopies import CopyMender
from aof2.engine.verify.rows import counted

log = logging.getLogger(__name__)

SCRATCH_NAME = "verify"
# Bytes first, accounts last: what is given up changes what the accounts must say.
_ORDER = (
    *(RebuildCatalog, RebuildAudit, PutAudit, PutLog, DropLog),
    *(Upload, Clear, Cool, Remove, SetRefs, SetCounter, Refold),
)


@contextlib.contextmanager
def exclusive(state_dir: Path) -> Iterator[None]:
    """The volume's lock, as a mount takes it; ReadOnlyError when another process has it."""
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno != errno.EWOULDBLOCK:
                raise
            raise ReadOnlyError(
                f"{state_dir}: the volume is mounted; stop the daemon or run it through the daemon"
            ) from None
        yield
    finally:
        os.close(fd)


def repair_findings(
    env: Env, settings: Settings, remote: RemoteStore | None, findings: Sequence[Finding]
) -> list[Finding]:
    """The findings again, those that were mended marked. The caller holds the lock."""
    fixes = [f for f in findings if f.fix is not None and f.severity is not Severity.NOTE]
    done: set[int] = set()
    if fixes:
        with _Mender(env, settings, remote) as mender:
            for kind in _ORDER:
                for found in fixes:
                    if isinstance(found.fix, kind) and mender.mend(found.fix):
                        done.add(id(found))
    return [msgspec.structs.replace(f, repaired=True) if id(f) in done else f for f in findings]


class _Mender:
    """The volume opened for writing, when the first fix needs it."""

    def __init__(self, env: Env, settings: Settings, remote: RemoteStore | None) -> None:
        self._env = env
        self._settings = settings
        self._remote = remote
        self._state_dir = settings.volume.state_dir
        self._hot = HotCache(env, self._state_dir / "hot_cache")
        self._scratch = self._state_dir / "checkpoint_scratch" / SCRATCH_NAME
        self._block_bytes = settings.engine.block_bytes
        self._catalog: Catalog | None = None
        self._writer: CatalogWriter | None = None
        self._discarded = False
        self._claimed: Fence | None = None
        self._copies = CopyMender(env, self._state_dir, remote, self._open, self._own)

    def __enter__(self) -> _Mender:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._catalog is not None:
            self._catalog.close()

    def mend(self, fix: Fix) -> bool:
        """Whether it is mended. What cannot be stays as it is."""
        try:
            self._apply(fix)
        except (Aof2Error, OSError) as e:
            log.debug("not repaired", extra={"fix": msgspec.to_builtins(fix), "error": str(e)})
            return False
        return True

    def _apply(self, fix: Fix) -> None:
        match fix:
            case RebuildCatalog():
                self._rebuild_catalog()
            case Remove(path=path):
                self._remove(Path(path))
            case Clear():
                self._clear(fix)
            case Cool():
                cool = partial(segments.cooled, chunk_ids=[fix.chunk_id])
                self._commit(fix.stream_id, cool)
                self._hot.unlink(Path(fix.path))
            case Upload():
                self._upload(fix)
            case PutLog():
                self._copies.put_log(fix)
            case DropLog():
                self._copies.drop_log(fix)
            case PutAudit():
                self._copies.put_audit(fix)
            case RebuildAudit():
                self._copies.rebuild_audit(fix)
            case SetRefs():
                self._commit(fix.stream_id, partial(_set_refs, sha256=bytes.fromhex(fix.sha256), refs=fix.refs))
            case SetCounter():
                work = partial(_set_counter, counter=fix.counter, block_bytes=self._block_bytes)
                self._commit(fix.stream_id, work)
            case Refold():
                self._commit(fix.stream_id, partial(_refold, chunk_id=fix.chunk_id, block_bytes=self._block_bytes))

    # -- the catalog -------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Catalog, CatalogWriter]:
        if self._catalog is None or self._writer is None:
            wanted = log_settings(self._settings)
            opened = open_catalog(self._env, self._state_dir / CATALOG_DIR, self._state_dir / MANIFEST_DIR, wanted)
            self._catalog = opened.catalog
            self._writer = CatalogWriter(CatalogTarget(self._env, opened.catalog, opened.streams, None)).start()
        return self._catalog, self._writer

    def _commit(self, stream_id: int, work: Callable[[Batch], object]) -> None:
        self._open()[1].call(stream_id, work, sync=True)

    def _rebuild_catalog(self) -> None:
        if not self._discarded:
            discard(self._state_dir / CATALOG_DIR)
            self._discarded = True
            self._open()

    # -- local -------------------------------------------------------------------------------------------------

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            self._unlink_unused(path)

    def _unlink_unused(self, path: Path) -> None:
        try:
            with self._hot.exclusive(path) as alone:
                if not alone:
                    raise ReadOnlyError(f"{path}: somebody has it open")
        except FileNotFoundError:
            return
        self._hot.unlink(path)

    def _clear(self, fix: Clear) -> None:
        """The blocks are not here any more; with the last one the file goes, too."""
        for chunk_id, bad in fix.masks.items():
            work = partial(objects.lost, chunk_id=chunk_id, bad=bad, block_bytes=self._block_bytes)
            self._commit(fix.stream_id, work)
        if not self._resident(fix.stream_id, next(iter(fix.masks))):
            self._unlink_unused(Path(fix.path))

    def _resident(self, stream_id: int, chunk_id: int) -> bool:
        """Whether anything of the chunk's object is here."""
        with self._open()[0].view() as view:
            chunk = view.get(stream_id, t.CHUNKS, chunk_id)
            row = view.get(stream_id, t.OBJECTS, (chunk.ino, chunk.generation)) if chunk is not None else None
            rows = [view.get(stream_id, t.RESIDENCY, c) for c in row.data_chunks] if row is not None else []
        return any(r is not None and r.mask for r in rows)

    # -- remote ------------------------------------------------------------------------------------------------

    def _fence(self, remote: RemoteStore) -> Fence:
        """The right to delete in the remote; StaleError where another machine writes the volume, or is ahead of us."""
        if self._claimed is None:
            self._claimed = take_checked_claim(self._env, remote, self._open()[0], self._state_dir)
        return self._claimed

    def _own(self) -> Fence:
        if self._remote is None:
            raise ReadOnlyError("the remote is not reachable")
        return self._fence(self._remote)

    def _upload(self, fix: Upload) -> None:
        if self._remote is None:
            raise ReadOnlyError("the remote is not reachable")
        catalog, _ = self._open()
        with catalog.view() as view:
            chunk = view.get(fix.stream_id, t.CHUNKS, fix.chunk_id)
            row = view.get(fix.stream_id, t.OBJECTS, (chunk.ino, chunk.generation)) if chunk is not None else None
            tenant = tenant_names(view).get(fix.stream_id)
            if chunk is None or row is None or tenant is None:
                raise objects.ObjectGoneError(f"chunk {fix.chunk_id} is gone")
            same = [c for c, other in view.scan(fix.stream_id, t.CHUNKS) if other.sha256 == chunk.sha256 and other.key]
        staged = self._scratch / f"chunk-{chunk.chunk_id}.blob"
        self._scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            path = self._hot.path(tenant, chunk.ino, chunk.generation)
            source = named(chunk, chunk.key)
            size, crc64 = stage_blob(path, chunk.index * row.chunk_bytes, source, staged, self._block_bytes)
            # A put of the bytes that should be there moves none where the remote's own notes say that they are.
            self._fence(self._remote).delete([chunk.key])
            etag = self._remote.put_blob(chunk.key, FileSource(staged), size, crc64=crc64, sha256=chunk.sha256)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        done = objects.Uploaded(chunk.chunk_id, chunk.key, etag, size, "zstd", True)
        self._commit(fix.stream_id, partial(objects.blob_rebuilt, sha256=chunk.sha256, chunk_ids=same, up=done))


def stage_blob(path: Path, offset: int, chunk: ChunkRow, staged: Path, block_bytes: int) -> tuple[int, int]:
    """Writes the chunk's blob, every block and the whole checked against the seal; its length and crc64."""
    crc64 = 0
    with open(staged, "wb") as out:

        def sink(data: bytes | bytearray | memoryview) -> None:
            nonlocal crc64
            crc64 = native.crc64(data, crc64)
            out.write(data)

        writer = BlobWriter(sink, chunk_id=chunk.chunk_id, generation=chunk.generation, block_bytes=block_bytes)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for index, at in enumerate(range(0, chunk.length, block_bytes)):
                if chunk.holes >> index & 1:
                    writer.add_hole(min(block_bytes, chunk.length - at))
                    continue
                block = read_exactly(fd, offset + at, min(block_bytes, chunk.length - at), path=str(path))
                writer.add_block(block, block_crc(chunk.block_crcs, index))
        finally:
            os.close(fd)
        footer = writer.finish()
    if footer.sha256 != chunk.sha256:
        raise CorruptError(f"chunk {chunk.chunk_id} is not what was sealed", path=str(path))
    return footer.blob_len, crc64


def _set_refs(b: Batch, *, sha256: bytes, refs: int) -> None:
    blob = b.get(t.BLOBS, sha256)
    if blob is not None:
        unreferenced_ms = 0 if refs else blob.unreferenced_ms or b.now_ms
        b.put(t.BLOBS, sha256, msgspec.structs.replace(blob, refs=refs, unreferenced_ms=unreferenced_ms))


def _refold(b: Batch, chunk_id: int, block_bytes: int) -> None:
    chunk, here = b.get(t.CHUNKS, chunk_id), b.get(t.RESIDENCY, chunk_id)
    entry = entry_of(b.view, b.stream_id, chunk_id) or ManifestEntry()
    if chunk is not None:
        resident_bytes = objects.mask_bytes(here.mask if here is not None else 0, chunk.length, block_bytes)
        segments.refold(b, chunk_id, entry.residency, resident_bytes)


def _set_counter(b: Batch, *, counter: str, block_bytes: int) -> None:
    b.put(t.COUNTERS, counter, counted(b.view, b.stream_id, block_bytes)[counter])
