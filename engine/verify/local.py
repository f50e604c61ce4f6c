"""The bytes on this disk against the rows: every resident block, warm blobs, files that no row names, scratch.

Owner: `check_object` and `check_warm_blob` run on worker threads, the rest on the calling one. Reads only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.catalog.store import View
from aof2.engine.verify.blocks import block_list, check_chunk, check_warm
from aof2.engine.verify.context import Context, where
from aof2.engine.verify.findings import Clear, Cool, Finding, Kind, Remove, Severity, finding

BACKING_NAME: Final = re.compile(r"([1-9][0-9]{0,19})\.([1-9][0-9]{0,19})")
WARM_NAME: Final = re.compile(r"([1-9][0-9]{0,19})\.blob")
HOT_DIR: Final = "hot_cache"
WARM_DIR: Final = "warm"

Resident = list[tuple[ChunkRow, int]]


def resident_chunks(view: View, stream_id: int, row: ObjectRow) -> Resident:
    """The object's chunks with blocks here, and which."""
    out: Resident = []
    for chunk_id in row.data_chunks:
        here = view.get(stream_id, t.RESIDENCY, chunk_id) or ResidencyRow()
        chunk = view.get(stream_id, t.CHUNKS, chunk_id) if here.mask else None
        if chunk is not None:
            out.append((chunk, here.mask))
    return out


def check_object(ctx: Context, stream_id: int, row: ObjectRow) -> None:
    """Every resident block of one object. On a worker thread."""
    tenant = ctx.tenants[stream_id]
    with ctx.rows.view() as view:
        chunks = resident_chunks(view, stream_id, row)
    if not chunks:
        return
    path = ctx.state_dir / HOT_DIR / tenant / f"{row.ino}.{row.generation}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        ctx.out.add(_missing(ctx, stream_id, row, path, chunks, (e.strerror or "unreadable").lower()))
        return
    try:
        for chunk, mask in chunks:
            checked = check_chunk(fd, chunk, mask, chunk_bytes=row.chunk_bytes, block_bytes=ctx.block_bytes)
            ctx.out.count(blocks=checked.blocks, local_bytes=checked.bytes)
            if checked.bad:
                ctx.out.add(_damaged(ctx, stream_id, row, path, chunk, checked.bad))
            elif checked.hash_failed:
                message = f"{path}: chunk {chunk.chunk_id} has the checksums it was sealed with, but not the SHA-256"
                ctx.out.add(_local(Kind.LOCAL_DAMAGED, message, tenant, row, path, chunk.chunk_id))
    finally:
        os.close(fd)


def _missing(ctx: Context, stream_id: int, row: ObjectRow, path: Path, chunks: Resident, why: str) -> Finding:
    gone = os.path.lexists(path) is False
    safe = gone and ctx.safe(stream_id) and all(chunk.key for chunk, _ in chunks)
    masks = {chunk.chunk_id: mask for chunk, mask in chunks}
    fix = Clear(stream_id=stream_id, masks=masks, path=str(path)) if safe else None
    rest = "" if all(chunk.key for chunk, _ in chunks) else "; the remote does not have all of it"
    return _local(Kind.LOCAL_MISSING, f"{path}: {why}{rest}", ctx.tenants[stream_id], row, path, None, fix)


def _damaged(ctx: Context, stream_id: int, row: ObjectRow, path: Path, chunk: ChunkRow, bad: int) -> Finding:
    safe = bool(chunk.key) and ctx.safe(stream_id)
    fix = Clear(stream_id=stream_id, masks={chunk.chunk_id: bad}, path=str(path)) if safe else None
    what = f"block(s) {block_list(bad)} of chunk {chunk.chunk_id} fail their checksum"
    rest = "" if chunk.key else "; the remote does not have the chunk"
    message = f"{path}: {what}{rest}"
    return _local(Kind.LOCAL_DAMAGED, message, ctx.tenants[stream_id], row, path, chunk.chunk_id, fix)


def _local(
    kind: Kind,
    message: str,
    tenant: str,
    row: ObjectRow,
    path: Path,
    chunk_id: int | None = None,
    fix: Clear | None = None,
) -> Finding:
    at = where(tenant, row)
    return finding(kind, Severity.ERROR, message, fix=fix, path=str(path), chunk_id=chunk_id, **at)


def check_warm_blob(ctx: Context, stream_id: int, chunk: ChunkRow, stored_bytes: int) -> None:
    """One warm blob, every frame of it. On a worker thread."""
    tenant = ctx.tenants[stream_id]
    path = ctx.state_dir / WARM_DIR / tenant / f"{chunk.chunk_id}.blob"
    wrong = check_warm(path, chunk, stored_bytes)
    ctx.out.count(local_bytes=stored_bytes)
    if wrong:
        fix = None
        if chunk.key and ctx.safe(stream_id):
            fix = Cool(stream_id=stream_id, chunk_id=chunk.chunk_id, path=str(path))
        kind = Kind.LOCAL_DAMAGED if path.exists() else Kind.LOCAL_MISSING
        message = f"{path}: {wrong}"
        at = {"tenant": tenant, "object": f"{chunk.ino}.{chunk.generation}", "chunk_id": chunk.chunk_id}
        ctx.out.add(finding(kind, Severity.ERROR, message, fix=fix, path=str(path), **at))


def check_strays(ctx: Context, view: View) -> Iterator[Finding]:
    """Files in hot_cache and warm that no row names, and what jobs that are over left in scratch."""
    by_name = {name: stream_id for stream_id, name in ctx.tenants.items()}
    for folder, known in ((HOT_DIR, _known_backing), (WARM_DIR, _known_warm)):
        root = ctx.state_dir / folder
        for tenant in _names(root):
            stream_id = by_name.get(tenant)
            for name in _names(root / tenant):
                if stream_id is None:
                    yield _stray(root / tenant / name, tenant, "its tenant does not exist", safe=False)
                    continue
                why, ours = known(view, stream_id, name)
                if why and not _recent(ctx, root / tenant / name):
                    yield _stray(root / tenant / name, tenant, why, safe=ours and ctx.safe(stream_id))
    yield from check_scratch(ctx)


def _known_backing(view: View, stream_id: int, name: str) -> tuple[str, bool]:
    """Why a backing file is one too many, "" when it is not; and whether its name is one of ours."""
    match = BACKING_NAME.fullmatch(name)
    if match is None:
        return "not a name of the cache's", False
    row = view.get(stream_id, t.OBJECTS, (int(match[1]), int(match[2])))
    if row is None:
        return "no object has it", True
    if row.state == ObjectState.DIRTY or not any(row.chunks) or resident_chunks(view, stream_id, row):
        return "", True
    return "its object was evicted", True


def _known_warm(view: View, stream_id: int, name: str) -> tuple[str, bool]:
    match = WARM_NAME.fullmatch(name)
    if match is None:
        return "not a name of the cache's", False
    return ("", True) if view.get(stream_id, t.WARM, int(match[1])) is not None else ("no chunk has it", True)


def check_scratch(ctx: Context) -> Iterator[Finding]:
    """Whatever is in scratch while no daemon has the volume open is left over."""
    root = ctx.state_dir / "checkpoint_scratch"
    for name in () if ctx.live else _names(root):
        path = root / name
        message = f"{path}: left over by a job that is over"
        yield finding(Kind.SCRATCH, Severity.WARNING, message, fix=Remove(path=str(path)), path=str(path))


def _stray(path: Path, tenant: str, why: str, *, safe: bool) -> Finding:
    fix = Remove(path=str(path)) if safe else None
    message = f"{path}: orphan: {why}"
    return finding(Kind.LOCAL_ORPHAN, Severity.WARNING, message, fix=fix, tenant=tenant, path=str(path))


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return []


def _recent(ctx: Context, path: Path) -> bool:
    try:
        return ctx.recent(path.lstat().st_mtime * 1000)
    except FileNotFoundError:
        return True
