"""Opening a file to read while a passthrough writer's finished chunks are elsewhere.

The kernel reads the backing file itself then, and would find holes. So who opens it waits: until all of the file is
here again, where it fits, or until the writer has closed it. From then on it is a file that can be mapped: nothing more
goes from under its writers.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.files.content import Content
from aof2.engine.files.known import Known
from aof2.engine.files.room import WriteRoom
from aof2.engine.files.state import Kernel, Mode, OpenFile
from aof2.engine.locks import Rank, waits_for

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

# Of hot_bytes: a larger file would push out everything else, its writer's next chunks first.
FITS_SHARE: Final = 2
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class Reading:
    """Says when a file may be opened to read."""

    def __init__(self, volume: Volume, kernel: Kernel, known: Known, content: Content, room: WriteRoom) -> None:
        self._volume = volume
        self._kernel = kernel
        self._known = known
        self._content = content
        self._room = room

    async def until_readable(self, ino: int) -> None:
        """Returns when the file is here whole, or its writers have closed it."""
        while True:
            file = self._known.get(ino)
            if file is None or not file.channel.write_only or file.channel.mode is not Mode.PASSTHROUGH:
                return
            channel = file.channel
            if file.whole and not file.clearing:
                channel.write_only = False  # from here on nothing goes from under its writer
                return
            if file.stat().st_size * FITS_SHARE <= self._volume.settings.cache.hot_bytes:
                try:
                    await self._content.fill_for_readers(file)
                    continue
                except OSError as e:
                    if e.errno not in NO_ROOM:
                        raise
            waits_for(Rank.FILE)
            await channel.until_closed()

    async def is_unmapped(self, file: OpenFile) -> bool:
        """Whether no descriptor and no mapping of the backing file is left from those who had it open before."""
        if not self._room.brake.on or not self._room.watch.can_stop:
            return False
        if await trio.to_thread.run_sync(self._is_exclusive, file):
            return True
        await self._kernel.caught_up()
        return await trio.to_thread.run_sync(self._is_exclusive, file)

    def _is_exclusive(self, file: OpenFile) -> bool:
        with contextlib.suppress(OSError), self._volume.hot.exclusive(file.path) as alone:
            return alone
        return False
