"""Small segments with known records, and a reading back that says everything a record is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from aof2.engine.env import Env, Files
from aof2.engine.segment.model import SealedSegment
from aof2.engine.segment.reader import Record, SegmentReader
from aof2.engine.segment.writer import SegmentWriter

STREAM_ID = 77


class Rec(NamedTuple):
    payload: bytes
    logical_offset: int
    timestamp_ms: int
    ext_id: int = 0
    flags: int = 0


def samples(version: int, base_offset: int = 1000) -> list[Rec]:
    """Five records: a gap in the logical offsets, each flag, zeros as payload, and in v3 an empty one and ext_ids."""
    v3 = version == 3
    return [
        Rec(b"first record", base_offset, 1_700_000_000_000, 5 if v3 else 0),
        Rec(bytes(9), base_offset + 12, 1_700_000_000_001, 0, 1),
        Rec(b"" if v3 else b"v2", base_offset + 40, 1_700_000_000_002, 2**64 - 1 if v3 else 0, 2),
        Rec(bytes(range(64)), base_offset + 42, 1_700_000_000_002, 0, 3),
        Rec(b"last", base_offset + 106, 1_700_000_000_009, 6 if v3 else 0),
    ]


def append(writer: SegmentWriter, rec: Rec) -> None:
    writer.append(
        rec.payload,
        timestamp_ms=rec.timestamp_ms,
        ext_id=rec.ext_id,
        flags=rec.flags,
        logical_offset=rec.logical_offset,
    )


def create(directory: Path, version: int = 3, segment_id: int = 7, env: Env | None = None, **kw: int) -> SegmentWriter:
    fields = {"stream_id": STREAM_ID, "capacity": 8192, "reserve_step_bytes": 256} | kw
    return SegmentWriter.create(env or Env(), directory, segment_id=segment_id, version=version, **fields)


def unsealed(directory: Path, version: int = 3, segment_id: int = 7) -> tuple[Path, list[Rec]]:
    records = samples(version)
    with create(directory, version, segment_id, base_offset=1000, ext_id=9) as writer:
        for rec in records:
            append(writer, rec)
        writer.flush()
    return writer.path, records


def sealed(directory: Path, version: int = 3, segment_id: int = 7) -> tuple[SealedSegment, list[Rec]]:
    records = samples(version)
    writer = create(directory, version, segment_id, base_offset=1000, ext_id=9)
    for rec in records:
        append(writer, rec)
    return writer.seal(41, flags=4), records


def plain(record: Record) -> Rec:
    return Rec(bytes(record.payload), record.logical_offset, record.timestamp_ms, record.ext_id, record.flags)


def read_all(path: Path, **kw: int) -> list[Rec]:
    with SegmentReader(Env(), path, **kw) as reader:
        return [plain(r) for r in reader.records()]


class FailingFiles(Files):
    """File operations that fail on demand: `fail[name]` is the exception the next calls of `name` raise."""

    def __init__(self) -> None:
        self.fail: dict[str, OSError] = {}
        self.calls: list[str] = []

    def _maybe(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        self._maybe("preallocate")
        super().preallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        self._maybe("truncate")
        super().truncate(fd, length)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        if "pwrite" in self.fail:  # half of it gets there
            super().pwrite(fd, data[: len(data) // 2], offset)
        self._maybe("pwrite")
        super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._maybe("fsync")
        super().fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        self._maybe("fsync_dir")
        super().fsync_dir(path)
