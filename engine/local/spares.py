"""Inodes of backing files that left, kept for those that come: `hot_cache/.spares/<n>`, empty.

A filesystem may not give an inode away again soon after it was freed: ext4 passes over those of the last minutes one by
one, so that each new file takes the longer the more were deleted. A cache that is full deletes and makes files all the
time. So what leaves is emptied and put aside here, and what comes takes it by a rename.

Invariants
- A spare is empty before it is here, and no descriptor of it is open: it comes from an eviction. One that is found with
  bytes is deleted: in the next file, blocks that did not come would not be holes.
- SPARES_MAX at most; where the disk runs out of inodes they go first (`drop`).

Owner: any thread: each step is one system call and one of a deque. A crash leaves spares, which are taken over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from aof2.engine.env import Env

FOLDER: Final = ".spares"  # no tenant's name
SPARES_MAX: Final = 16_384


class Spares:
    """Those of one hot_cache."""

    def __init__(self, env: Env, root: Path, *, most: int = SPARES_MAX) -> None:
        self._env = env
        self._folder = root / FOLDER
        self._most = most
        self._names: deque[str] = deque()
        self._numbers = itertools.count(1)
        self._ready = False

    def __len__(self) -> int:
        return len(self._names)

    def load(self) -> None:
        """Takes over what is there; from here on what leaves is kept."""
        self._env.make_dirs(self._folder)
        with os.scandir(self._folder) as found:
            sizes = {entry.name: entry.stat().st_size for entry in found if entry.name.isdecimal()}
        for name in [name for name, size in sizes.items() if size]:
            # Power was lost after it became a file again, and its new name with it.
            self._env.files.unlink(self._folder / name)
            del sizes[name]
        names = list(sizes)
        self._numbers = itertools.count(max(map(int, names), default=0) + 1)
        self._names.extend(str(self._folder / name) for name in names)
        self._ready = True

    def keep(self, path: Path) -> bool:
        """The file's bytes go, and its inode is a spare; False: nothing happened. FileNotFoundError: it is gone."""
        if not self._ready or len(self._names) >= self._most:
            return False
        spare = self._folder / str(next(self._numbers))
        self._env.files.cut(path)
        self._env.files.rename(path, spare)
        self._names.append(str(spare))
        return True

    def take(self, most: int) -> list[str]:
        """Paths of spares, which are the caller's from here on."""
        taken: list[str] = []
        with contextlib.suppress(IndexError):
            while len(taken) < most:
                taken.append(self._names.pop())
        return taken

    def give_back(self, paths: Iterable[str]) -> None:
        """Those that were taken and not used."""
        self._names.extend(paths)

    def drop(self, most: int) -> int:
        """Deletes spares; how many."""
        taken = self.take(most)
        for path in taken:
            with contextlib.suppress(FileNotFoundError):
                self._env.files.unlink(Path(path))
        return len(taken)
