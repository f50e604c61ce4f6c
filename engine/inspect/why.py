"""The tier history of a file: every record of the manifest log about its chunks, in the order they happened.

Read from the chunks of the log that are on this disk; older ones may be in the remote only, which the answer says. A
damaged log is read as far as it can be trusted.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.paths import Place
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.examine import examine, survey
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.manifest.reader import Record

REASONS: Final[dict[int, str]] = {
    ReasonCode.TRANSIENT: "transient",
    ReasonCode.CODEC: "codec",
    ReasonCode.AUTH: "authentication",
    ReasonCode.UNAVAILABLE: "remote unavailable",
    ReasonCode.OBJECT_MISSING: "missing or damaged in the remote",
}
TIERS: Final = {0: "hot", 1: "warm", 2: "remote"}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `source` and `target` are tiers; `bytes` is what the record counts, None where it counts none."""

    timestamp_ms: int
    ordinal: int
    event: str
    chunk_id: int
    generation: int
    chunk_index: int
    source: str = ""
    target: str = ""
    bytes: int | None = None
    key: str = ""
    reason: str = ""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """`earlier_records` happened before the oldest chunk here: only the remote's copy of the log has them."""

    path: str
    tenant: str
    ino: int
    chunks: int
    steps: list[Step]
    earlier_records: int
    damage: list[str]


def history(view: View, manifest_dir: Path, place: Place) -> History:
    """What the log on this disk says about the chunks of every generation of the file."""
    chunks: dict[int, tuple[int, int]] = {}
    for (_, generation), row in view.scan(place.tenant_id, t.OBJECTS, prefix=place.inode.ino.to_bytes(8, "big")):
        for index, chunk_id in enumerate(row.chunks):
            chunks[chunk_id] = (generation, index)
    found = survey(manifest_dir / str(place.tenant_id))
    steps: list[Step] = []
    damage = [f.message for f in found.damage]
    first: int | None = None
    for examined in examine(found):
        damage += [f.message for f in (examined.gap, examined.damage) if f is not None]
        if examined.chunk is None:
            continue
        if first is None:
            first = examined.chunk.header.base_record
        if chunks.keys().isdisjoint(examined.chunk.rows.segment_id):
            continue
        steps += [_step(r, *chunks[r.segment_id]) for r in examined.chunk.records() if r.segment_id in chunks]
    return History(
        path=place.path,
        tenant=place.tenant,
        ino=place.inode.ino,
        chunks=len(chunks),
        steps=steps,
        earlier_records=first or 0,
        damage=damage,
    )


def _step(record: Record, generation: int, index: int) -> Step:
    try:
        facts = _facts(record.decoded()) if record.known else {}
    except Aof2Error as e:
        facts = {"reason": str(e)}
    return Step(
        timestamp_ms=record.timestamp_ms,
        ordinal=record.ordinal,
        event=record.type,
        chunk_id=record.segment_id,
        generation=generation,
        chunk_index=index,
        **facts,  # type: ignore[arg-type]
    )


def _facts(payload: p.Payload) -> dict[str, object]:
    match payload:
        case p.SegmentOpened():
            return {"target": "hot"}
        case p.SealSegment(durable_bytes):
            return {"source": "hot", "target": "hot", "bytes": durable_bytes}
        case p.CompressionStarted():
            return {"source": "hot", "target": "warm"}
        case p.CompressionDone(compressed_bytes):
            return {"source": "hot", "target": "warm", "bytes": compressed_bytes}
        case p.CompressionFailed(reason):
            return {"source": "hot", "target": "warm", "reason": _reason(reason)}
        case p.UploadStarted(key) | p.UploadDone(key):
            return {"source": "hot", "target": "remote", "key": key}
        case p.UploadFailed(key, reason):
            return {"source": "hot", "target": "remote", "key": key, "reason": _reason(reason)}
        case p.Tier2DeleteQueued(key) | p.Tier2Deleted(key):
            return {"source": "remote", "key": key}
        case p.HydrationStarted(tier):
            return {"source": TIERS.get(tier, str(tier)), "target": "hot"}
        case p.HydrationDone(resident_bytes):
            return {"target": "hot", "bytes": resident_bytes}
        case p.HydrationFailed(reason):
            return {"target": "hot", "reason": _reason(reason)}
        case p.LocalEvicted(reclaimed_bytes):
            return {"source": "hot", "bytes": reclaimed_bytes}
    return {}


def _reason(code: int) -> str:
    return REASONS.get(code, f"code {code}")
