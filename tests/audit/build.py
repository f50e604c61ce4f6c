"""Audit logs by hand, with struct and hashlib only: what the tests hold the engine's bytes against."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from aof2.engine.audit.format import (
    ArtifactPublish,
    ArtifactRef,
    ArtifactUnpublish,
    Payload,
    SegmentSeal,
    SnapshotAnchor,
    Tombstone,
    TombstoneLift,
)

HEADER = bytes.fromhex("41534c4c4f473031 01000000 18000000 0000000000000000")


def ref_bytes(ref: ArtifactRef) -> bytes:
    return struct.pack("<IHH", ref.hash_id, len(ref.digest), 0) + ref.digest


def payload_bytes(payload: Payload) -> tuple[int, bytes]:
    if isinstance(payload, SegmentSeal):
        return 0x01, struct.pack("<Q", payload.segment_id) + payload.segment_hash
    if isinstance(payload, Tombstone):
        return 0x10, ref_bytes(payload.artifact) + struct.pack("<II", payload.scope, payload.reason_code)
    if isinstance(payload, TombstoneLift):
        return 0x11, ref_bytes(payload.artifact) + struct.pack("<Q", payload.tombstone_logseq)
    if isinstance(payload, SnapshotAnchor):
        return 0x20, struct.pack("<Q", payload.snapshot_id) + payload.root_hash
    if isinstance(payload, ArtifactPublish):
        return 0x30, ref_bytes(payload.artifact)
    assert isinstance(payload, ArtifactUnpublish)
    return 0x31, ref_bytes(payload.artifact)


def raw_records(items: Iterable[tuple[int, bytes]], first: int = 1, prev: bytes = bytes(32)) -> list[bytes]:
    """Chained envelopes of (type, payload) pairs."""
    out = []
    for logseq, (record_type, payload) in enumerate(items, first):
        body = struct.pack("<QII", logseq, record_type, len(payload)) + payload
        prev = hashlib.sha256(prev + body).digest()
        out.append(body + prev)
    return out


def records(payloads: Iterable[Payload]) -> list[bytes]:
    return raw_records(payload_bytes(p) for p in payloads)


def log_bytes(payloads: Iterable[Payload]) -> bytes:
    return HEADER + b"".join(records(payloads))


def ref(n: int) -> ArtifactRef:
    return ArtifactRef(1, hashlib.sha256(b"artifact %d" % n).digest())


def sample(count: int = 7) -> list[Payload]:
    """One record of every type and more, anchors included (their roots are not meant to match)."""
    kinds: list[Payload] = [
        SegmentSeal(9, b"\x11" * 32),
        ArtifactPublish(ref(1)),
        Tombstone(ref(1), 3, 7),
        TombstoneLift(ref(1), 3),
        SnapshotAnchor(5, b"\x22" * 32),
        ArtifactUnpublish(ref(1)),
        ArtifactPublish(ArtifactRef(77, b"short")),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]
