"""The tier history of a file: every record of the manifest log about its chunks, in the order they happened.

Read from the chunks of the log that are on this disk, and from there on backwards from the remote's copies, if the
caller has them, until the file's beginning is found; what was not looked at is said. A damaged log is read as far as it
can be trusted.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.paths import Place
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest import tier_events
from aof2.engine.manifest.examine import examine, survey
from aof2.engine.manifest.format import ReasonCode, RecordType
from aof2.engine.manifest.reader import Chunk, Record

OPENED: Final = RecordType.SEGMENT_OPENED.label
REASONS: Final[dict[int, str]] = {
    ReasonCode.TRANSIENT: "transient",
    ReasonCode.CODEC: "codec",
    ReasonCode.AUTH: "authentication",
    ReasonCode.UNAVAILABLE: "remote unavailable",
    ReasonCode.OBJECT_MISSING: "missing or damaged in the remote",
}
TIERS: Final = {0: "hot", 1: "warm", 2: "remote"}

# The chunks of the log before the given one (None: all of them), the newest first.
Earlier = Callable[[int | None], Iterator[Chunk]]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `source` and `target` are tiers; `bytes` is what the record counts, None where it counts none.
    `machine`: on a follower, whose disk it is about, the writer's or the one here."""

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
    machine: str = ""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """`earlier_records` happened before the oldest chunk that was read, and may be about this file, too."""

    path: str
    tenant: str
    ino: int
    chunks: int
    steps: list[Step]
    earlier_records: int
    damage: list[str]


def history(
    view: View, manifest_dir: Path, place: Place, earlier: Earlier | None = None, own_dir: Path | None = None
) -> History:
    """What the log says about the chunks of every generation of the file. `own_dir`: of a follower, whose own log is
    told beside the writer's."""
    chunks: dict[int, tuple[int, int]] = {}
    for (_, generation), row in view.scan(place.tenant_id, t.OBJECTS, prefix=place.inode.ino.to_bytes(8, "big")):
        chunks |= {chunk_id: (generation, index) for index, chunk_id in enumerate(row.chunks) if chunk_id}
    found = survey(manifest_dir / str(place.tenant_id))
    steps: list[Step] = []
    damage = [f.message for f in found.damage]
    first: Chunk | None = None
    for examined in examine(found):
        damage += [f.message for f in (examined.gap, examined.damage) if f is not None]
        if examined.chunk is None:
            continue
        first = first or examined.chunk
        steps += _steps(examined.chunk, chunks)
    unread = first.header.base_record if first else 0
    if earlier is not None and (unread or first is None):
        # A file begins with the opening of its chunks: nothing before that is about it.
        missing = chunks.keys() - {s.chunk_id for s in steps if s.event == OPENED}
        for chunk in earlier(first.index if first else None) if missing else ():
            steps[:0] = found_here = _steps(chunk, chunks)
            unread = chunk.header.base_record
            missing -= {s.chunk_id for s in found_here if s.event == OPENED}
            if not missing:
                break
        unread = unread if missing else 0
    if own_dir is not None:
        own = [
            step for examined in examine(survey(own_dir)) if examined.chunk for step in _steps(examined.chunk, chunks)
        ]
        steps = [msgspec.structs.replace(step, machine="writer") for step in steps]
        steps += [msgspec.structs.replace(step, machine="here") for step in own]
        steps.sort(key=lambda step: step.timestamp_ms)
    return History(
        path=place.path,
        tenant=place.tenant,
        ino=place.inode.ino,
        chunks=len(chunks),
        steps=steps,
        earlier_records=unread,
        damage=damage,
    )


def _steps(chunk: Chunk, chunks: dict[int, tuple[int, int]]) -> list[Step]:
    if chunks.keys().isdisjoint(chunk.rows.segment_id):
        return []
    return [_step(r, *chunks[r.segment_id]) for r in chunk.records() if r.segment_id in chunks]


def _step(record: Record, generation: int, index: int) -> Step:
    try:
        facts = _facts(record.decoded()) if record.known else {}
    except Aof2Error as e:
        facts = {"reason": str(e)}
    return Step(
        timestamp_ms=record.timestamp_ms,
        ordinal=record.ordinal,
        event=_label(record),
        chunk_id=record.segment_id,
        generation=generation,
        chunk_index=index,
        **facts,  # type: ignore[arg-type]
    )


def _label(record: Record) -> str:
    """The record's type; a tier event that has none goes by its own name."""
    if record.type_id != RecordType.CUSTOM_EVENT:
        return record.type
    schema_id = int.from_bytes(record.payload[:4], "little")
    return tier_events.LABELS.get(schema_id, record.type)


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
        case p.CustomEvent(tier_events.WARM_DROPPED):
            return {"source": "warm", "bytes": tier_events.reclaimed_bytes(payload)}
    return {}


def _reason(code: int) -> str:
    return REASONS.get(code, f"code {code}")
