"""A moment for what was just closed: close(2) does not wait for the daemon, so a file that an application has closed is
still open here, and its backing file still held, a moment later. What is in use after that moment is in use.

What is to be evicted must not be open at all (`closed`); what is to be sealed may be read (`sealable`).

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import trio

from aof2.fs.control.mounted import Mounted

CLOSING_MAX_S: Final = 2.0
CLOSING_NEXT_S: Final = 0.25  # of files that were not named, some of which may be written to for hours
CLOSING_EVERY_S: Final = 0.02
CLOSING_FIRST_S: Final = 0.001


class Closing:
    """One moment, for all files of a verb together."""

    def __init__(self, mounted: Mounted) -> None:
        self._mounted = mounted
        self._until_s = trio.current_time() + CLOSING_MAX_S

    async def closed(self, inos: Collection[int]) -> None:
        """Returns when none of them is open, or the moment is over."""
        await self._none(inos, self._mounted.kinds.is_open)

    async def sealable(self, inos: Collection[int]) -> None:
        """Returns when no process keeps one of them from being sealed, or the moment is over."""
        await self._none(inos, self._mounted.kinds.is_kept_unsealed)

    async def _none(self, inos: Collection[int], is_used: Callable[[int], bool]) -> None:
        with trio.move_on_at(self._until_s):
            pause_s = CLOSING_FIRST_S
            while any(map(is_used, inos)):
                await trio.sleep(pause_s)
                pause_s = min(CLOSING_EVERY_S, pause_s * 2)
                await self._mounted.kinds.fold()  # a file that the channel created is closed by a record, too

    async def again(self) -> bool:
        """Whether it is worth another try, a little later."""
        if trio.current_time() >= self._until_s:
            return False
        await trio.sleep(CLOSING_EVERY_S)
        return True


async def all_closed(mounted: Mounted) -> None:
    """Returns when no file is open for writing, or none of them was closed for a moment: of hundreds that were closed
    just now the kernel tells some at a time."""
    left = mounted.kinds.writing()
    until_s = trio.current_time() + CLOSING_NEXT_S
    while left and trio.current_time() < until_s:
        await trio.sleep(CLOSING_EVERY_S)
        await mounted.kinds.fold()
        still = left & mounted.kinds.writing()
        if len(still) < len(left):
            left, until_s = still, trio.current_time() + CLOSING_NEXT_S
