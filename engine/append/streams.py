"""The streams of a mount: those that are open or hold records which are not sealed. All others are the catalog's alone.

Streams with new records are committed together, every `[manifest] commit_period`; a segment is ended `seal_after` its
first record. Neither looks for work: a stream says that it has some.

Owner: the trio thread. A crash leaves segments' files, which `recover.py` finds again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.aio import Tasks
from aof2.engine.append import names, rows
from aof2.engine.append.room import SegmentRoom
from aof2.engine.append.sealing import Sealing
from aof2.engine.append.segment import Segment
from aof2.engine.append.stream import Stream
from aof2.engine.catalog.rows import stream_of
from aof2.engine.errors import Aof2Error
from aof2.engine.files.ledger import Ledger
from aof2.engine.kinds.kernel import AppendState, Kernel, KernelGoneError
from aof2.engine.segment.state import StreamState
from aof2.engine.segment.writer import SegmentWriter
from aof2.engine.settings.model import AppendTenant

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

FOLDER: Final = "segments"
COMMITS_AT_ONCE: Final = 8


class Streams:
    """By the inode of their directory."""

    def __init__(self, files: Files, kernel: Kernel) -> None:
        self.files = files
        self.volume = files.volume
        self.kernel = kernel
        self.native = True  # whether the channel appends by itself
        self.ledger = Ledger()  # of segments that are not sealed
        self.tasks = Tasks()
        self.sealing = Sealing(self)
        self._by_ino: dict[int, Stream] = {}
        self._to_commit: dict[int, Stream] = {}
        self._wake = trio.Event()
        files.room.beside.append(self.ledger)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._by_ino.values()))

    def known(self, ino: int) -> Stream | None:
        return self._by_ino.get(ino)

    def get(self, ino: int) -> Stream:
        """The stream of a directory that is there."""
        stream = self._by_ino.get(ino)
        if stream is None:
            stream_id = stream_of(ino)
            tenant = self.volume.tenant_names()[stream_id]
            with self.volume.catalog.view() as view:
                position = rows.position_of(view, stream_id, ino)
            stream = self._by_ino[ino] = Stream(self, ino, tenant, self.settings(stream_id), position)
        return stream

    @contextlib.contextmanager
    def using(self, ino: int) -> Iterator[Stream]:
        """The same, for a task that waits on the way: it is this one until the block ends."""
        stream = self.get(ino)
        stream.users += 1
        try:
            yield stream
        finally:
            self.unused(stream)

    def unused(self, stream: Stream) -> None:
        """By one user: a task, or a handle."""
        stream.users -= 1
        self.let_go(stream)

    def begun_bytes(self) -> int:
        """Of lines that handles began and did not end."""
        return sum(len(handle.partial) for stream in self for handle in stream.handles.values())

    def let_go(self, stream: Stream) -> None:
        """It may have come to rest: then the catalog knows all of it."""
        if stream.is_idle:
            self._by_ino.pop(stream.ino, None)

    def settings(self, stream_id: int) -> AppendTenant:
        found = self.volume.settings.tenants.get(self.volume.tenant_names()[stream_id])
        return found if isinstance(found, AppendTenant) else AppendTenant()

    def folder(self, tenant: str, ino: int) -> Path:
        return self.volume.state_dir / FOLDER / tenant / str(ino)

    def room_of(self, stream: Stream) -> SegmentRoom:
        return SegmentRoom(self.volume, self.files.room.seeker, self.ledger, stream.tenant, stream.ino)

    # -- after a restart ---------------------------------------------------------------------------------------

    def adopt(self, ino: int, left: StreamState) -> None:
        """What recovery found: what is not the newest is sealed, the newest goes on."""
        stream = self.get(ino)
        if stream.active is not None or stream.full:
            raise ValueError(f"stream {ino} took records before what was left of it was found again")
        with self.volume.catalog.view() as view:
            ids = rows.open_segments(view, stream_of(ino))
        stream.refusal = "" if left.appendable else str(left.damaged[-1].error)
        for raw in left.sealed:
            stream.full.append(Segment(ids[raw.segment_id], self.room_of(stream), None, raw))
        for older in left.unsealed:
            writer = SegmentWriter.reopen(self.volume.env, older, reserve_step_bytes=0)
            stream.full.append(Segment(ids[older.segment_id], self.room_of(stream), writer, None))
        if left.active is not None:
            writer = SegmentWriter.reopen(self.volume.env, left.active, reserve_step_bytes=0)
            stream.active = Segment(ids[left.active.segment_id], self.room_of(stream), writer, None)
            self.has_begun(stream, stream.active)
        for segment in stream.unsealed():
            segment.room.found(segment.path.stat().st_size)
            segment.named = True  # recovery synced log and files
            segment.committed(segment.end, segment.next_logical)
        self.seal_soon(stream)

    # -- the background ----------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with self.tasks.running():
                task_status.started()
                while True:
                    await self._wake.wait()
                    await trio.sleep(self.volume.settings.manifest.commit_period_ms / 1000)
                    self._wake = trio.Event()
                    await self._commit_all()
        finally:
            for stream in self:
                for segment in (*stream.full, *([stream.active] if stream.active is not None else [])):
                    segment.close()

    def to_commit(self, stream: Stream) -> None:
        """It has records that are not committed."""
        stream.appended_s = trio.current_time()
        self._to_commit[stream.ino] = stream
        self._wake.set()

    def channel_appended(self, stream: Stream, state: AppendState) -> None:
        """By itself, so far."""
        stream.heard(state)
        self.to_commit(stream)
        if stream.is_short:
            self.tasks.begin(stream.grow_ahead)

    async def _commit_all(self) -> None:
        streams, self._to_commit = list(self._to_commit.values()), {}
        limiter = trio.CapacityLimiter(COMMITS_AT_ONCE)

        async def commit(stream: Stream) -> None:
            async with limiter:
                with contextlib.suppress(Aof2Error, OSError, KernelGoneError):  # said; fsync tells its caller
                    await stream.grow_ahead()
                    await stream.commit()

        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(commit, stream)

    async def sync_all(self) -> None:
        """What was acknowledged in any stream is on the disk when this returns."""
        for stream in self:
            await stream.commit()

    def has_begun(self, stream: Stream, segment: Segment) -> None:
        """Its first record is there: it has so long to become full."""
        self.tasks.begin(self._end_when_old, stream, segment)

    async def _end_when_old(self, stream: Stream, segment: Segment) -> None:
        with trio.move_on_after(stream.settings.seal_after_s):
            await segment.over.wait()
        if stream.active is segment:
            try:
                await stream.end_segment(segment)  # which keeps it known
            except (Aof2Error, OSError, KernelGoneError) as e:
                log.warning("a segment is not ended", extra={"path": str(segment.path), "error": str(e)})

    def refuse_writes(self) -> int:
        """The volume takes no records any more: neither does the channel; how many streams had writers."""
        writing = [stream for stream in self if stream.handles]
        self.native = False
        for stream in self:
            self.tasks.begin(stream.take_back)
        return len(writing)

    def remove_folder(self, stream: Stream) -> None:
        """The stream is gone, and has no segments. Blocks."""
        with contextlib.suppress(FileNotFoundError):
            for path in list(stream.folder.iterdir()):
                self.volume.env.files.unlink(path)
            stream.folder.rmdir()

    def seal_soon(self, stream: Stream) -> None:
        self.sealing.soon(stream)

    def appeared(self, stream: Stream, payload: bytes, segment_id: int) -> None:
        """Names came by themselves: the kernel may remember that they are not there."""
        with self.volume.catalog.view() as view:
            below = rows.segments_dir(view, stream_of(stream.ino), stream.ino)
        self.changed(stream.ino, payload)
        if below is not None:
            self.changed(below, names.index_name(segment_id))
            self.changed(below, names.raw_name(segment_id))
        with contextlib.suppress(KernelGoneError):
            self.kernel.invalidate_attr(stream.tail_ino)

    def changed(self, directory: int, name: bytes) -> None:
        """A name appeared, or went with another."""
        with contextlib.suppress(KernelGoneError):
            self.kernel.invalidate_entry(directory, name)
            self.kernel.invalidate_attr(directory)
