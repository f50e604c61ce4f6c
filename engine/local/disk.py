"""The disk of state_dir as the rest sees it: how full it is, in bytes and in inodes, and who may still have something.

`cache.min_free` is kept free of both: a share is a share of the inodes, too; where it is a size, a hundredth of the
inodes is kept. Below that nothing new is made here (ENOSPC), and clean data makes way. The last METADATA_BYTES are for
records about what there is; new names and attributes are refused there, removals never are.

Owner: stateless but for the path; any thread may ask.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.errors import os_error
from aof2.engine.local.reserve import space_of
from aof2.engine.units import MinFree

METADATA_BYTES: Final = 4 << 20
# Of min_free as a size: the inodes that are kept, one in so many, at most INODES_KEPT_MAX.
INODES_SHARE: Final = 100
INODES_KEPT_MAX: Final = 4096


class Inodes(NamedTuple):
    """Of the disk: how many there are, can be had, and are kept."""

    total: int
    free: int
    kept: int

    @property
    def room(self) -> int:
        return max(0, self.free - self.kept)


class Disk:
    """The filesystem a folder is on."""

    def __init__(self, folder: Path, min_free: MinFree) -> None:
        self._folder = folder
        self._min_free = min_free

    def inodes(self) -> Inodes | None:
        """None: this filesystem does not count them, or does not answer."""
        space = space_of(self._folder)
        if space is None or not space.f_files:
            return None
        share = int(space.f_files * self._min_free.fraction)
        kept = share if self._min_free.fraction else min(INODES_KEPT_MAX, space.f_files // INODES_SHARE)
        return Inodes(space.f_files, space.f_favail, kept)

    def has_room_for_names(self) -> bool:
        """Whether something new may be recorded: a name, an attribute."""
        space = space_of(self._folder)
        return space is not None and space.f_bavail * space.f_frsize >= METADATA_BYTES

    def lacks_inodes(self) -> bool:
        inodes = self.inodes()
        return inodes is not None and not inodes.room

    def admit_name(self) -> None:
        """ENOSPC where a new name or attribute has no room."""
        if not self.has_room_for_names():
            raise os_error(errno.ENOSPC)
