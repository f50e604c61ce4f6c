"""The folded tier state against the rows: which of hot, warm and remote hold each chunk.

The fold is made of the tier records alone, the rows of the commits beside them: two ways to the same bits. `local` and
`remote` compare the rows with the disk and the remote, byte for byte, so that together all four say the same. Where
fold and rows differ, records are missing or say too much; new ones that say what the rows do put that right.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import entries_of, entry_of, load_pending
from aof2.engine.catalog.rows import ChunkRow
from aof2.engine.catalog.store import View
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.manifest.index import ManifestEntry, Residency
from aof2.engine.segments import tiers_of
from aof2.engine.verify.context import Context
from aof2.engine.verify.findings import Finding, Kind, Refold, Severity, finding

NAMES: Final = {Residency.TIER0: "hot", Residency.TIER1: "warm", Residency.TIER2: "remote"}


def check_tiers(ctx: Context, view: View, stream_id: int) -> Iterator[Finding]:
    """Every chunk's bits; and, of a whole volume, segments that no chunk has."""
    for chunk_id, chunk in _chunks(ctx, view, stream_id):
        found = _compare(ctx, view, stream_id, chunk_id, chunk)
        if found is not None:
            yield found
    if ctx.scope is None:
        yield from _left_over(ctx, view, stream_id)


def _chunks(ctx: Context, view: View, stream_id: int) -> Iterator[tuple[int, ChunkRow]]:
    if ctx.scope is None:
        yield from view.scan(stream_id, t.CHUNKS)
        return
    for chunk_id in chain.from_iterable(row.chunks for row in ctx.objects(view, stream_id)):
        chunk = view.get(stream_id, t.CHUNKS, chunk_id)
        if chunk is not None:
            yield chunk_id, chunk


def _compare(ctx: Context, view: View, stream_id: int, chunk_id: int, chunk: ChunkRow) -> Finding | None:
    entry = entry_of(view, stream_id, chunk_id) or ManifestEntry()
    here = view.get(stream_id, t.RESIDENCY, chunk_id)
    right = tiers_of(chunk, here)
    if entry.needs_repair and not chunk.key:
        return None  # its bytes are nowhere: told as such
    tenant = ctx.tenants[stream_id]
    if entry.residency != right:
        fix = Refold(stream_id=stream_id, chunk_id=chunk_id) if ctx.safe(stream_id) else None
        message = f"{tenant}: the log has chunk {chunk_id} in {_text(entry.residency)}, its rows in {_text(right)}"
        return finding(Kind.TIERS, Severity.WARNING, message, fix=fix, tenant=tenant, chunk_id=chunk_id)
    return None


def _left_over(ctx: Context, view: View, stream_id: int) -> Iterator[Finding]:
    tenant = ctx.tenants[stream_id]
    waiting = {dirty.segment_id for _, dirty in view.scan(stream_id, t.DIRTY)}
    waiting |= {segment_id for segment_id, _ in load_pending(view, stream_id).pending_uploads}
    for segment_id, _ in entries_of(view, stream_id):
        if segment_id in waiting or segment_id == LOG_SEGMENT_ID:
            continue
        if view.get(stream_id, t.CHUNKS, segment_id) is None:
            message = f"{tenant}: segment {segment_id} has no chunk any more; aof2 gc retires it"
            yield finding(Kind.TIERS, Severity.NOTE, message, tenant=tenant, chunk_id=segment_id)


def _text(tiers: int) -> str:
    return " and ".join(name for bit, name in NAMES.items() if tiers & bit) or "no tier"
