"""Stream directories on an ordinary disk, laid out as the mount shows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from aof2.engine.env import Env
from aof2.engine.segment.index import split
from aof2.engine.segment.writer import SegmentWriter

STREAM_ID = 77
FIRST_MS = 1_700_000_000_000


class Row(NamedTuple):
    offset: int
    timestamp_ms: int
    ext_id: int
    flags: int
    segment_id: int
    payload: bytes


class Stream:
    """A stream under construction: `append` and `seal`, and what is sealed is there as a mount would show it."""

    def __init__(self, path: Path, ext: str = "jsonl") -> None:
        self.path = path
        self.ext = ext
        self.rows: list[Row] = []
        self._next_id = 5
        self._raw = path.parent / f"{path.name}.raw"
        (path / ".segments").mkdir(parents=True)
        (path / "_append").touch()
        (path / f"_tail.{ext}").touch()
        self._raw.mkdir()

    @property
    def end(self) -> int:
        return self.rows[-1].offset + len(self.rows[-1].payload) if self.rows else 0

    def seal(
        self, payloads: list[bytes], *, ext_ids: list[int] | None = None, flags: list[int] | None = None
    ) -> list[Row]:
        """One more sealed segment of these records; times go on by a second each."""
        segment_id, base = self._next_id, self.end
        self._next_id += 3  # other streams of the tenant take numbers too
        env = Env()
        capacity = sum(map(len, payloads)) + 36 * len(payloads) + 4096
        writer = SegmentWriter.create(
            env, self._raw, stream_id=STREAM_ID, segment_id=segment_id, base_offset=base,
            base_record_count=len(self.rows), capacity=capacity,
        )  # fmt: skip
        times = [FIRST_MS + 1000 * (len(self.rows) + i) for i in range(len(payloads))]
        ids, bits = ext_ids or [0] * len(payloads), flags or [0] * len(payloads)
        writer.append_many(payloads, timestamps_ms=times, ext_ids=ids, flags=bits, logical_offset=base)
        sealed = writer.seal(1)
        self._publish(sealed.path, segment_id, base)
        made = []
        for payload, time_ms, ext_id, flag in zip(payloads, times, ids, bits, strict=True):
            made.append(Row(base, time_ms, ext_id, flag, segment_id, payload))
            base += len(payload)
        self.rows += made
        return made

    def _publish(self, raw: Path, segment_id: int, base: int) -> None:
        payload, index = self.payload(base), self.path / ".segments" / f"{segment_id}.idx"
        with raw.open("rb") as r, payload.open("wb") as p, index.open("wb") as i:
            split(r.fileno(), p.fileno(), i.fileno())

    def payload(self, base: int) -> Path:
        return self.path / f"{base:020}.{self.ext}"

    def index(self, segment_id: int) -> Path:
        return self.path / ".segments" / f"{segment_id}.idx"


def lines(count: int, size: int = 40, first: int = 0) -> list[bytes]:
    return [b'{"n": %d, "text": "%s"}\n' % (first + i, b"x" * (i * 7 % size)) for i in range(count)]


def patch(path: Path, at: int, mask: int = 1) -> None:
    """Flips bits of one byte."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ mask]), at)
    finally:
        os.close(fd)
