"""The bytes on this disk against the rows: every resident block, warm blobs, files that no row names, scratch.

Owner: `check_object` and `check_warm_blob` run on worker threads, the rest on the calling one. Reads only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.catalog.store import View
from aof2.engine.local import spares
from aof2.engine.local.orphans import HOT_NAME, WARM_NAME
from aof2.engine.verify.blocks import block_list, check_chunk, check_warm
from aof2.engine.verify.context import Context, OneStream, name_of
from aof2.engine.verify.findings import Clear, Cool, Finding, Kind, Remove, Severity, finding

HOT_DIR: Final = "hot_cache"
WARM_DIR: Final = "warm"

Resident = list[tuple[ChunkRow, int]]


def resident_chunks(s: OneStream, row: ObjectRow) -> Resident:
    """The object's chunks with blocks here, and which."""
    out: Resident = []
    for chunk_id in row.data_chunks:
        here = s.get(t.RESIDENCY, chunk_id) or ResidencyRow()
        chunk = s.get(t.CHUNKS, chunk_id) if here.mask else None
        if chunk is not None:
            out.append((chunk, here.mask))
    return out


def check_object(ctx: Context, stream_id: int, row: ObjectRow) -> None:
    """Every resident block of one object. On a worker thread."""
    with ctx.stream(stream_id) as s:
        chunks = resident_chunks(s, row)
    if not chunks:
        return
    path = ctx.state_dir / HOT_DIR / s.tenant / name_of(row)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        ctx.add(_missing(s, row, path, chunks, (e.strerror or "unreadable").lower()))
        return
    try:
        for chunk, mask in chunks:
            checked = check_chunk(fd, chunk, mask, chunk_bytes=row.chunk_bytes, block_bytes=ctx.block_bytes)
            ctx.count(blocks=checked.blocks, local_bytes=checked.bytes)
            if checked.bad:
                ctx.add(_damaged(s, row, path, chunk, checked.bad))
            elif checked.hash_failed:
                what = f"chunk {chunk.chunk_id} has the checksums it was sealed with, but not the SHA-256"
                ctx.add(_local(s, Kind.LOCAL_DAMAGED, what, path, name_of(row), chunk.chunk_id))
    finally:
        os.close(fd)


def _missing(s: OneStream, row: ObjectRow, path: Path, chunks: Resident, why: str) -> Finding:
    remote_has_it = all(chunk.key for chunk, _ in chunks)
    masks = {chunk.chunk_id: mask for chunk, mask in chunks}
    safe = remote_has_it and not os.path.lexists(path)
    fix = Clear(stream_id=s.stream_id, masks=masks, path=str(path)) if safe else None
    rest = "" if remote_has_it else "; the remote does not have all of it"
    return _local(s, Kind.LOCAL_MISSING, why + rest, path, name_of(row), fix=fix)


def _damaged(s: OneStream, row: ObjectRow, path: Path, chunk: ChunkRow, bad: int) -> Finding:
    fix = Clear(stream_id=s.stream_id, masks={chunk.chunk_id: bad}, path=str(path)) if chunk.key else None
    what = f"block(s) {block_list(bad)} of chunk {chunk.chunk_id} fail their checksum"
    rest = "" if chunk.key else "; the remote does not have the chunk"
    return _local(s, Kind.LOCAL_DAMAGED, what + rest, path, name_of(row), chunk.chunk_id, fix)


def _local(
    s: OneStream,
    kind: Kind,
    what: str,
    path: Path,
    name: str,
    chunk_id: int | None = None,
    fix: Clear | Cool | None = None,
) -> Finding:
    where = {"path": str(path), "object": name, "chunk_id": chunk_id}
    return s.say(kind, Severity.ERROR, f"{path}: {what}", fix=fix, **where)


def check_warm_blob(ctx: Context, stream_id: int, chunk: ChunkRow, stored_bytes: int) -> None:
    """One warm blob, every frame of it. On a worker thread."""
    with ctx.stream(stream_id) as s:
        path = ctx.state_dir / WARM_DIR / s.tenant / f"{chunk.chunk_id}.blob"
    wrong = check_warm(path, chunk, stored_bytes)
    ctx.count(local_bytes=stored_bytes)
    if wrong:
        fix = Cool(stream_id=stream_id, chunk_id=chunk.chunk_id, path=str(path)) if chunk.key else None
        kind = Kind.LOCAL_DAMAGED if path.exists() else Kind.LOCAL_MISSING
        ctx.add(_local(s, kind, wrong, path, f"{chunk.ino}.{chunk.generation}", chunk.chunk_id, fix))


def check_strays(ctx: Context, view: View) -> Iterator[Finding]:
    """Files in hot_cache and warm that no row names, and what jobs that are over left in scratch."""
    streams = {name: OneStream(ctx, view, stream_id) for stream_id, name in ctx.tenants.items()}
    for folder, known in ((HOT_DIR, _known_backing), (WARM_DIR, _known_warm)):
        root = ctx.state_dir / folder
        for tenant in _names(root):
            s = streams.get(tenant)
            for name in _names(root / tenant):
                if tenant == spares.FOLDER and _is_spare(root / tenant / name):
                    continue
                if s is None:
                    yield _stray(root / tenant / name, tenant, "its tenant does not exist", safe=False)
                    continue
                why, ours = known(s, name)
                if why and not _recent(ctx, root / tenant / name) and not _made_ahead(ctx, root / tenant / name):
                    yield _stray(root / tenant / name, tenant, why, safe=ours and s.is_safe)
    yield from check_scratch(ctx)


def _is_spare(path: Path) -> bool:
    """Whether it is an inode without bytes that waits for its next file."""
    try:
        return path.name.isdecimal() and path.lstat().st_size == 0
    except FileNotFoundError:
        return True


def _known_backing(s: OneStream, name: str) -> tuple[str, bool]:
    """Why a backing file is one too many, "" when it is not; and whether its name is one of ours."""
    match = HOT_NAME.fullmatch(name)
    if match is None:
        return "not a name of the cache's", False
    row = s.get(t.OBJECTS, (int(match[1]), int(match[2])))
    if row is None:
        return "no object has it", True
    if row.state == ObjectState.DIRTY or not any(row.chunks) or resident_chunks(s, row):
        return "", True
    return "its object was evicted", True


def _known_warm(s: OneStream, name: str) -> tuple[str, bool]:
    match = WARM_NAME.fullmatch(name)
    if match is None:
        return "not a name of the cache's", False
    return ("", True) if s.get(t.WARM, int(match[1])) is not None else ("no chunk has it", True)


def check_scratch(ctx: Context) -> Iterator[Finding]:
    """Whatever is in scratch while no daemon has the volume open is left over."""
    root = ctx.state_dir / "checkpoint_scratch"
    for name in () if ctx.report.live else _names(root):
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


def _made_ahead(ctx: Context, path: Path) -> bool:
    """Whether it may be a backing file that waits for its birth: those of a running volume have no rows, nor bytes."""
    try:
        return ctx.report.live and path.lstat().st_size == 0
    except FileNotFoundError:
        return True


def _recent(ctx: Context, path: Path) -> bool:
    try:
        return ctx.recent(path.lstat().st_mtime * 1000)
    except FileNotFoundError:
        return True
