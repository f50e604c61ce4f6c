"""Small logs with known contents, and ways to hurt them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from click.testing import CliRunner, Result

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest import tier_events
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import RECORD_HEADER, ChunkHeader
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter
from aof2.fs.cli import main
from tests.manifest.replay import replay, take_snapshot

NOW_MS = 1_700_000_000_123
SETTINGS = LogSettings(chunk_capacity=16 << 10, durable=False, rotation_period_ms=1 << 40)
KEYS = (
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
# One of each; what inspect shows of each.
EVERY_TYPE: list[tuple[p.Payload, dict[str, object]]] = [
    (p.SegmentOpened(0, 1), {"base_offset": 0, "epoch": 1}),
    (p.SealSegment(4096, 2**64 - 1, None), {"durable_bytes": 4096, "segment_crc64": 2**64 - 1}),
    (
        p.SealSegment(4096, 7, 5, 6, 1),
        {"durable_bytes": 4096, "segment_crc64": 7, "ext_id": 5, "coordinator_watermark": 6, "flush_failure": 1},
    ),
    (p.CompressionStarted(3), {"job_id": 3}),
    (p.CompressionDone(2048, 9), {"compressed_bytes": 2048, "dictionary_id": 9}),
    (p.CompressionFailed(1), {"reason_code": 1}),
    (p.UploadStarted("a/b"), {"key": "a/b"}),
    (p.UploadDone("a/b", "e\ttag"), {"key": "a/b", "etag": "e\ttag"}),
    (p.UploadFailed("a/ü", 3), {"key": "a/ü", "reason_code": 3}),
    (p.Tier2DeleteQueued("a/b"), {"key": "a/b"}),
    (p.Tier2Deleted("a/b"), {"key": "a/b"}),
    (p.HydrationStarted(2), {"source_tier": 2}),
    (p.HydrationDone(4096), {"resident_bytes": 4096}),
    (p.HydrationFailed(0), {"reason_code": 0}),
    (p.LocalEvicted(4096), {"reclaimed_bytes": 4096}),
    (p.SnapshotMarker(0, 64, 1), {"chunk_index": 0, "chunk_offset": 64, "snapshot_id": 1}),
    (p.CustomEvent(9, b"\x00\xff"), {"schema_id": 9, "blob_len": 2, "blob": "AP8="}),
    (tier_events.warm_dropped(7), {"schema_id": 2, "event": "WarmDropped", "reclaimed_bytes": 7}),
    (tier_events.segment_retired(), {"schema_id": 3, "event": "SegmentRetired"}),
]


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


def objects(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def open_log(directory: Path) -> ManifestLogWriter:
    return ManifestLogWriter.open(Env(now_ms=lambda: NOW_MS), directory, SETTINGS)


def fill(writer: ManifestLogWriter, first: int, count: int = 4) -> None:
    """`count` segments opened, in one commit."""
    for i in range(first, first + count):
        writer.append(p.SegmentOpened(i << 12, 1), segment_id=i, logical_offset=i << 12)
    writer.commit(sync=False)


def make_log(directory: Path, chunks: int = 3, *, snapshot_after: int | None = None) -> Path:
    """`chunks` sealed chunks of four segments each and an open one; five records a chunk, markers included."""
    with open_log(directory) as writer:
        for i in range(chunks):
            fill(writer, i * 4)
            writer.rotate()
            if snapshot_after == i:
                take_snapshot(writer, replay(directory))
        fill(writer, chunks * 4)
    return directory


def make_bundle(directory: Path, first: int, last: int, *, keep: bool = False) -> Path:
    paths = [directory / f"{i}.mlog" for i in range(first, last + 1)]
    bundle = directory / f"bundle-{first}-{last}.mlogs"
    bundle.write_bytes(b"".join(path.read_bytes() for path in paths))
    if not keep:
        for path in paths:
            path.unlink()
    return bundle


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    os.chmod(path, 0o600)
    path.write_bytes(data)


def raw_chunk(directory: Path, records: list[tuple[int, int, int, bytes]], index: int = 0) -> Path:
    """A sealed chunk of (type, flags, segment_id, payload), as a newer AOF2 might have written it: no markers."""
    body = b"".join(
        RECORD_HEADER.pack(kind, flags, len(payload), segment_id, 0, NOW_MS, native.crc64(payload)) + payload
        for kind, flags, segment_id, payload in records
    )
    end = 64 + len(body)
    header = ChunkHeader(index, 0, end, end, native.crc64(body), 1)
    directory.mkdir(exist_ok=True)
    path = directory / f"{index}.mlog"
    path.write_bytes(header.pack() + body)
    return path


def batch_of(*records: p.Payload) -> RecordBatch:
    batch = RecordBatch()
    for record in records:
        batch.add(record)
    return batch
