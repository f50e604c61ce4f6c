"""Open directories, however large, read in the pages the kernel asks for.

A position is the number of entries told so far; the first two are "." and "..". At the end of each page the handle
remembers the name it stopped at, so the next page starts behind that name, one look-up away: what is there all the time
is told once, whatever comes and goes meanwhile, and memory is a name a page.

Owner: the trio thread; one handle an opendir. A crash leaves nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Final, Protocol

import pyfuse3

from aof2.engine.catalog.rows import InodeRow
from aof2.fs.attrs import DIRENT_LEN, direntplus
from aof2.fs.tree import Tree

PAGE_ROWS: Final = 256
PAGE_BYTES: Final = 32 << 10  # kernels ask for a megabyte where the caller has room for it; they ask for the rest
DOTS: Final = (b".", b"..")
FIRST_HANDLE: Final = 1 << 62  # apart from files'


def _length(name: bytes) -> int:
    return DIRENT_LEN + (len(name) + 7 & ~7)


class Page(Protocol):
    """An answer with entries."""

    def add(self, name: bytes, row: InodeRow, position: int) -> bool:
        """False: it is full, and this one not in it."""


class PyfusePage:
    """One that pyfuse3 makes and sends."""

    def __init__(self, tree: Tree, token: pyfuse3.ReaddirToken) -> None:
        self._tree = tree
        self._token = token
        self._left = PAGE_BYTES

    def add(self, name: bytes, row: InodeRow, position: int) -> bool:
        self._left -= _length(name)
        return self._left >= 0 and bool(pyfuse3.readdir_reply(self._token, name, self._tree.attributes(row), position))


class PackedPage:
    """One as it goes over the wire, of `room` bytes at most."""

    def __init__(self, tree: Tree, room: int) -> None:
        self._tree = tree
        self._left = min(room, PAGE_BYTES)
        self._parts: list[bytes] = []

    def add(self, name: bytes, row: InodeRow, position: int) -> bool:
        self._left -= _length(name)
        if self._left < 0:
            return False
        self._parts.append(direntplus(self._tree.entry_out(row), row.ino, row.mode, name, position))
        return True

    def packed(self) -> bytes:
        return b"".join(self._parts)


class Listing:
    """One open directory."""

    def __init__(self, tree: Tree, ino: int) -> None:
        self.ino = ino
        self._tree = tree
        self._kind = tree.kinds.of(ino)
        self._marks: list[tuple[int, bytes]] = [(len(DOTS), b"")]  # position → the last name before it

    def tell(self, start: int, page: Page) -> None:
        """Fills a page with entries from a position on."""
        if start == 0:
            del self._marks[1:]  # names may be others by now
        for position, name, row in self._dots(start):
            if not page.add(name, row, position):
                return
        last: tuple[int, bytes] | None = None
        for position, name, row in self._entries(start):
            if not page.add(name, row, position):
                break
            last = (position, name)
        if last is not None and last[0] > self._marks[-1][0]:
            self._marks.append(last)

    def _dots(self, start: int) -> Iterator[tuple[int, bytes, InodeRow]]:
        if start >= len(DOTS):
            return
        row = self._tree.get(self.ino)
        if start == 0:
            yield 1, DOTS[0], row
        yield 2, DOTS[1], self._tree.get(self._kind.parent(row))

    def _entries(self, start: int) -> Iterator[tuple[int, bytes, InodeRow]]:
        """(next position, name, row) from a position on, "." and ".." aside."""
        at, after = self._marks[max(0, bisect.bisect_right(self._marks, start, key=lambda m: m[0]) - 1)]
        while page := self._kind.entries(self.ino, after or None, PAGE_ROWS):
            for name, row in page:
                at += 1
                after = name
                if at > start:
                    yield at, name, row


class Directories:
    """Open directories, by handle."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._open: dict[int, Listing] = {}
        self._last = FIRST_HANDLE

    def open(self, ino: int) -> int:
        self._last += 1
        self._open[self._last] = Listing(self._tree, ino)
        return self._last

    def close(self, fh: int) -> None:
        self._open.pop(fh, None)

    def ino(self, fh: int) -> int:
        return self._open[fh].ino

    def tell(self, fh: int, start: int, page: Page, ino: int) -> None:
        """Of a handle that the channel opened, too: what it could not answer comes here."""
        (self._open.get(fh) or Listing(self._tree, ino)).tell(start, page)
