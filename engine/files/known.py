"""The files that are known here, who is about to open one, and who changes one.

Invariants
- A file is known while it is open or being opened, and while it is dirty. The catalog has all others.
- What changes a file's state holds it: one at a time (`holding`).

Owner: the trio thread; `is_open` is also called on the writer thread. A crash leaves nothing of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from aof2.engine.files.ledger import Ledger
from aof2.engine.files.state import OpenFile


class Known:
    """Files by inode."""

    def __init__(self) -> None:
        self._files: dict[int, OpenFile] = {}
        self.ledger = Ledger()
        self._opening: Counter[int] = Counter()
        self._locks: dict[int, tuple[trio.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._files)

    def all(self) -> list[OpenFile]:
        return list(self._files.values())

    def get(self, ino: int) -> OpenFile | None:
        return self._files.get(ino)

    def add(self, file: OpenFile) -> None:
        self._forget(file.ino)
        self._files[file.ino] = file
        file.counted_by(self.ledger)

    def forget(self, file: OpenFile) -> None:
        self._forget(file.ino)

    def _forget(self, ino: int) -> None:
        file = self._files.pop(ino, None)
        if file is not None:
            file.counted_by(None)

    def is_open(self, ino: int) -> bool:
        """Whether somebody has it open, or is about to."""
        file = self._files.get(ino)
        return bool(self._opening.get(ino)) or (file is not None and file.handles > 0)

    def openers(self, ino: int) -> int:
        """How many are about to open it."""
        return self._opening.get(ino, 0)

    @contextmanager
    def opening(self, ino: int) -> Iterator[None]:
        """Somebody is about to open it."""
        self._opening[ino] += 1
        try:
            yield
        finally:
            self._opening[ino] -= 1
            if not self._opening[ino]:
                del self._opening[ino]

    def is_held(self, ino: int) -> bool:
        """Whether somebody changes the file's state, or waits to."""
        return ino in self._locks

    @asynccontextmanager
    async def holding(self, ino: int) -> AsyncIterator[None]:
        """One at a time for what changes a file's state. Locks exist only while somebody wants them."""
        lock, users = self._locks.get(ino) or (trio.Lock(), 0)
        self._locks[ino] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(ino)
            if users > 1:
                self._locks[ino] = (lock, users - 1)
