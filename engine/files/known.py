"""The files that are known here, which are being opened, and which are being changed.

Invariants
- A file is known while it is open or being opened, and while it is dirty. The catalog has all others.
- What changes a file's state holds it: one at a time (`holding`).
- An open counts from before the fold that it waits for, and so from before its inode is looked up. What the catalog
  thread was told may go (`must_stay`) goes before any open that came later looks it up.

Owner: the trio thread; `is_open` and `must_stay` are for any thread. A crash leaves nothing of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aof2.engine.files.ledger import Ledger
from aof2.engine.files.state import OpenFile, State
from aof2.engine.locks import Rank, TaskLock, task_lock, thread_lock
from aof2.native.sharedpage import SharedPage


class Known:
    """Files by inode."""

    def __init__(self) -> None:
        self._files: dict[int, OpenFile] = {}
        self.ledger = Ledger()
        # Guards the next three, and each look at one of them and at a file's handles: between two looks without it, an
        # open could go from being under way to being there, and be missed by both. The handles need no more than that:
        # they are counted before their open is no longer under way.
        self._opens = thread_lock()
        self._opening: Counter[int] = Counter()
        self._asked: Counter[int] = Counter()  # opens that wait for the fold before they begin
        self._going: set[int] = set()  # inodes that a batch under way was told it may remove
        self.page: SharedPage | None = None  # what the channel opens by itself is in it
        self._locks: dict[int, tuple[TaskLock, int]] = {}

    def __len__(self) -> int:
        return len(self._files)

    def all(self) -> list[OpenFile]:
        return list(self._files.values())

    def dirty(self) -> list[OpenFile]:
        return [file for file in self._files.values() if file.dirty]

    def get(self, ino: int) -> OpenFile | None:
        return self._files.get(ino)

    def add(self, file: OpenFile) -> None:
        self._files[file.ino] = file
        file.counted_by(self.ledger)

    def forget(self, file: OpenFile) -> None:
        """The catalog, or nothing, knows it from here on."""
        if self._files.get(file.ino) is file:
            del self._files[file.ino]
        file.become(State.GONE)

    # -- opens -------------------------------------------------------------------------------------------------

    def is_open(self, ino: int) -> bool:
        """Whether it is open, or being opened. From any thread, and true of that moment alone."""
        with self._opens:
            return self._is_open(ino)

    def _is_open(self, ino: int) -> bool:
        return self._is_open_here(ino) or (self.page is not None and self.page.has_open(ino))

    def is_open_here(self, ino: int) -> bool:
        """The same, but for what the channel opened by itself."""
        with self._opens:
            return self._is_open_here(ino)

    def _is_open_here(self, ino: int) -> bool:
        file = self._files.get(ino)
        return bool(self._opening.get(ino) or self._asked.get(ino)) or (file is not None and file.handles > 0)

    def must_stay(self, ino: int) -> bool:
        """Whether an inode without a name has to stay for those who have it open. Asked on the catalog thread, inside
        the batch that removes it otherwise: an open from here on waits for that batch (`opening`)."""
        with self._opens:
            if self._is_open_here(ino):
                return True
            if self.page is not None and ino not in self._going:
                self.page.hold(ino)  # before it is asked: what the channel opens later sees this
                if self.page.has_open(ino):
                    self.page.let(ino)
                    return True
            self._going.add(ino)
            return False

    def went(self, ino: int) -> None:
        """The batch that was told so is committed."""
        with self._opens:
            if ino in self._going:
                self._going.discard(ino)
                if self.page is not None:
                    self.page.let(ino)

    def openers(self, ino: int) -> int:
        """How many opens of it are under way."""
        return self._opening.get(ino, 0)

    @contextmanager
    def asked(self, ino: int) -> Iterator[None]:
        """An open is about to begin: the inode stays meanwhile, whatever is folded."""
        with self._opens:
            self._asked[ino] += 1
        try:
            yield
        finally:
            with self._opens:
                self._asked[ino] -= 1
                if not self._asked[ino]:
                    del self._asked[ino]

    @contextmanager
    def opening(self, ino: int) -> Iterator[bool]:
        """An open is under way. True: a batch that may remove the inode is, too, and has to be over before the catalog
        is asked for it."""
        with self._opens:
            self._opening[ino] += 1
            going = ino in self._going
        try:
            yield going
        finally:
            with self._opens:
                self._opening[ino] -= 1
                if not self._opening[ino]:
                    del self._opening[ino]

    # -- changes -----------------------------------------------------------------------------------------------

    def is_held(self, ino: int) -> bool:
        """Whether a task changes the file's state, or waits to."""
        return ino in self._locks

    @asynccontextmanager
    async def holding(self, ino: int) -> AsyncIterator[None]:
        """One at a time for what changes a file's state. Locks exist only while they are wanted."""
        with self._lock_of(ino) as lock:
            async with lock:
                yield

    @contextmanager
    def holding_all_now(self, inos: Iterable[int]) -> Iterator[Collection[int]]:
        """The same of many, without waiting; those that are held then. Only so does a task hold several."""
        held: dict[int, TaskLock] = {}
        try:
            for ino in inos:
                if ino not in self._locks:
                    lock = held[ino] = task_lock(Rank.FILE)
                    self._locks[ino] = (lock, 1)
                    lock.acquire_nowait()
            yield held
        finally:
            for ino, lock in held.items():
                lock.release()
                self._let_go(ino)

    @contextmanager
    def _lock_of(self, ino: int) -> Iterator[TaskLock]:
        lock, users = self._locks.get(ino) or (task_lock(Rank.FILE), 0)
        self._locks[ino] = (lock, users + 1)
        try:
            yield lock
        finally:
            self._let_go(ino)

    def _let_go(self, ino: int) -> None:
        lock, users = self._locks.pop(ino)
        if users > 1:
            self._locks[ino] = (lock, users - 1)
