"""A moment for what was just closed: close(2) does not wait for the daemon, so a file that an application has closed is
still open here, and its backing file still held, a moment later. What is in use after that moment is in use.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import trio

from aof2.fs.control.mounted import Mounted

CLOSING_MAX_S: Final = 2.0
CLOSING_EVERY_S: Final = 0.02
CLOSING_FIRST_S: Final = 0.001


class Closing:
    """One moment, for all files of a verb together."""

    def __init__(self, mounted: Mounted) -> None:
        self._mounted = mounted
        self._until_s = trio.current_time() + CLOSING_MAX_S

    async def closed(self, inos: Collection[int]) -> None:
        """Returns when none of them is open, or the moment is over."""
        with trio.move_on_at(self._until_s):
            pause_s = CLOSING_FIRST_S
            while any(self._mounted.kinds.is_open(ino) for ino in inos):
                await trio.sleep(pause_s)
                pause_s = min(CLOSING_EVERY_S, pause_s * 2)
                await self._mounted.kinds.fold()  # a file that the channel created is closed by a record, too

    async def again(self) -> bool:
        """Whether it is worth another try, a little later."""
        if trio.current_time() >= self._until_s:
            return False
        await trio.sleep(CLOSING_EVERY_S)
        return True
