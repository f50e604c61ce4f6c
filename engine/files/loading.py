"""From the catalog to a file that can be opened, and from clean to dirty.

Invariants
- A file is dirty in the catalog, durably, before its first writer may write.
- The backing file of a dirty file is named after its generation; recovery sees to that after a crash (`recover.py`).
- What is not here of a file that becomes dirty is a hole before the catalog says which blocks are.

Owner: the trio thread, under `Known.holding`. A crash leaves a dirty file with the bytes it had.
"""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING

import trio

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import DirtyRow, InodeRow, ObjectRow, ObjectState
from aof2.engine.errors import os_error
from aof2.engine.files import marks
from aof2.engine.files.state import OpenFile, Stamp, State, stream_of
from aof2.engine.local.handles import ObjectHandle, Use

if TYPE_CHECKING:
    from aof2.engine.files.table import Files


class Loader:
    """Brings files to where they can be opened."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume

    def new(self, row: InodeRow) -> OpenFile:
        """A file that was just created. Its backing file's name is not durable yet."""
        file = self._of(row, State.DIRTY_WHOLE)
        file.new_name = True
        return file

    def _of(self, row: InodeRow, state: State) -> OpenFile:
        stream_id = stream_of(row.ino)
        tenant = self._volume.tenant_names()[stream_id]
        path = self._volume.hot.path_text(tenant, row.ino, row.generation)
        return OpenFile((stream_id, row.ino, row.generation), tenant, path, state)

    async def load(self, ino: int) -> tuple[InodeRow, OpenFile]:
        """The file as the catalog has it, known from here on; ESTALE where there is none."""
        stream_id = stream_of(ino)
        with self._volume.catalog.view() as view:
            row = view.get(stream_id, t.INODES, ino)
            if row is not None and not row.nlink and view.get(stream_id, t.NAMELESS, ino) is None:
                row = None  # what is left of it is for undelete
            obj = view.get(stream_id, t.OBJECTS, (ino, row.generation)) if row is not None else None
            dirty = view.get(stream_id, t.DIRTY, ino) if obj is not None and obj.state == ObjectState.DIRTY else None
        if row is None or obj is None:
            raise os_error(errno.ESTALE)
        file = self._files.known.get(ino)
        if file is None:
            file = await self._make(row, obj, dirty)
            self._files.known.add(file)
        file.unlinked = row.nlink == 0
        return row, file

    async def _make(self, row: InodeRow, obj: ObjectRow, dirty: DirtyRow | None) -> OpenFile:
        if obj.state == ObjectState.DIRTY:
            return await self._resume_dirty(self._of(row, State.DIRTY_WHOLE), obj, dirty)
        file = self._of(row, State.CLEAN)
        file.base, file.base_len = await self._volume.hydrator.open(file.key, file.tenant), obj.size
        return file

    async def _resume_dirty(self, file: OpenFile, obj: ObjectRow, dirty: DirtyRow | None) -> OpenFile:
        """A dirty file from before a restart."""
        file.new_name = True
        if dirty is not None and dirty.present:
            file.noted_partial = True
            base = None
            if dirty.base_generation:
                base = await self._volume.hydrator.open((file.key[0], file.ino, dirty.base_generation), file.tenant)
                self._volume.handles.detach(base.key)
                base.close_file()
            base = await trio.to_thread.run_sync(self._files.parts.resume, file, obj, dirty, base)
            # A crash may have come between cutting the file and saying so.
            file.become(State.DIRTY_PARTIAL, base, min(dirty.base_len, file.stat().st_size))
            self._files.parts.forget_behind(file)
        self._files.charges.charge(file)
        return file

    async def make_writable(self, file: OpenFile, row: InodeRow, *, keep: bool) -> None:
        """Marks a clean file dirty, durably. `keep`: its bytes are still wanted."""
        file.seal_attempt += 1
        if file.dirty:
            return
        base = file.source
        base.become(Use.CLAIMED)  # from here on; what was fetched the other way is waited for
        try:
            reopened, whole = await self._mark_dirty(file, base)
        except BaseException:  # the file stays clean
            if base.use is Use.CLAIMED:
                base.become(Use.SHARED)
            raise
        file.mappable = False  # it was sealed: no mapping of before is left
        self._volume.handles.detach(file.key)
        self._rename(file, reopened.row.generation)
        base.path = file.path
        if whole:
            base.close_file()
            file.become(State.DIRTY_WHOLE)
        else:
            file.become(State.DIRTY_PARTIAL, base, base.size)
        file.noted_partial = file.partial
        file.charged_bytes += reopened.freed_bytes
        if keep:
            os.utime(file.path, ns=(row.atime_ns, row.mtime_ns))
            file.clean_stamp = Stamp.of(os.stat(file.path))

    async def _mark_dirty(self, file: OpenFile, base: ObjectHandle) -> tuple[marks.Reopened, bool]:
        """What the catalog says of it now, durably, and whether it is here whole."""
        hydrator = self._volume.hydrator
        if file.channel.ranged:
            await self._files.kernel.clear(file.ino, 0, 0)  # it no longer keeps still
        await hydrator.quiesce_object(file.key)
        await hydrator.attach(base)
        await hydrator.prove(base)
        hydrator.ensure_backing(base)
        # Also where the file is about to be cut: a crash before that leaves the old bytes.
        whole = base.fully_resident
        if not whole:
            await trio.to_thread.run_sync(self._files.parts.punch_absent, base)
        present = None if whole else tuple(base.masks)
        work = partial(marks.reopen, ino=file.ino, block_bytes=self._files.block_bytes, present=present)
        with trio.CancelScope(shield=True):  # it is in the catalog, or is not: not unknown
            reopened = await result_of(self._volume.writer.submit(file.key[0], work, sync=True))
        return reopened, whole

    async def clean(self, file: OpenFile) -> None:
        """A file that was sealed while processes read it: what is open of it is of the sealed object from here on."""
        base = await self._volume.hydrator.open(file.key, file.tenant)
        file.become(State.CLEAN, base, base.size)
        file.clean_stamp = None
        file.new_name = False

    def _rename(self, file: OpenFile, generation: int) -> None:
        """The backing file under the name of the generation it is now. Recovery does the same after a crash."""
        path = self._volume.hot.path(file.tenant, file.ino, generation)
        if path != file.path:
            # The folder may need another block for the name, and the row is there already.
            self._volume.env.essential(partial(self._volume.env.files.rename, file.path, path))
            file.new_name = True
        file.key, file.path = (file.key[0], file.ino, generation), path
