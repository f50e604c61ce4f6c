"""Reading a directory, however large, in the pages the kernel asks for.

A position is the number of entries told so far; the first two are "." and "..". At the end of each page the handle
remembers the name it stopped at, so the next page starts behind that name, one look-up away: what is there all the time
is told once, whatever comes and goes meanwhile, and memory is a name a page.

Owner: the trio thread; one handle an opendir. A crash leaves nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final

from aof2.engine import namespace
from aof2.engine.catalog.rows import DentryRow
from aof2.engine.catalog.store import View

PAGE_ROWS: Final = 256
DOTS: Final = (b".", b"..")


class Listing:
    """One open directory of a tenant."""

    def __init__(self, stream_id: int, ino: int) -> None:
        self.stream_id = stream_id
        self.ino = ino
        self._marks: list[tuple[int, bytes]] = [(len(DOTS), b"")]  # position → the last name before it

    def entries(self, view: View, start: int) -> Iterator[tuple[int, bytes, DentryRow]]:
        """(next position, name, row) from a position on, "." and ".." aside."""
        at, after = self._marks[max(0, bisect.bisect_right(self._marks, start, key=lambda m: m[0]) - 1)]
        while page := namespace.list_dir(view, self.stream_id, self.ino, after or None, PAGE_ROWS):
            for name, row in page:
                at += 1
                after = name
                if at > start:
                    yield at, name, row

    def stopped(self, position: int, name: bytes) -> None:
        """The page ends with this entry."""
        if position > self._marks[-1][0]:
            self._marks.append((position, name))

    def rewind(self) -> None:
        """From the start again: names may be others by now."""
        del self._marks[1:]
