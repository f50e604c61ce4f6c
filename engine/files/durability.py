"""What is on the disk when fsync and syncfs return: a file's bytes, its name, and the catalog's records of it.

Invariant: which blocks of a partly fetched file are here is recorded after they are synced, never before.

Owner: the trio thread; syncing on worker threads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from aof2.engine.aio import result_of
from aof2.engine.files import marks
from aof2.engine.files.state import OpenFile, stream_of

if TYPE_CHECKING:
    from aof2.engine.files.table import Files


class Durability:
    """Makes files durable."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume

    async def fsync(self, ino: int) -> None:
        """Bytes and records of this file are on the disk when this returns."""
        file = self._files.known.get(ino)
        if file is not None and file.dirty:
            await self._files.charges.collect(file)
            async with file.io:
                present = () if file.base is None else tuple(file.base.masks)
                await trio.to_thread.run_sync(self.sync_backing, file)
                if present or file.noted_partial:
                    await self.note_present(file, present, sync=True)
                    return
        await self.sync_log(stream_of(ino))

    async def note_present(self, file: OpenFile, present: tuple[int, ...] | None = None, *, sync: bool = False) -> None:
        """Records which blocks are here, and up to where the others count. They are synced, and `file.io` is held."""
        if present is None:
            present = () if file.base is None else tuple(file.base.masks)
        work = partial(marks.note_present, ino=file.ino, base_len=file.base_len, present=present)
        await result_of(self._volume.writer.submit(file.key[0], work, sync=sync))
        file.noted_partial = bool(present)

    def sync_backing(self, file: OpenFile) -> None:
        """Its bytes, and its name. On a worker thread."""
        files = self._volume.env.files
        with files.closing(files.open_ro(file.path)) as fd:
            files.fsync(fd)
        if file.new_name:
            files.fsync_dir(file.path.parent)
            file.new_name = False

    async def sync_log(self, stream_id: int) -> None:
        await result_of(self._volume.writer.submit(stream_id, lambda b: None, sync=True))

    async def sync_all(self) -> None:
        """syncfs: everything dirty and the logs."""
        for file in self._files.known.all():
            if file.dirty:
                await self.fsync(file.ino)
        for stream_id in self._volume.tenant_names():
            await self.sync_log(stream_id)
