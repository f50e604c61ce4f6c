"""Records of a manifest log as JSON shows them: one object a record, its payload by field names.

Owner: pure.
"""

from __future__ import annotations

import base64
from typing import Any

from aof2.engine.manifest import tier_events
from aof2.engine.manifest.format import COMMIT_BLOB, COMMIT_SCHEMA_ID
from aof2.engine.manifest.payloads import CustomEvent, SealSegment
from aof2.engine.manifest.reader import Record

COLUMNS = (
    "chunk_index",
    "chunk_offset",
    "ordinal",
    "type",
    "type_id",
    "flags",
    "segment_id",
    "logical_offset",
    "timestamp_ms",
    "payload",
)


def record_object(record: Record, payload: dict[str, Any]) -> dict[str, Any]:
    return {name: payload if name == "payload" else getattr(record, name) for name in COLUMNS}


def raw_payload(record: Record) -> dict[str, Any]:
    """Of a record that cannot be decoded."""
    return {"raw": record.payload.hex()}


def payload_of(record: Record) -> dict[str, Any]:
    """The decoded fields by name. ManifestIntegrityError."""
    if not record.known:
        return raw_payload(record)
    payload = record.decoded()
    if isinstance(payload, CustomEvent):
        return _event(payload)
    fields = payload._asdict()
    if isinstance(payload, SealSegment) and payload.ext_id is None:  # the short form has no more
        return {name: fields[name] for name in ("durable_bytes", "segment_crc64")}
    return fields


def _event(event: CustomEvent) -> dict[str, Any]:
    if event.schema_id == COMMIT_SCHEMA_ID and len(event.blob) == COMMIT_BLOB.size:
        fields = zip(("span_start", "span_crc64", "durable_len"), COMMIT_BLOB.unpack(event.blob), strict=True)
        return {"schema_id": event.schema_id, **dict(fields)}
    if event.schema_id in tier_events.LABELS:
        named: dict[str, Any] = {"event": tier_events.LABELS[event.schema_id]}
        if event.schema_id == tier_events.WARM_DROPPED:
            named["reclaimed_bytes"] = tier_events.reclaimed_bytes(event)
        return {"schema_id": event.schema_id, **named}
    blob = base64.b64encode(event.blob).decode()
    return {"schema_id": event.schema_id, "blob_len": len(event.blob), "blob": blob}
