"""The kind `append`: each directory is a stream. Names of what is sealed are rows of the catalog, and what they name
are files as those of kind `files` are, in the same file table; `_append`, `_tail` and raw segments are made up
(`names.py`).

Invariants
- What is sealed never changes: opening it to write, cutting it, another name for it are EPERM; so is any file that a
  caller would make here.
- A payload file and its index come and go together.
- `_append`, `.segments` and what is in that belong to the stream: removing them changes nothing, so that `rm -r` of a
  stream gets to its payload files and its directory. Removing `_tail` gives up what it shows.

Owner: the trio thread. A crash leaves segments' files: `recover.py`.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final

import trio

from aof2.engine import namespace
from aof2.engine.append import arriving, names, rows
from aof2.engine.append.delivery import Delivery
from aof2.engine.append.handles import AppendHandle, RawHandle, TailHandle
from aof2.engine.append.names import Tag
from aof2.engine.append.recover import recover as recover
from aof2.engine.append.stream import Stream
from aof2.engine.append.streams import Streams
from aof2.engine.append.tree import StreamTree
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import DeliveryRow, InodeRow, stream_of
from aof2.engine.errors import Aof2Error, os_error
from aof2.engine.files.kind import FilesKind
from aof2.engine.files.kind import make as make_files
from aof2.engine.files.state import wants_write
from aof2.engine.inbox.check import CheckedJob
from aof2.engine.kinds import facts
from aof2.engine.kinds.kernel import AppendState
from aof2.engine.kinds.kind import AttributeChange, Caller, Delivered, StagedJob, Truncated, Unsealed, Way, refuse
from aof2.engine.kinds.registry import Surroundings

FILES_NUMBER: Final = 0
SEAL_AT_END_MAX_S: Final = 30.0
EXT_ID: Final = b"user.aof2.ext_id"
EXT_ID_MAX: Final = (1 << 64) - 1


def make(at: Surroundings) -> AppendKind:
    return AppendKind(at)


class AppendKind(StreamTree):
    """All tenants of kind `append` of one mount."""

    def __init__(self, at: Surroundings) -> None:
        self._opens = at.opens
        self._kernel = at.kernel
        # Sealed files are in the mount's one file table; where no tenant has files, that is run here.
        made = at.made.get(FILES_NUMBER)
        of_files = made if isinstance(made, FilesKind) else make_files(at._replace(tenants={}))
        self._own_files = of_files if of_files is not made else None
        self.files = of_files.files
        super().__init__(at.volume, at.tenants, Streams(self.files, at.kernel))

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            if self._own_files is not None:
                await nursery.start(self._own_files.run)
            await nursery.start(self.streams.run)
            for ino, left in self.volume.streams_left.items():
                self.streams.adopt(ino, left)
            task_status.started()

    async def end(self) -> None:
        with trio.move_on_after(SEAL_AT_END_MAX_S), contextlib.suppress(Aof2Error, OSError):
            for stream in self.streams:
                for handle in list(stream.handles.values()):
                    await handle.close()  # the mount went under its writer
            await self.seal()
        if self._own_files is not None:
            await self._own_files.end()

    def way(self) -> Way | None:
        return self._own_files.way() if self._own_files is not None else None

    def stop_ahead(self) -> None:
        if self._own_files is not None:
            self._own_files.stop_ahead()

    def refuse_writes(self) -> int:
        return self.streams.refuse_writes()

    # -- names: changing ---------------------------------------------------------------------------------------

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> InodeRow:
        self._check_new(parent, name)
        self.volume.disk.admit_name()
        work = partial(
            rows.make_stream, parent=parent, name=name, mode=stat.S_IMODE(mode), uid=caller.uid, gid=caller.gid
        )
        row: InodeRow = await self.change(parent, work)
        return row

    def _check_new(self, parent: int, name: bytes) -> None:
        """A stream may be made, or moved, there."""
        if self._is_segments_dir(self.row(parent)) or self._is_reserved(parent, name):
            raise os_error(errno.EPERM if self.find(parent, name) is None else errno.EEXIST)

    async def unlink(self, parent: int, name: bytes) -> None:
        row = self.find(parent, name)
        if row is None:
            raise os_error(errno.ENOENT)
        if stat.S_ISDIR(row.mode):
            raise os_error(errno.EISDIR)
        of = names.made_up(row.ino)
        if of is not None and of.tag is Tag.TAIL:
            await self.drop_tail(of.of)
        elif of is None and not self._is_segments_dir(self.row(parent)):
            await self.unlink_segment(parent, name)

    async def unlink_segment(self, parent: int, name: bytes) -> None:
        """A sealed segment goes, with its index."""
        work = partial(rows.unlink_segment, payload=(parent, name), is_open=self.files.known.must_stay)
        self.went(await self.change(parent, work))

    def went(self, gone: Sequence[InodeRow]) -> None:
        """Files of segments that lost their names."""
        for row in gone:
            self.files.known.went(row.ino)
            if row.nlink:
                continue
            if not self.files.known.is_open(row.ino):
                self.lost_its_name(row)
            self.files.removal.removed(row)
            self.streams.changed(row.parent, row.last_name)
            if row.last_name.endswith(names.INDEX_SUFFIX):
                self.streams.changed(row.parent, self._raw_of(row.last_name))

    async def drop_tail(self, ino: int) -> int:
        """What is not sealed is given up; how many bytes."""
        with self.streams.using(ino) as stream:
            before = stream.position.next_logical
            end, late = await stream.drop_tail()
            for base_offset in late:
                with contextlib.suppress(FileNotFoundError):
                    await self.unlink_segment(ino, names.payload_name(base_offset, stream.settings.ext))
            return end - before

    async def rmdir(self, parent: int, name: bytes) -> None:
        row = self.find(parent, name)
        if row is None or not stat.S_ISDIR(row.mode):
            raise os_error(errno.ENOENT if row is None else errno.ENOTDIR)
        if name == names.SEGMENTS:
            return
        await self._without(row, partial(rows.remove_stream, parent=parent, name=name))

    async def _without(self, row: InodeRow, work: Callable[[Batch], list[InodeRow]]) -> None:
        """A change that removes a stream. ENOTEMPTY while it has records."""
        with self.streams.using(row.ino) as stream:
            await stream.settle()
            async with stream.lock:
                if stream.active is not None or stream.full:
                    raise os_error(errno.ENOTEMPTY)
                for gone in await self.change(row.ino, work):
                    self.lost_its_name(gone)
                stream.removed = True
            await trio.to_thread.run_sync(self.streams.remove_folder, stream)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, *, replace: bool, exchange: bool
    ) -> None:
        row, target = self.find(parent, name), self.find(new_parent, new_name)
        if row is None:
            raise os_error(errno.ENOENT)
        if not self._is_stream(row):
            refuse()
        self._check_new(new_parent, new_name)
        self.volume.disk.admit_name()
        move = partial(
            namespace.rename,
            parent=parent,
            name=name,
            new_parent=new_parent,
            new_name=new_name,
            replace=replace,
            exchange=exchange,
        )
        if target is None or exchange or not replace or target.ino == row.ino:
            await self.change(parent, move)
            return

        def over(b: Batch) -> list[InodeRow]:
            gone = rows.remove_stream(b, new_parent, new_name)
            move(b)
            return gone

        await self._without(target, over)

    # -- attributes --------------------------------------------------------------------------------------------

    def space(self, ino: int) -> tuple[int, int]:
        return self.files.room.space(self.tenants.get(stream_of(ino)))

    def get_xattr(self, ino: int, name: bytes, caller: Caller | None = None) -> bytes | None:
        of = names.made_up(ino)
        if name == EXT_ID and of is not None and of.tag is Tag.APPEND:
            return next((b"%d" % handle.ext_id for handle in self._handles_of(of.of, caller)), None)
        of_ino = ino if of is None else of.of
        stream = self.streams.known(of_ino)
        if name == facts.DURABLE and stream is not None and stream.unsealed():
            return b"0"
        if of is not None and (name != facts.DURABLE or of.tag is not Tag.RAW):
            return None
        return super().get_xattr(of_ino, name, caller)

    def list_xattrs(self, ino: int) -> Sequence[bytes]:
        if names.made_up(ino) is not None:
            return []
        return [name for name in super().list_xattrs(ino) if not name.startswith(rows.OWN_XATTRS)]

    async def resize(self, row: InodeRow, size: int) -> None:
        raise os_error(errno.EISDIR if stat.S_ISDIR(row.mode) else errno.EPERM)

    async def set_attributes(self, ino: int, change: AttributeChange, caller: Caller) -> InodeRow:
        of = names.made_up(ino)
        if of is None:
            return await super().set_attributes(ino, change, caller)
        owned = (change.mode, change.uid, change.gid) == (None, None, None)
        if not owned or (change.size is not None and of.tag is not Tag.APPEND):
            refuse()
        return self.row(ino)  # what is written is appended, whatever was to be cut before

    async def set_xattr(self, ino: int, name: bytes, value: bytes, caller: Caller | None = None) -> None:
        of = names.made_up(ino)
        if of is None:
            await super().set_xattr(ino, name, value)
        elif of.tag is Tag.APPEND and name == EXT_ID:
            self._set_ext_id(self._handles_of(of.of, caller), value)
        else:
            refuse()

    def _handles_of(self, ino: int, caller: Caller | None) -> list[AppendHandle]:
        """Opens of `_append` by the process that asks: an attribute is set of an inode, which all share."""
        stream, process = self.streams.known(ino), process_of(caller.pid if caller is not None else 0)
        handles = stream.handles.values() if stream is not None else ()
        return [handle for handle in handles if handle.process == process]

    def _set_ext_id(self, handles: Sequence[AppendHandle], value: bytes) -> None:
        """What the handles write from here on has this number."""
        if not value.isdigit() or int(value) > EXT_ID_MAX:
            raise os_error(errno.EINVAL)
        if not handles:
            raise os_error(errno.EPERM)  # it has not opened it
        for handle in handles:
            handle.ext_id = int(value)
            handle.stream.tell_handle(handle)

    async def remove_xattr(self, ino: int, name: bytes) -> None:
        if names.made_up(ino) is not None:
            refuse()
        await super().remove_xattr(ino, name)

    async def forget(self, ino: int) -> None:
        await super().forget(ino)
        self.files.kept.forget(ino)

    # -- bytes -------------------------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        of = names.made_up(ino)
        if of is None:
            if wants_write(flags):
                refuse()
            return await self.files.open(ino, flags)
        row = self.row(of.of)
        if of.tag is Tag.APPEND:
            if wants_write(flags):
                self.volume.check_writable(stream_of(ino))
            return self._open_append(self.streams.get(row.ino), caller)
        if wants_write(flags):
            refuse()
        if of.tag is Tag.TAIL:
            return self._put(TailHandle(self.streams, self._opens, self.streams.get(row.ino)))
        handle = RawHandle(self.streams, self._opens, ino, names.payload_ino(row.ino), row.ino)
        await handle.open()
        return self._put(handle)

    def _open_append(self, stream: Stream, caller: Caller) -> int:
        handle = AppendHandle(self.streams, self._opens, stream, process_of(caller.pid))
        stream.tell_handle(handle)
        return self._put(handle)

    def _put(self, handle: AppendHandle | TailHandle | RawHandle) -> int:
        self._opens.put(handle.fh, handle)
        return handle.fh

    async def sync_all(self) -> None:
        await self.streams.sync_all()
        await super().sync_all()

    # -- what verbs ask for ------------------------------------------------------------------------------------

    takes_files = False

    async def truncate_stream(self, ino: int, before: int | None) -> Truncated:
        size = segments = 0
        if before is None:
            size = await self.drop_tail(ino)
        for row in self.payloads(ino):
            if before is not None and names.base_offset_of(row.last_name) + row.size <= before:
                await self.unlink_segment(ino, row.last_name)
                segments, size = segments + 1, size + row.size
        left = [names.base_offset_of(row.last_name) for row in self.payloads(ino)]
        with self.streams.using(ino) as stream:
            return Truncated(segments, size, min(left, default=stream.position.next_logical))

    async def take_in(self, tenant_id: int, job: CheckedJob) -> DeliveryRow:
        return await arriving.take_in(self, tenant_id, job)

    async def deliver(self, ino: int, job: StagedJob) -> Delivered:
        """Records that were staged are in the stream when this returns, all of them, whatever was said before."""
        with self.streams.using(ino) as stream:
            done, gone = await Delivery(self.streams, stream, job).run(self.files.known.must_stay)
            self.went(gone)
            return done

    def delivered(self, ino: int, job_id: bytes) -> Delivered | None:
        with self.volume.catalog.view() as view:
            return rows.delivered(view, stream_of(ino), ino, job_id)

    def is_open(self, ino: int) -> bool:
        return self.files.known.is_open(ino)

    def is_unsealed(self, ino: int) -> bool:
        return self.files.known.get(ino) is not None

    def open_inos(self) -> set[int]:
        return self.writing() | {stream.tail_ino for stream in self.streams if stream.tail_handles}

    def open_count(self) -> int:
        return sum(len(stream.handles) + stream.tail_handles for stream in self.streams)

    def writing(self) -> set[int]:
        return {stream.append_ino for stream in self.streams if stream.handles}

    def unsealed(self) -> Unsealed:
        return Unsealed(self.streams.ledger.files, self.streams.ledger.bytes)

    def unsealed_inos(self) -> set[int]:
        return {stream.ino for stream in self.streams if stream.unsealed()}

    async def seal(self, inos: Collection[int] | None = None, *, begin: bool = False) -> int:
        """Of these directories, or all."""
        sealed = 0
        for stream in self.streams:
            if inos is None or stream.ino in inos:
                with self.streams.using(stream.ino):
                    sealed += await stream.seal(begins=begin)
        return sealed

    def undelete(self, b: Batch, ino: int, parent: int, name: bytes) -> InodeRow:
        if not names.is_payload_name(name, self._ext(parent)):
            raise os_error(errno.EPERM, name)  # an index comes back with its payload file
        return rows.undelete_segment(b, ino, parent, name)

    def undeleted(self, row: InodeRow) -> None:
        index = self.row(names.index_ino(row.ino))
        self.streams.changed(row.parent, row.last_name)
        self.streams.changed(index.parent, index.last_name)
        self.streams.changed(index.parent, self._raw_of(index.last_name))

    def holding(self, ino: int) -> AbstractAsyncContextManager[None]:
        return self.files.known.holding(ino)

    async def drop_kernel_pages(self, ino: int) -> None:
        await self.files.drop_kernel_pages(ino)

    # -- what the channel tells --------------------------------------------------------------------------------

    def refused(self, ino: int) -> None:
        self.files.refused(ino)

    def appended(self, state: AppendState) -> None:
        of = names.made_up(state.nodeid)
        stream = self.streams.known(of.of) if of is not None else None
        if stream is not None:
            self.streams.channel_appended(stream, state)

    def partial(self, nodeid: int, fh: int, data: bytes) -> None:
        handle = self._opens.find(fh)
        if isinstance(handle, AppendHandle):
            handle.partial = data


def process_of(pid: int) -> int:
    """The process of a thread: the kernel tells which thread asks."""
    try:
        with open(f"/proc/{pid}/status", "rb") as f:
            return next(int(line.split()[1]) for line in f if line.startswith(b"Tgid:"))
    except (OSError, StopIteration):
        return pid
