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
import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from aof2 import native
from aof2.engine import objects, packrows, residency, segments
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import entry_of
from aof2.engine.catalog.rows import ChunkRow
from aof2.engine.catalog.store import discard
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, ReadOnlyError
from aof2.engine.fds import opened
from aof2.engine.inspect.rows import CATALOG_DIR, tenant_names
from aof2.engine.local.hot import read_exactly
from aof2.engine.manifest.index import ManifestEntry
from aof2.engine.remote.prover import key_to_rebuild, named
from aof2.engine.remote.source import FileSource
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings import Settings
from aof2.engine.tiering.hashing import block_crc
from aof2.engine.verify import findings as fixes
from aof2.engine.verify import logcopies
from aof2.engine.verify.openvolume import OpenVolume
from aof2.engine.verify.rows import counted, packs_counted

log = logging.getLogger(__name__)

SCRATCH_NAME = "verify"


def repair_findings(
    env: Env, settings: Settings, remote: RemoteStore | None, findings: Sequence[fixes.Finding]
) -> list[fixes.Finding]:
    """The findings again, those that were mended marked. The caller holds the lock."""
    left = [f for f in findings if f.fix is not None and f.severity is not fixes.Severity.NOTE]
    mended: set[int] = set()
    with contextlib.closing(OpenVolume(env, settings, remote)) as volume:
        for kind, mend in _MENDERS.items():
            for found in left:
                if isinstance(found.fix, kind) and _is_mended(volume, mend, found.fix):
                    mended.add(id(found))
    return [msgspec.structs.replace(f, repaired=True) if id(f) in mended else f for f in findings]


def _is_mended(volume: OpenVolume, mend: Callable[[OpenVolume, Any], None], fix: msgspec.Struct) -> bool:
    """What cannot be mended stays as it is."""
    try:
        mend(volume, fix)
    except (Aof2Error, OSError) as e:
        log.debug("not repaired", extra={"fix": msgspec.to_builtins(fix), "error": str(e)})
        return False
    return True


# -- local -------------------------------------------------------------------------------------------------------


def _remove(v: OpenVolume, fix: fixes.Remove) -> None:
    path = Path(fix.path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        _unlink_unused(v, path)


def _unlink_unused(v: OpenVolume, path: Path) -> None:
    try:
        with v.hot.exclusive(path) as alone:
            if not alone:
                raise ReadOnlyError(f"{path}: a process has it open")
    except FileNotFoundError:
        return
    v.hot.unlink(path)


def _clear(v: OpenVolume, fix: fixes.Clear) -> None:
    """The blocks are not here any more; with the last one the file goes, too."""
    for chunk_id, bad in fix.masks.items():
        v.commit(fix.stream_id, partial(residency.lost, chunk_id=chunk_id, bad=bad, block_bytes=v.block_bytes))
    if not _is_resident(v, fix.stream_id, next(iter(fix.masks))):
        _unlink_unused(v, Path(fix.path))


def _is_resident(v: OpenVolume, stream_id: int, chunk_id: int) -> bool:
    """Whether anything of the chunk's object is here."""
    with v.catalog.view() as view:
        chunk = view.get(stream_id, t.CHUNKS, chunk_id)
        row = view.get(stream_id, t.OBJECTS, (chunk.ino, chunk.generation)) if chunk is not None else None
        rows = [view.get(stream_id, t.RESIDENCY, c) for c in row.data_chunks] if row is not None else []
    return any(r is not None and r.mask for r in rows)


def _cool(v: OpenVolume, fix: fixes.Cool) -> None:
    v.commit(fix.stream_id, partial(segments.cooled, chunk_ids=[fix.chunk_id]))
    v.hot.unlink(Path(fix.path))


# -- remote ------------------------------------------------------------------------------------------------------


def _upload(v: OpenVolume, fix: fixes.Upload) -> None:
    remote = v.reached
    with v.catalog.view() as view:
        chunk = view.get(fix.stream_id, t.CHUNKS, fix.chunk_id)
        row = view.get(fix.stream_id, t.OBJECTS, (chunk.ino, chunk.generation)) if chunk is not None else None
        tenant = tenant_names(view).get(fix.stream_id)
        if chunk is None or row is None or tenant is None:
            raise objects.ObjectGoneError(f"chunk {fix.chunk_id} is gone")
        same = [c for c, other in view.scan(fix.stream_id, t.CHUNKS) if other.sha256 == chunk.sha256 and other.key]
    scratch = v.state_dir / "checkpoint_scratch" / SCRATCH_NAME
    staged = scratch / f"chunk-{chunk.chunk_id}.blob"
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        path = v.hot.path(tenant, chunk.ino, chunk.generation)
        key = key_to_rebuild(chunk, chunk.key)
        source = named(chunk, key)
        size, crc64 = stage_blob(path, chunk.index * row.chunk_bytes, source, staged, v.block_bytes)
        # A put of the bytes that should be there moves none where the remote's own notes say that they are.
        v.fence.delete([key])
        if key != chunk.key:
            v.commit(fix.stream_id, partial(objects.upload_started, keys=[(chunk.chunk_id, key)]))
        etag = remote.put_blob(key, FileSource(staged), size, crc64=crc64, sha256=chunk.sha256)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    done = objects.Uploaded(chunk.chunk_id, key, etag, size, "zstd", True)
    v.commit(fix.stream_id, partial(objects.blob_rebuilt, sha256=chunk.sha256, chunk_ids=same, up=done))


def stage_blob(path: Path, offset: int, chunk: ChunkRow, staged: Path, block_bytes: int) -> tuple[int, int]:
    """Writes the chunk's blob, every block and the whole checked against the seal; its length and crc64."""
    crc64 = 0
    with open(staged, "wb") as out:

        def sink(data: bytes | bytearray | memoryview) -> None:
            nonlocal crc64
            crc64 = native.crc64(data, crc64)
            out.write(data)

        writer = BlobWriter(sink, chunk_id=chunk.chunk_id, generation=chunk.generation, block_bytes=block_bytes)
        with opened(path) as fd:
            for index, at in enumerate(range(0, chunk.length, block_bytes)):
                if chunk.holes >> index & 1:
                    writer.add_hole(min(block_bytes, chunk.length - at))
                    continue
                block = read_exactly(fd, offset + at, min(block_bytes, chunk.length - at), path=str(path))
                writer.add_block(block, block_crc(chunk.block_crcs, index))
        footer = writer.finish()
    if footer.sha256 != chunk.sha256:
        raise CorruptError(f"chunk {chunk.chunk_id} is not what was sealed", path=str(path))
    return footer.blob_len, crc64


# -- rows --------------------------------------------------------------------------------------------------------


def _rebuild_catalog(v: OpenVolume, _: fixes.RebuildCatalog) -> None:
    if not v.is_open:
        discard(v.state_dir / CATALOG_DIR)
        v.open()


def _set_refs(v: OpenVolume, fix: fixes.SetRefs) -> None:
    sha256 = bytes.fromhex(fix.sha256)

    def work(b: Batch) -> None:
        blob = b.get(t.BLOBS, sha256)
        if blob is not None:
            unreferenced_ms = 0 if fix.refs else blob.unreferenced_ms or b.now_ms
            b.put(t.BLOBS, sha256, msgspec.structs.replace(blob, refs=fix.refs, unreferenced_ms=unreferenced_ms))

    v.commit(fix.stream_id, work)


def _set_pack(v: OpenVolume, fix: fixes.SetPack) -> None:
    def work(b: Batch) -> None:
        packrows.counted_anew(b, fix.key, *packs_counted(b.view, b.stream_id).get(fix.key, (0, 0)))

    v.commit(fix.stream_id, work)


def _set_counter(v: OpenVolume, fix: fixes.SetCounter) -> None:
    def work(b: Batch) -> None:
        b.put(t.COUNTERS, fix.counter, counted(b.view, b.stream_id, v.block_bytes)[fix.counter])

    v.commit(fix.stream_id, work)


def _refold(v: OpenVolume, fix: fixes.Refold) -> None:
    def work(b: Batch) -> None:
        chunk, here = b.get(t.CHUNKS, fix.chunk_id), b.get(t.RESIDENCY, fix.chunk_id)
        entry = entry_of(b.view, b.stream_id, fix.chunk_id) or ManifestEntry()
        if chunk is not None:
            resident_bytes = objects.mask_bytes(here.mask if here is not None else 0, chunk.length, v.block_bytes)
            segments.refold(b, fix.chunk_id, entry.residency, resident_bytes)

    v.commit(fix.stream_id, work)


# Bytes first, accounts last: what is given up changes what the accounts must say.
_MENDERS: Final[dict[type[msgspec.Struct], Callable[[OpenVolume, Any], None]]] = {
    fixes.RebuildCatalog: _rebuild_catalog,
    fixes.RebuildAudit: logcopies.rebuild_audit,
    fixes.PutAudit: logcopies.put_audit,
    fixes.PutLog: logcopies.put_log,
    fixes.DropLog: logcopies.drop_log,
    fixes.Upload: _upload,
    fixes.Clear: _clear,
    fixes.Cool: _cool,
    fixes.Remove: _remove,
    fixes.SetRefs: _set_refs,
    fixes.SetPack: _set_pack,
    fixes.SetCounter: _set_counter,
    fixes.Refold: _refold,
}
