"""A stream: records are appended to its active segment, committed, and sealed segment by segment.

    write ──► framed ──► appended to the active segment ──► acknowledged      survives a crash of the daemon
    fsync, commit_period ──► synced, with the log that names the segment      survives a power cut: `_tail` shows it
    full, old, asked for ──► the segment is full; the next write opens one ──► sealed in order (`sealing.py`)

The active segment is the channel's while it appends by itself, and ours where a WRITE was forwarded: it is taken,
appended to, given more room or ended, and given back.

Invariants
- Records are in the order in which they were acknowledged; offsets have no gaps.
- The records of one write are in one segment where they fit into one, and in the file all at once.
- A segment is synced before records of the next one are committed, so that what survives has no gap either.
- Where a write fails, nothing of it is in the stream, or it is told how much was taken.

Owner: the trio thread. `lock` is held where the stream's end moves. A crash leaves the segments' files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2.engine.aio import result_of
from aof2.engine.append import names, rows
from aof2.engine.append.committing import Commits
from aof2.engine.append.framing import FOOTER, HEADER, OVERHEAD, fitting, frame, framing_of, record_max
from aof2.engine.append.rows import Position
from aof2.engine.append.segment import Segment
from aof2.engine.catalog.rows import stream_of
from aof2.engine.errors import os_error
from aof2.engine.kinds.kernel import PARTIAL_BYTES_MAX, AppendState, KernelGoneError
from aof2.engine.locks import Rank, task_lock
from aof2.engine.quota import Reservation
from aof2.engine.segment.writer import SegmentWriter
from aof2.engine.settings.model import AppendTenant

if TYPE_CHECKING:
    from aof2.engine.append.handles import AppendHandle
    from aof2.engine.append.streams import Streams

log = logging.getLogger(__name__)


SEALED_KEPT: Final = 1024
SHORT_BYTES: Final = 1 << 20
BEGUN_BYTES_MAX: Final = 256 << 20
FAST_S: Final = 1.0


class SealedPart(NamedTuple):
    """A segment that was sealed while it was read as `_tail`."""

    base_offset: int
    end_logical: int
    payload_ino: int


class Stream:
    """One directory's."""

    def __init__(self, streams: Streams, ino: int, tenant: str, settings: AppendTenant, position: Position) -> None:
        self._streams = streams
        self._volume = streams.volume
        self._kernel = streams.kernel
        self.ino = ino
        self.tenant = tenant
        self.settings = settings
        self.framing = framing_of(settings)
        self.record_max = record_max(settings)
        self.folder = streams.folder(tenant, ino)
        self.append_ino = names.made_up_ino(ino, names.Tag.APPEND)
        self.tail_ino = names.made_up_ino(ino, names.Tag.TAIL)
        self.position = position  # what is sealed
        self.active: Segment | None = None
        self.full: deque[Segment] = deque()  # to be sealed, in order
        self.handles: dict[int, AppendHandle] = {}
        self.users = 0  # handles and tasks: it is not forgotten
        self.tail_handles = 0
        self.refusal = ""  # why it takes no records
        self.removed = False
        self.committed_ns = 0
        self.moved = trio.Event()  # more is committed than when it was made
        self.tail_told = False  # the kernel was told how long `_tail` is
        self.sealed_lately: deque[SealedPart] = deque(maxlen=SEALED_KEPT)
        self.begins = False  # a caller waits for the upload of what is sealed
        self.sealing = False
        self.turned = trio.Event()  # a seal went well, or did not
        self.lock = task_lock(Rank.STREAM)
        self.naming = task_lock(Rank.NAMING)  # held where segments get their names, or are given up
        self._commits = Commits(self, streams)
        self._waiting = 0  # callers of `seal`
        self.hurried = trio.Event()  # what is full is to be sealed at once
        self.appended_s = 0.0  # when records last came, by the trio clock
        self._grown_s = float("-inf")  # when a segment last got room, by the same

    # -- looking -----------------------------------------------------------------------------------------------

    def unsealed(self) -> list[Segment]:
        """Segments with records that are not sealed, in order; as far as is known here."""
        last = [self.active] if self.active is not None and self.active.record_count else []
        return [segment for segment in (*self.full, *last) if not segment.dropped]

    @property
    def end_position(self) -> Position:
        """Where the next record goes."""
        left = self.unsealed()
        return left[-1].position if left else self.position

    @property
    def committed_logical(self) -> int:
        """Up to where a reader of `_tail` sees records."""
        end = self.position.next_logical
        for segment in self.unsealed():
            if segment.committed_logical == segment.base_offset:
                break
            end = segment.committed_logical
        return end

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost when it is forgotten."""
        has_none = self.active is None and not self.full and not self.sealing
        return has_none and not self.users and not self.refusal

    # -- appending ---------------------------------------------------------------------------------------------

    async def write(self, handle: AppendHandle, data: bytes) -> int:
        """How much of the data was taken: all of it, but for an error half-way of what takes several segments."""
        async with self.lock:
            self._check_writable()
            await self._take()
            try:
                return await self._write(handle, data)
            finally:
                self._give()
                self._tell_partial(handle)

    async def _write(self, handle: AppendHandle, data: bytes) -> int:
        framed = frame(self.framing, handle.partial, data, self._longest(handle))
        taken = 0
        try:
            for some in self._parts(framed.payloads):
                await self._append(some, handle.ext_id)
                taken += sum(map(len, some))
        except BaseException:
            of_data = taken - len(handle.partial)
            handle.partial = handle.partial[taken:]
            if of_data <= 0:
                raise
            return of_data
        handle.partial = framed.rest
        return len(data)

    def _longest(self, handle: AppendHandle) -> int:
        """What a line may have: less where many long ones were begun, which all wait in memory."""
        if len(handle.partial) < SHORT_BYTES or self._streams.begun_bytes() < BEGUN_BYTES_MAX:
            return self.record_max
        return min(self.record_max, SHORT_BYTES)

    def _parts(self, payloads: Sequence[memoryview | bytes]) -> list[Sequence[memoryview | bytes]]:
        """All records of a write together, unless they take more than a segment has."""
        parts: list[Sequence[memoryview | bytes]] = []
        while payloads:
            count = fitting(payloads, self.settings.segment_bytes - HEADER - FOOTER)
            parts.append(payloads[:count])
            payloads = payloads[count:]
        return parts

    async def append(self, payloads: Sequence[memoryview | bytes], ext_id: int = 0) -> int:
        """Records, in one write; the offset of the first."""
        if any(len(payload) > self.record_max for payload in payloads):
            raise os_error(errno.EMSGSIZE)
        if not all(payloads):
            raise os_error(errno.EINVAL)
        async with self.lock:
            self._check_writable()
            await self._take()
            try:
                first = self.end_position.next_logical
                for some in self._parts(payloads):
                    await self._append(some, ext_id)
                return first
            finally:
                self._give()

    def _check_writable(self) -> None:
        if self.removed:
            raise os_error(errno.ESTALE)
        if self.refusal:
            raise os_error(errno.EIO)
        self._volume.check_writable(stream_of(self.ino))

    async def _append(self, payloads: Sequence[memoryview | bytes], ext_id: int) -> None:
        size = sum(map(len, payloads)) + OVERHEAD * len(payloads)
        while True:
            segment = self.active or await self._open(ext_id)
            if size > segment.left_bytes:
                await self.rotate()
                continue
            if await self._make_room(segment, (segment.end or HEADER) + size + FOOTER):
                break
        is_first = not segment.record_count
        await segment.append(payloads, ts_ms=self._volume.env.now_ms(), ext_id=ext_id)
        if is_first:
            self._streams.has_begun(self, segment)
        self._streams.to_commit(self)

    async def _open(self, ext_id: int) -> Segment:
        at = self.end_position
        await self._admit()
        work = partial(rows.open_segment, stream_ino=self.ino, base_offset=at.next_logical)
        ids = await result_of(self._volume.writer.submit(stream_of(self.ino), work))
        env = self._volume.env
        try:
            env.failpoint("append.opened")
            env.make_dirs(self.folder)
            writer = SegmentWriter.create(
                env,
                self.folder,
                stream_id=self.ino,
                segment_id=ids.segment_id,
                base_offset=at.next_logical,
                base_record_count=at.record_count,
                ext_id=ext_id,
                capacity=self.settings.segment_bytes,
                reserve_step_bytes=0,
            )
        except OSError:
            await result_of(self._volume.writer.submit(stream_of(self.ino), partial(rows.drop_segment, ids=ids)))
            raise
        writer.last_record_ts_ms = at.last_ts_ms
        self.active = Segment(ids, self._streams.room_of(self), writer, None)
        return self.active

    async def _admit(self) -> None:
        """ENOSPC where the disk has no room for a new segment's name. What is clean makes way, and what can be clean
        soon is sent off."""
        files = self._streams.files
        if not self._volume.disk.has_room_for_names():
            await files.room.seeker.push()
            await self._volume.evictor.make_room(self.settings.segment_bytes)
        await files.admit_file()

    async def _make_room(self, segment: Segment, need_end: int) -> bool:
        """Whether the segment may grow to there; False: it is ended instead, so that it can make room itself. OSError
        where there is none to be had."""
        if need_end <= segment.room.end:
            return True
        most, waits = segment.header.max_size, not segment.record_count
        reservation = await segment.room.grow(need_end, most, is_fast=self._is_fast, wait=waits)
        if reservation is None:
            await self.rotate(begins=True)
            return False
        await self._grow(segment, reservation)
        return True

    async def _grow(self, segment: Segment, reservation: Reservation) -> None:
        """By what was reserved of the quota, on the disk."""
        end = min(segment.room.end_of(reservation), segment.header.max_size)
        try:
            await trio.to_thread.run_sync(segment.writer.reserve, end)
        except BaseException:
            reservation.release()
            raise
        segment.room.took(reservation, end)
        self._grown_s = trio.current_time()

    @property
    def _is_fast(self) -> bool:
        """Whether the room that was given last did not last long."""
        return trio.current_time() - self._grown_s < FAST_S

    def heard(self, state: AppendState) -> None:
        """The channel is so far, without having been asked."""
        if self.active is not None and self.active.at_channel:
            self.active.adopt(state)

    @property
    def is_short(self) -> bool:
        """Whether the channel has used much of the segment's room, and can be given more."""
        segment = self.active
        if segment is None or not segment.at_channel or segment.room.end >= segment.header.max_size:
            return False
        return segment.room.is_short(segment.end)

    async def grow_ahead(self) -> None:
        """The channel gets more room before it has to ask, if that is easy."""
        if self.lock.locked() or not self.is_short:
            return
        async with self.lock:
            segment = self.active
            if segment is None or not self.is_short:
                return
            most = segment.header.max_size
            reservation = await segment.room.grow(segment.room.end + 1, most, is_fast=self._is_fast, wait=False)
            if reservation is None:
                return
            with contextlib.suppress(OSError):  # the next write tells its caller
                await self._grow(segment, reservation)
                self._kernel.append_room(self.append_ino, segment.room.end)

    # -- the channel -------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """The active segment is ours."""
        segment = self.active
        if segment is not None and segment.at_channel:
            try:
                state = await self._kernel.append_take(self.append_ino)
            except KernelGoneError:  # and nothing is written any more: the file says how far it got
                self._streams.native = False
                state = await trio.to_thread.run_sync(segment.look, self._volume.env, self.append_ino)
            segment.at_channel = False
            if state is not None:
                segment.adopt(state)

    async def take_back(self) -> None:
        """The channel appends nothing from here on, until it is given the segment again."""
        async with self.lock:
            await self._take()

    def _give(self) -> None:
        """The channel appends by itself, as far as there is room."""
        segment = self.active
        if not self._streams.native or segment is None or not segment.record_count or segment.flush_failed:
            return
        segment.at_channel = True
        self._kernel.append_give(
            segment.state(self.append_ino),
            segment.writer.fd,
            stream_ino=self.ino,
            base_record_count=segment.header.base_record_count,
            room_end=segment.room.end,
            ext_id=segment.header.ext_id,
            max_size=segment.header.max_size,
            framing=self.framing,
            record_max=self.record_max,
        )

    def tell_handle(self, handle: AppendHandle) -> None:
        """Of an open that is about to be answered, or that changed."""
        if self._streams.native:
            self._kernel.append_handle(
                self.append_ino, handle.fh, ext_id=handle.ext_id, forwards=len(handle.partial) > PARTIAL_BYTES_MAX
            )

    def _tell_partial(self, handle: AppendHandle) -> None:
        """The channel goes on with the part of a line, unless it is too long for it."""
        if not self._streams.native or handle.fh not in self.handles:
            return
        too_long = len(handle.partial) > PARTIAL_BYTES_MAX
        if too_long != handle.forwards:
            handle.forwards = too_long
            self.tell_handle(handle)
        if handle.partial and not too_long:
            self._kernel.append_partial(self.append_ino, handle.fh, handle.partial)
            handle.partial = b""

    # -- committing --------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """What was acknowledged before is on the disk when this returns; one sync for all who wait."""
        await self._commits.commit()

    def has_committed(self) -> None:
        """More than before: those who follow the stream are told."""
        moved, self.moved = self.moved, trio.Event()
        moved.set()
        if self.tail_told:
            self.tail_told = False
            self._kernel.invalidate_attr(self.tail_ino)

    async def distrust(self, segment: Segment) -> None:
        """A flush failed: nothing more goes into the segment. What the file gives back whole is sealed, and says so."""
        async with self.lock:
            await self._take()
            if self.active is segment:
                await self.rotate()
            else:
                self._give()

    # -- ending a segment --------------------------------------------------------------------------------------

    async def rotate(self, *, begins: bool = False) -> None:
        """Under `lock`, and the segment is ours: the next record goes into another one."""
        segment, self.active = self.active, None
        self.begins = self.begins or begins
        if self.is_hurried:
            self._hurry()
        if segment is None:
            if self.full:
                self._streams.seal_soon(self)
            return
        if segment.flush_failed:
            async with self._commits.lock:
                lost = await trio.to_thread.run_sync(segment.read_again, self._volume.env)
            if lost:
                log.error("the disk lost records of a stream", extra={"path": str(segment.path), "bytes": lost})
        segment.dropped = segment.dropped or not segment.record_count
        self.full.append(segment)
        if self.is_hurried or len(self.full) > 1:
            self._hurry()
        self._streams.seal_soon(self)

    async def end_segment(self, only: Segment | None = None, *, begins: bool = False) -> list[Segment]:
        """The active segment is ended, if it is that one; what is to be sealed then."""
        async with self.lock:
            await self._take()
            if only is None or self.active is only:
                await self.rotate(begins=begins)
            else:
                self._give()
            return list(self.full)

    async def seal(self, *, begins: bool = False) -> int:
        """Everything that was acknowledged is sealed when this returns; how many segments. The error of one that cannot
        be, for now."""
        self._waiting += 1
        try:
            return await self._until_over(await self.end_segment(begins=begins))
        finally:
            self._waiting -= 1

    async def _until_over(self, ended: Sequence[Segment]) -> int:
        sealed = 0
        for segment in ended:
            while not segment.over.is_set():
                turned = self.turned
                await turned.wait()
                if segment.error is not None and not segment.over.is_set():
                    raise segment.error
            sealed += not segment.dropped
        return sealed

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Everything is sealed, and nothing is appended while the block runs: writers wait."""
        async with self.lock:
            self._check_writable()
            await self._take()
            self._waiting += 1
            try:
                await self.rotate()
                await self._until_over(list(self.full))
            finally:
                self._waiting -= 1
            yield

    @property
    def is_hurried(self) -> bool:
        """Whether a caller waits for what is full to be sealed, or given up."""
        return self.begins or self._waiting > 0 or any(segment.dropped for segment in self.full)

    def _hurry(self) -> None:
        hurried, self.hurried = self.hurried, trio.Event()
        hurried.set()

    async def settle(self) -> None:
        """A segment without records is given up; what was given up before is gone when this returns."""
        async with self.lock:
            await self._take()
            if self.active is not None and not self.active.record_count:
                await self.rotate()
            else:
                self._give()
            going = [segment for segment in self.full if segment.dropped]
        for segment in going:
            await segment.over.wait()

    async def write_footer(self, segment: Segment, watermark: int) -> None:
        """Not beside a commit, which uses the same descriptor."""
        async with self._commits.lock:
            if segment.flush_failed and segment.raw is None and segment.writer.refused:
                await trio.to_thread.run_sync(segment.read_again, self._volume.env)
            await trio.to_thread.run_sync(segment.put_footer, watermark)
            segment.committed(segment.end, segment.next_logical)

    async def drop_tail(self) -> tuple[int, list[int]]:
        """What is not sealed is given up; where it ended. The offsets of segments that were sealed while this waited:
        they were asked for, too."""
        async with self.lock:
            self._check_writable()
            await self._take()
            asked, end = self.unsealed(), self.end_position.next_logical
            async with self.naming:
                late = [segment.base_offset for segment in asked if segment.over.is_set() and not segment.dropped]
                left = [segment for segment in asked if not segment.over.is_set()]
                last = self.active
                if left or last is not None:
                    await self._give_up([*left, *([last] if last is not None and last not in left else [])])
            await self.rotate()
        for segment in left:
            await segment.over.wait()
        return end, late

    async def _give_up(self, left: list[Segment]) -> None:
        newest = max(segment.segment_id for segment in left)
        position = self.position._replace(segment_id=newest)
        work = partial(rows.drop_tail, stream_ino=self.ino, given_up=[one.ids for one in left], position=position)
        await result_of(self._volume.writer.submit(stream_of(self.ino), work, sync=True))
        self.position = position
        for segment in left:
            segment.dropped = True
        self._hurry()
