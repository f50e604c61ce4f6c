"""Opening a file to read while a passthrough writer's finished chunks are elsewhere.

The kernel reads the backing file itself then, and would find holes. So who opens it waits: until all of the file is
here again, where it fits, or until the writer has closed it. From then on it is a file that can be mapped: nothing more
goes from under its writers.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.files.state import Mode, OpenFile
from aof2.engine.local.reserve import is_no_room
from aof2.engine.locks import Rank, waits_for

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

# Of hot_bytes: a larger file would push out everything else, its writer's next chunks first.
FITS_SHARE: Final = 2


class Reading:
    """Says when a file may be opened to read."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def until_readable(self, ino: int) -> None:
        """Returns when the file is here whole, or its writers have closed it."""
        while True:
            file = self._files.known.get(ino)
            if file is None or not file.channel.write_only or file.channel.mode is not Mode.PASSTHROUGH:
                return
            channel = file.channel
            if file.whole and not file.clearing:
                channel.write_only = False  # from here on nothing goes from under its writer
                return
            if file.stat().st_size * FITS_SHARE <= self._files.volume.settings.cache.hot_bytes:
                try:
                    await self._files.content.fill_for_readers(file)
                    continue
                except OSError as e:
                    if not is_no_room(e):
                        raise
            waits_for(Rank.FILE)
            await channel.until_closed()

    async def is_unmapped(self, file: OpenFile) -> bool:
        """Whether no descriptor and no mapping of the backing file is left from those who had it open before."""
        if not self._files.room.brake.on or not self._files.room.watch.can_stop:
            return False
        if await trio.to_thread.run_sync(self._is_exclusive, file):
            return True
        await self._files.kernel.caught_up()
        return await trio.to_thread.run_sync(self._is_exclusive, file)

    def _is_exclusive(self, file: OpenFile) -> bool:
        with contextlib.suppress(OSError), self._files.volume.hot.exclusive(file.path) as alone:
            return alone
        return False
