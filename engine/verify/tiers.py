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
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.manifest.index import ManifestEntry, Residency
from aof2.engine.segments import tiers_of
from aof2.engine.verify.context import OneStream
from aof2.engine.verify.findings import Finding, Kind, Refold, Severity

NAMES: Final = {Residency.TIER0: "hot", Residency.TIER1: "warm", Residency.TIER2: "remote"}


def check_tiers(s: OneStream) -> Iterator[Finding]:
    """Every chunk's bits; and, of a whole volume, segments that no chunk has."""
    for chunk_id, chunk in _chunks(s):
        entry = entry_of(s.view, s.stream_id, chunk_id) or ManifestEntry()
        right = tiers_of(chunk, s.get(t.RESIDENCY, chunk_id))
        if entry.residency == right or (entry.needs_repair and not chunk.key):
            continue  # as it should be; or its bytes are nowhere, and told as such
        fix = Refold(stream_id=s.stream_id, chunk_id=chunk_id)
        message = f"{s.tenant}: the log has chunk {chunk_id} in {_text(entry.residency)}, its rows in {_text(right)}"
        yield s.say(Kind.TIERS, Severity.WARNING, message, fix=fix, chunk_id=chunk_id)
    if s.ctx.scope is None:
        yield from _left_over(s)


def _chunks(s: OneStream) -> Iterator[tuple[int, ChunkRow]]:
    if s.ctx.scope is None:
        yield from s.scan(t.CHUNKS)
        return
    for chunk_id in chain.from_iterable(row.chunks for row in s.objects()):
        chunk = s.get(t.CHUNKS, chunk_id)
        if chunk is not None:
            yield chunk_id, chunk


def _left_over(s: OneStream) -> Iterator[Finding]:
    waiting = {dirty.segment_id for _, dirty in s.scan(t.DIRTY)}
    waiting |= {segment_id for segment_id, _ in load_pending(s.view, s.stream_id).pending_uploads}
    for segment_id, _ in entries_of(s.view, s.stream_id):
        if segment_id in waiting or segment_id == LOG_SEGMENT_ID:
            continue
        if s.get(t.CHUNKS, segment_id) is None:
            message = f"{s.tenant}: segment {segment_id} has no chunk any more; aof2 gc retires it"
            yield s.say(Kind.TIERS, Severity.NOTE, message, chunk_id=segment_id)


def _text(tiers: int) -> str:
    return " and ".join(name for bit, name in NAMES.items() if tiers & bit) or "no tier"
