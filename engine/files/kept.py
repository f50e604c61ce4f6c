"""Whether the kernel may keep its pages of a ranged file when that is opened again (FOPEN_KEEP_CACHE).

Told nothing, the kernel drops an inode's pages at every open, and each reader asks for all of it again. It may keep
them where they can only be of the bytes that this open would read. The generation alone does not say so: a sealed
object that was not published yet is written on under its own number. So what is remembered of an inode is that no open
but ranged ones of this one clean object came since all its pages were dropped; whatever else happens to the file makes
us forget that: a writer, a cut, a passthrough open, a bad block, `aof2 evict`.

Invariants
- An inode is here only while the kernel knows it, and RECORDS_MAX of them at most: who is not here keeps nothing.
- An open whose pages are to be dropped proves that they were when it is released, not before: another open could be
  answered, and read, before the first one's caller came to drop them.
- Reads of a writer's time cannot come in late: RELEASE follows a handle's last READ and its mapping's last page, and a
  file is dirty until all its handles are released.

The kernel does its part: a passthrough open drops all pages of the inode, fills none, and cannot be together with
ranged ones. Size and times are no substitute for any of this: a writer can leave both as they were.

Owner: the trio thread, under `Known.holding`. A crash leaves nothing: the next mount has other inodes for the kernel.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aof2.engine.files.state import Mode, OpenFile

RECORDS_MAX: Final = 1 << 18
PROVEN: Final = 0  # handles are numbered from 1


class _Pages(NamedTuple):
    """Of which generation the pages are, once a handle from this one on is released."""

    generation: int
    since_fh: int


class KeptPages:
    """What the kernel's pages are known to be of, by inode."""

    def __init__(self) -> None:
        self._known: dict[int, _Pages] = {}

    def __len__(self) -> int:
        return len(self._known)

    def opened(self, file: OpenFile, fh: int) -> bool:
        """Whether the kernel may keep its pages at this open."""
        if file.dirty or file.channel.mode is not Mode.RANGED or file.channel.doubted:
            self.forget(file.ino)
            return False
        pages = self._known.get(file.ino)
        if pages is not None and pages.generation == file.key[2]:
            return pages.since_fh == PROVEN
        self._remember(file.ino, _Pages(file.key[2], fh))
        return False

    def _remember(self, ino: int, pages: _Pages) -> None:
        self._known.pop(ino, None)
        while len(self._known) >= RECORDS_MAX:
            del self._known[next(iter(self._known))]
        self._known[ino] = pages

    def released(self, ino: int, fh: int) -> None:
        """This handle's open is over: if it was to drop the pages, it did."""
        pages = self._known.get(ino)
        if pages is not None and PROVEN < pages.since_fh <= fh:
            self._known[ino] = pages._replace(since_fh=PROVEN)

    def forget(self, ino: int) -> None:
        """Its pages may be of anything: the next open drops them."""
        self._known.pop(ino, None)
