"""Who is waiting goes first: background work lets requests pass while there are any, for a while.

Hashing and uploading thousands of small files takes the same interpreter that answers look-ups. They are not in a
hurry; a caller that lists the directory is. So before each piece of work the background asks here, and waits until no
request came for a moment, or until it has waited long enough.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

QUIET_S: Final = 0.1


class Foreground:
    """When the last request came."""

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._removed_s = float("-inf")
        self._is_hurried: Callable[[], bool] = lambda: False

    @contextmanager
    def hurried_by(self, hurries: Callable[[], bool]) -> Iterator[None]:
        """It says whether the background's work is what a request waits for, while the block runs."""
        self._is_hurried = hurries
        try:
            yield
        finally:
            self._is_hurried = lambda: False

    def asked(self) -> None:
        self._last_s = trio.current_time()

    def removed(self) -> None:
        """A file was removed. What is being removed is what there is too much of: hashing and uploading it helps less
        than letting it go."""
        self._removed_s = trio.current_time()

    def _hurries(self) -> bool:
        return trio.current_time() - self._removed_s > QUIET_S and self._is_hurried()

    async def let_pass(self, longest_s: float) -> None:
        """Returns when no request came for a moment; at once in a hurry, and after `longest_s` in any case."""
        until_s = trio.current_time() + longest_s
        while not self._hurries():
            now_s = trio.current_time()
            quiet_at_s = min(self._last_s + QUIET_S, until_s)
            if quiet_at_s <= now_s:
                return
            await trio.sleep_until(quiet_at_s)
