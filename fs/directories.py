"""Open directories: those of tenants (`listing.py`), and the special ones, which are told as they were when opened.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

import pyfuse3

from aof2.engine import namespace
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.catalog.store import View
from aof2.engine.files import stream_of
from aof2.fs import special as s
from aof2.fs.attrs import DIRENT_LEN, direntplus
from aof2.fs.listing import DOTS, Listing
from aof2.fs.nodes import Nodes

PAGE_BYTES: Final = 32 << 10  # kernels ask for a megabyte where the caller has room for it; they ask for the rest


def _length(name: bytes) -> int:
    return DIRENT_LEN + (len(name) + 7 & ~7)


class Page(Protocol):
    """An answer with entries."""

    def add(self, name: bytes, row: InodeRow, position: int) -> bool:
        """False: it is full, and this one not in it."""


class PyfusePage:
    """One that pyfuse3 makes and sends."""

    def __init__(self, nodes: Nodes, token: pyfuse3.ReaddirToken) -> None:
        self._nodes = nodes
        self._token = token
        self._left = PAGE_BYTES

    def add(self, name: bytes, row: InodeRow, position: int) -> bool:
        self._left -= _length(name)
        return self._left >= 0 and bool(pyfuse3.readdir_reply(self._token, name, self._nodes.attributes(row), position))


class PackedPage:
    """One as it goes over the wire, of `room` bytes at most."""

    def __init__(self, nodes: Nodes, room: int) -> None:
        self._nodes = nodes
        self._left = min(room, PAGE_BYTES)
        self._parts: list[bytes] = []

    def add(self, name: bytes, row: InodeRow, position: int) -> bool:
        self._left -= _length(name)
        if self._left < 0:
            return False
        self._parts.append(direntplus(self._nodes.entry_out(row), row.ino, row.mode, name, position))
        return True

    def packed(self) -> bytes:
        return b"".join(self._parts)


class Directories:
    """Those that somebody has open, by handle."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._open: dict[int, Listing | list[tuple[bytes, int]]] = {}
        self._last_fh = 1 << 62  # apart from files'

    def open(self, ino: int) -> int:
        self._last_fh += 1
        self._open[self._last_fh] = self._special(ino) if s.is_special(ino) else Listing(stream_of(ino), ino)
        return self._last_fh

    def _special(self, ino: int) -> list[tuple[bytes, int]]:
        entries = self._nodes.special.entries(ino)
        if ino == s.ROOT:
            names = self._nodes.volume.tenant_names()
            entries += [(name.encode(), namespace.root_ino(tenant_id)) for tenant_id, name in names.items()]
        above = s.DOT if ino == s.MANIFEST else s.ROOT
        return [*zip(DOTS, (ino, above), strict=True), *entries]

    def close(self, fh: int) -> None:
        self._open.pop(fh, None)

    def stream(self, fh: int) -> int | None:
        """The tenant whose directory it is."""
        listing = self._open.get(fh)
        return listing.stream_id if isinstance(listing, Listing) else None

    def tell(self, fh: int, start: int, page: Page) -> None:
        """Fills a page with entries from a position on."""
        listing = self._open[fh]
        with self._nodes.volume.catalog.view() as view:
            if isinstance(listing, Listing):
                self._tell(view, listing, start, page)
                return
            for position, (name, ino) in enumerate(listing[start:], start + 1):
                if not page.add(name, self._nodes.row(view, ino), position):
                    return

    def _tell(self, view: View, listing: Listing, start: int, page: Page) -> None:
        if start == 0:
            listing.rewind()
        for position, name, row in self._dots(view, listing.ino, start):
            if not page.add(name, row, position):
                return
        last: tuple[int, bytes] | None = None
        for position, name, entry in listing.entries(view, start):
            found = view.get(listing.stream_id, t.INODES, entry.ino)
            if found is None:
                continue
            if not page.add(name, found, position):
                break
            last = (position, name)
        if last is not None:
            listing.stopped(*last)

    def _dots(self, view: View, ino: int, start: int) -> Iterator[tuple[int, bytes, InodeRow]]:
        for position, name in list(enumerate(DOTS, 1))[start:]:
            row = self._nodes.row(view, ino)
            if name == DOTS[1]:
                row = self._nodes.row(view, row.parent if row.parent != ino else s.ROOT)
            yield position, name, row
