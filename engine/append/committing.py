"""Commits of a stream: its segments are synced in order, with the log that names them.

Invariants
- One sync for all who wait: who comes while one is under way is covered by the next.
- A segment is synced before records of the next one count as committed, so that what survives has no gap.
- A flush that failed is told to those who wait, once, and not tried again: the segment is ended (`Stream.distrust`).

Owner: the trio thread; syncing on worker threads, under `lock`. A crash leaves what was synced.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import trio

from aof2.engine.aio import result_of
from aof2.engine.append.segment import Segment
from aof2.engine.catalog.rows import stream_of
from aof2.engine.errors import FatalIOError, os_error
from aof2.engine.locks import Rank, task_lock

if TYPE_CHECKING:
    from aof2.engine.append.stream import Stream
    from aof2.engine.append.streams import Streams

log = logging.getLogger(__name__)


class Commits:
    """Of one stream."""

    def __init__(self, stream: Stream, streams: Streams) -> None:
        self._stream = stream
        self._streams = streams
        self._asked = self._answered = 0
        self.lock = task_lock(Rank.COMMIT)

    async def commit(self) -> None:
        """What was acknowledged before is on the disk when this returns."""
        self._asked += 1
        ticket = self._asked
        async with self.lock:
            if self._answered >= ticket:
                return
            covers = self._asked
            await self._commit()
            self._answered = covers

    async def _commit(self) -> None:
        stream = self._stream
        before = stream.committed_logical
        for segment in stream.unsealed():
            if segment.at_channel:
                state = await self._streams.kernel.append_state(stream.append_ino)
                if state is not None and segment.at_channel:
                    if state.end > segment.end:
                        stream.appended_s = trio.current_time()
                    segment.adopt(state)
            await self._sync(segment)
        if stream.committed_logical != before:
            stream.has_committed()

    async def _sync(self, segment: Segment) -> None:
        stream = self._stream
        end, logical = segment.end, segment.next_logical
        if end == segment.committed_end or segment.dropped:
            return
        if segment.flush_failed:
            raise os_error(errno.EIO)  # what of it is whole is on its way
        try:
            if segment.raw is None:
                await trio.to_thread.run_sync(segment.writer.flush)
            if not segment.named:
                await result_of(self._streams.volume.writer.submit(stream_of(stream.ino), lambda _: None, sync=True))
                segment.named = True
        except FatalIOError as e:
            log.critical("a stream could not be made durable", extra={"path": str(segment.path), "error": str(e)})
            segment.flush_failed = True
            self._streams.tasks.begin(stream.distrust, segment)
            raise os_error(errno.EIO) from None
        segment.committed(end, logical)
        stream.committed_ns = self._streams.volume.env.now_ns()
