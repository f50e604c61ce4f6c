"""A segment that is not sealed: its file, the room that it has, and how much of it is committed.

    OPEN ── full, old, or asked for ──► FULL ── footer, files, one commit ──► gone: the catalog has it

The file is `state_dir/segments/<tenant>/<stream's inode>/<segment_id>.seg`, in the segment format. While the channel
appends to it (`at_channel`), what is known here is of when it was last asked.

Invariants
- Nothing is written beyond its room, which is reserved, of the quota and of the disk (`room.py`).
- Records before `committed_logical` survive a power cut.
- A flush that failed is not tried again: the file is read again, and what of it is whole counts.

Owner: the trio thread; the stream's lock is held where it grows. A crash leaves the file: `recover.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from aof2.engine.append.framing import FOOTER, HEADER, OVERHEAD
from aof2.engine.append.room import SegmentRoom
from aof2.engine.append.rows import Ids, Position
from aof2.engine.env import Env
from aof2.engine.kinds.kernel import AppendState
from aof2.engine.segment import repair
from aof2.engine.segment.format import SegmentHeader
from aof2.engine.segment.model import ActiveSegment, SealedSegment
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.segment.writer import SegmentWriter

INLINE_BYTES: Final = 64 << 10  # what is written at once, without a thread


def next_logical(raw: SealedSegment) -> int:
    """Where its payload ends: records of a stream have no gaps."""
    return raw.base_offset + raw.durable_bytes - HEADER - OVERHEAD * raw.record_count


class Segment:
    """One of a stream, open or full. `raw`: its footer is written, nothing is appended any more."""

    def __init__(self, ids: Ids, room: SegmentRoom, writer: SegmentWriter | None, raw: SealedSegment | None) -> None:
        self.ids = ids
        self.room = room
        self._writer = writer
        self.raw = raw
        self.committed_logical = self.base_offset
        self.committed_end = 0
        self.at_channel = False
        self.flush_failed = False
        self.named = False  # the log says durably that it was opened
        self.dropped = False  # given up: it is not to be sealed
        self.error: Exception | None = None  # why its last seal did not come about
        self.over = trio.Event()  # sealed, or given up

    @property
    def segment_id(self) -> int:
        return self.ids.segment_id

    @property
    def writer(self) -> SegmentWriter:
        if self._writer is None:
            raise ValueError(f"segment {self.segment_id} takes no records any more")
        return self._writer

    @property
    def path(self) -> Path:
        return self.raw.path if self.raw is not None else self.writer.path

    @property
    def header(self) -> SegmentHeader:
        return self.raw.header if self.raw is not None else self.writer.header

    @property
    def base_offset(self) -> int:
        return self.header.base_offset

    @property
    def next_logical(self) -> int:
        return next_logical(self.raw) if self.raw is not None else self.writer.next_logical_offset

    @property
    def end(self) -> int:
        """File offset behind the last record; 0 before the first."""
        return self.raw.durable_bytes if self.raw is not None else self.writer.end_offset

    @property
    def record_count(self) -> int:
        return self.raw.record_count if self.raw is not None else self.writer.record_count

    @property
    def last_ts_ms(self) -> int:
        return self.raw.footer.last_record_ts_ms if self.raw is not None else self.writer.last_record_ts_ms

    @property
    def position(self) -> Position:
        """Where the stream is once this is sealed."""
        records = self.header.base_record_count + self.record_count
        return Position(self.next_logical, records, self.last_ts_ms, self.segment_id)

    @property
    def left_bytes(self) -> int:
        """What records may still take of it."""
        return self.header.max_size - FOOTER - (self.end or HEADER)

    # -- appending ---------------------------------------------------------------------------------------------

    def adopt(self, state: AppendState) -> None:
        """What the channel appended."""
        if state.segment_id == self.segment_id and state.end > self.end:
            self.writer.adopt(
                end_offset=state.end,
                next_logical_offset=state.next_logical,
                record_count=state.record_count,
                crc64=state.crc64,
                ts_ms=state.last_ts_ms,
            )

    def state(self, nodeid: int) -> AppendState:
        w = self.writer
        return AppendState(
            nodeid, self.segment_id, self.end, w.next_logical_offset, w.record_count, w.crc64, w.last_record_ts_ms
        )

    def look(self, env: Env, nodeid: int) -> AppendState:
        """How far the file is. Blocks."""
        with SegmentReader(env, self.path, durable=self.end) as reader:
            tail = reader.tail
        return AppendState(
            *(nodeid, self.segment_id, tail.end_offset, tail.next_logical_offset, tail.record_count),
            *(tail.crc64, tail.last_record_ts_ms),
        )

    async def append(self, payloads: Sequence[memoryview | bytes], *, ts_ms: int, ext_id: int) -> None:
        """In one write. OSError: none of them."""
        count = len(payloads)
        times = [max(ts_ms, self.last_ts_ms)] * count  # a clock that goes back does not take records with it

        def put() -> None:
            self.writer.append_many(payloads, timestamps_ms=times, ext_ids=[ext_id] * count)

        if sum(map(len, payloads)) <= INLINE_BYTES:
            put()
        else:
            await trio.to_thread.run_sync(put)

    # -- durability --------------------------------------------------------------------------------------------

    def committed(self, end: int, logical: int) -> None:
        self.committed_end = max(self.committed_end, end)
        self.committed_logical = max(self.committed_logical, logical)

    def read_again(self, env: Env) -> int:
        """After a flush that failed: whole records, as the file gives them back, are what there is; how many bytes went
        with the others. Blocks."""
        before = self.next_logical
        self.writer.close()
        with SegmentReader(env, self.path, end=self.end) as reader:
            header, tail = reader.header, reader.tail
        active = ActiveSegment(
            *(self.path, header, tail.end_offset, tail.crc64, tail.record_count),
            *(tail.next_logical_offset, tail.last_record_ts_ms),
        )
        repair.trim(env, active)
        self._writer = SegmentWriter.reopen(env, active, reserve_step_bytes=0)
        return before - self.next_logical

    def put_footer(self, watermark: int) -> SealedSegment:
        """Nothing is appended from here on. Blocks; once more where it did not go well."""
        if self.raw is None:
            self.raw = self.writer.seal(watermark, flush_failure=self.flush_failed)
            self._writer = None
        return self.raw

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
