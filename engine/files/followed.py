"""The kind `files` on a follower: names and attributes are the writer's, bytes come from the remote into own caches.

What is shown of a file is a generation that can be read here: the one that is open, as long as it is (each open → close
sees one); else that of the row, if it is published; else the last one that is. A file that has none yet is shown as its
row says, and cannot be opened before it is in the remote (EAGAIN); an open waits a moment where its upload was begun.

Invariants
- Nothing here changes a row that is not this machine's own.
- The kernel is told of each name and inode that a replay changed, after the rows have it.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import errno
import logging
import stat

import msgspec
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import uploads_begun
from aof2.engine.catalog.rows import InodeRow, ObjectRow, ObjectState, stream_of
from aof2.engine.catalog.store import View
from aof2.engine.errors import os_error
from aof2.engine.files.cold import COLD_SCAN
from aof2.engine.files.kind import FilesKind
from aof2.engine.files.loading import Loader
from aof2.engine.files.state import OpenFile, wants_write
from aof2.engine.files.table import Files, HandleListener
from aof2.engine.follow.ownrows import Changes
from aof2.engine.kinds.catalogued import CAPABILITY
from aof2.engine.kinds.kind import Caller
from aof2.engine.kinds.registry import Surroundings

log = logging.getLogger(__name__)

_MS_IN_NS = 1_000_000
TOLD_MAX = 10_000
PUBLISHED_MAX_S = 2.0
PUBLISHED_LOOK_S = 0.05
_HERE = (ObjectState.PUBLISHED, ObjectState.TOMBSTONED)


def shown(view: View, row: InodeRow) -> InodeRow:
    """The row, of the newest generation that the remote has."""
    if not stat.S_ISREG(row.mode):
        return row
    stream_id = stream_of(row.ino)
    obj = view.get(stream_id, t.OBJECTS, (row.ino, row.generation))
    if obj is not None and obj.state in _HERE:
        return row
    older = _last_published(view, stream_id, row)
    if older is None:
        return row
    return msgspec.structs.replace(
        row,
        generation=older.generation,
        size=older.size,
        hole_bytes=older.hole_bytes,
        mtime_ns=min(row.mtime_ns, older.sealed_ms * _MS_IN_NS),
    )


def _last_published(view: View, stream_id: int, row: InodeRow) -> ObjectRow | None:
    found = view.scan(stream_id, t.OBJECTS, prefix=row.ino.to_bytes(8, "big"))
    older = [obj for _, obj in found if obj.generation < row.generation and obj.state == ObjectState.PUBLISHED]
    return max(older, key=lambda obj: obj.generation, default=None)


class FollowedLoader(Loader):
    """Opens what is shown."""

    async def load(self, ino: int) -> tuple[InodeRow, OpenFile]:
        row, obj = self._shown(ino)
        if obj is not None and self._is_announced(obj):
            row, obj = await self._until_published(ino)
        file = self._files.known.get(ino)
        if file is None:
            if obj is None:
                raise os_error(errno.ESTALE)
            if obj.state not in _HERE:
                raise os_error(errno.EAGAIN)  # its bytes are on their way to the remote
            file = await self._make(row, obj, None)
            self._files.known.add(file)
        return row, file

    def _shown(self, ino: int) -> tuple[InodeRow, ObjectRow | None]:
        stream_id = stream_of(ino)
        with self._volume.catalog.view() as view:
            row = view.get(stream_id, t.INODES, ino)
            if row is None or (not row.nlink and view.get(stream_id, t.NAMELESS, ino) is None):
                raise os_error(errno.ESTALE)
            row = shown(view, row)
            return row, view.get(stream_id, t.OBJECTS, (ino, row.generation))

    def _is_announced(self, obj: ObjectRow) -> bool:
        """Whether its blob is in the remote, or about to be: a caller on the writer may have been told that it is."""
        if obj.state != ObjectState.SEALED:
            return False
        stream_id = stream_of(obj.ino)
        with self._volume.catalog.view() as view:
            return all(uploads_begun(view, stream_id, chunk_id) for chunk_id in obj.data_chunks)

    async def _until_published(self, ino: int) -> tuple[InodeRow, ObjectRow | None]:
        """The writer may answer `wait` before the log that publishes is there: it comes a moment later."""
        following = self._volume.following
        deadline_s = trio.current_time() + PUBLISHED_MAX_S
        while True:
            asked = following is not None and await following.at_end(stream_of(ino))
            row, obj = self._shown(ino)
            if not asked or obj is None or not self._is_announced(obj) or trio.current_time() > deadline_s:
                return row, obj
            await trio.sleep(PUBLISHED_LOOK_S)


class FollowedFiles(FilesKind, HandleListener):
    """All tenants of kind `files` of a follower's mount; the file table is that of all kinds."""

    def __init__(self, at: Surroundings) -> None:
        super().__init__(at, Files(at.volume, at.kernel, at.opens, make_loader=FollowedLoader, listener=self))
        self._at_open: dict[int, InodeRow] = {}  # of open files: what was shown when they were opened first
        if at.volume.following is not None:
            at.volume.following.hear(self._changed)

    # -- what is shown -----------------------------------------------------------------------------------------

    def row(self, ino: int) -> InodeRow:
        try:
            return self._shown(super().row(ino))
        except FileNotFoundError:
            opened = self._at_open.get(ino)
            if opened is None:
                raise
            return msgspec.structs.replace(opened, nlink=0)  # the writer removed it; it is open here

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        row = super().find(parent, name)
        return None if row is None else self._shown(row)

    def entries(self, ino: int, after: bytes | None, count: int) -> list[tuple[bytes, InodeRow]]:
        return [(name, self._shown(row)) for name, row in super().entries(ino, after, count)]

    def _shown(self, row: InodeRow) -> InodeRow:
        opened = self._at_open.get(row.ino)
        if opened is not None:
            return msgspec.structs.replace(
                row,
                generation=opened.generation,
                size=opened.size,
                hole_bytes=opened.hole_bytes,
                mtime_ns=opened.mtime_ns,
            )
        with self.volume.catalog.view() as view:
            return shown(view, row)

    # -- opens -------------------------------------------------------------------------------------------------

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        if wants_write(flags):
            raise os_error(errno.EROFS)
        following = self.volume.following
        if following is not None and following.is_stale:
            await self.at_end(ino)
        try:
            fh = await self.files.open(ino, flags)
        except OSError as e:
            # Its bytes may be there by now.
            if e.errno not in (errno.EAGAIN, errno.ESTALE) or not await self.at_end(ino):
                raise
            fh = await self.files.open(ino, flags)
        return fh

    def handle_given(self, file: OpenFile, fh: int) -> None:
        ino = file.ino
        row = self.volume.catalog.get(stream_of(ino), t.INODES, ino) if ino not in self._at_open else None
        if row is not None and file.base is not None:
            row = self._shown(row)
            if row.generation != file.key[2]:  # it was published between the two looks
                row = msgspec.structs.replace(row, generation=file.key[2], size=file.base.size)
            self._at_open[ino] = row
        if self.volume.following is not None:
            self.volume.following.opened(fh, stream_of(ino))

    def handle_closed(self, file: OpenFile, fh: int) -> None:
        if self.volume.following is not None:
            self.volume.following.closed(fh)
        if file.handles:
            return
        opened = self._at_open.pop(file.ino, None)
        if opened is not None and self.volume.catalog.get(stream_of(file.ino), t.OBJECTS, file.key[1:]) is None:
            self._without_rows(file.ino, file.key[2], 0)
        self.kernel.invalidate_attr(file.ino)  # another generation may be shown from here on

    # -- what the writer changed -------------------------------------------------------------------------------

    def _changed(self, changes: Changes) -> None:
        """On the trio thread, after a replay."""
        if len(changes.names) + len(changes.inos) <= TOLD_MAX:
            self._tell_kernel(changes)
        for ino, name in changes.xattrs:
            if name in (CAPABILITY, COLD_SCAN):
                self._xattr_is(ino, name, self.volume.catalog.get(stream_of(ino), t.XATTRS, (ino, name)))
        for (ino, generation), size in changes.gone.items():
            self._without_rows(ino, generation, size, changes.stream_id)
        slots = [(changes.stream_id, chunk_id) for chunk_id in changes.cooled]
        if slots:
            self.volume.warm.drop(slots)

    def _tell_kernel(self, changes: Changes) -> None:
        """What it holds of these goes now; what it is not told of goes within the second for which it may keep it."""
        for parent, name in changes.names:
            self.kernel.invalidate_entry(parent, name)
        for parent in {parent for parent, _ in changes.names}:
            self.kernel.invalidate_inode(parent)
        for ino in changes.inos:
            self.kernel.invalidate_attr(ino)

    def _without_rows(self, ino: int, generation: int, size: int, stream_id: int | None = None) -> None:
        """An object lost its rows: what is here of it goes, once it is closed."""
        stream_id = stream_of(ino) if stream_id is None else stream_id
        key = (stream_id, ino, generation)
        tenant = self.volume.tenant_names().get(stream_id)
        if tenant is None:
            return
        if size:
            self.volume.quota.release_used(tenant, size)
        file = self.files.known.get(ino)
        if file is not None and file.key == key:
            return  # open: with its last close
        if self.volume.catalog.get(stream_id, t.OBJECTS, (ino, generation)) is not None:
            return
        handle = self.volume.handles.peek(key)
        if handle is not None and handle.users:
            return  # a read-ahead has it: the next start sweeps what is left
        self.volume.handles.forget(key)
        self.volume.recent.hot.forget(ino)
        self.volume.evictor.doomed.add(self.volume.hot.path(tenant, ino, generation), tenant, 0)
