"""Files whose last name is gone: their bytes go with it, or with the last close.

Invariants
- Nothing is removed that a caller has open, or is about to open, or whose name could come back (`local/doomed.py`).
- What a file was charged is given back once: by its charge while it is dirty, by what its backing file held else.

Owner: the trio thread. A crash leaves files without a name to recovery (`recover.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.files.extents import data_bytes
from aof2.engine.files.state import OpenFile, State, stream_of
from aof2.engine.local.sparse import counted_bytes

if TYPE_CHECKING:
    from aof2.engine.files.table import Files


class Removal:
    """Removes files, now or when they are closed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume
        self._known = files.known
        self._doomed = files.volume.evictor.doomed
        self._measure = partial(counted_bytes, block_bytes=files.block_bytes)
        # Of an inode without a name that stays until the kernel forgets it.
        self.stayed: Callable[[int], None] = lambda _: None

    def removed(self, row: InodeRow) -> None:
        """The last name of a regular file is gone; its bytes go with it, or with the last close."""
        self._known.went(row.ino)
        file = self._known.get(row.ino)
        stays = self._is_nameless(row.ino)
        # An open that came too late for it to stay finds nothing, and leaves nothing behind.
        if file is not None and (file.handles or (stays and self._known.is_open_here(row.ino))):
            file.unlinked = True
            if file.handles or self._known.page is None:
                return
        if self._known.page is not None and stays:
            self.stayed(row.ino)
            return
        charged = self._discard(file) if file is not None else None
        stream_id = stream_of(row.ino)
        key = (stream_id, row.ino, row.generation)
        tenant = self._volume.tenant_names()[stream_id]
        obj = self._volume.catalog.get(stream_id, t.OBJECTS, (row.ino, row.generation))
        if obj is None:
            self._volume.handles.forget(key)
            measure = data_bytes if key in self._files.parts.sealed else self._measure
            self._files.parts.sealed.discard(key)
            path = self._volume.hot.path(tenant, row.ino, row.generation)
            self._doomed.add(path, tenant, measure if charged is None else charged)
            self._volume.recent.hot.forget(row.ino)
        else:
            self._volume.recent.hot.unwanted(row.ino)
        if obj is not None and charged is not None:
            self._volume.evictor.give_back(tenant, charged)

    def _is_nameless(self, ino: int) -> bool:
        """Whether it stayed, for those who have it open: the channel alone knows of them."""
        return self._volume.catalog.get(stream_of(ino), t.NAMELESS, ino) is not None

    def _discard(self, file: OpenFile) -> int | None:
        """A file without a handle is forgotten; what it was charged, if it is dirty."""
        if file.state is State.GONE:
            return None
        file.seal_attempt += 1
        self._files.sealer.wait(file)
        file.close_fd()
        dirty = file.dirty
        if file.base is not None:
            if dirty:
                file.base.close_file()
            else:
                self._volume.hydrator.close(file.base)
        self._known.forget(file)
        return file.charged_bytes if dirty else None

    async def closed_nameless(self, file: OpenFile) -> None:
        """The last close of a file without a name."""
        row = await self._drop_inode(file.ino)
        charged = self._discard(file)
        if charged is not None:
            self._doomed.add(file.path, file.tenant, charged)
        elif row is not None:
            self.removed(row)

    async def _drop_inode(self, ino: int) -> InodeRow | None:
        work = partial(namespace.drop_nameless, ino=ino)
        return await result_of(self._volume.writer.submit(stream_of(ino), work))

    def nameless(self, ino: int) -> None:
        """Another file took its last name. A caller that looked that up a moment ago may still open this one."""
        file = self._known.get(ino)
        if file is not None:
            file.unlinked = True
            if not file.handles:
                file.seal_attempt += 1
                self._files.sealer.wait(file)

    async def drop_nameless(self, ino: int) -> None:
        """The kernel forgot a file without a name: its bytes go, unless it is open after all."""
        async with self._known.holding(ino):
            if self._known.is_open_here(ino):
                return
            file = self._known.get(ino)
            if file is not None:
                await self.closed_nameless(file)
                return
            row = await self._drop_inode(ino)
            if row is not None:
                self.removed(row)

    def linked(self, ino: int) -> None:
        """A file without a name got one again (O_TMPFILE, then link)."""
        file = self._known.get(ino)
        if file is not None:
            file.unlinked = False
