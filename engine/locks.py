"""Locks that a task or thread may hold together, and the order in which it takes them: `Rank`, outermost first.

Who holds a lock takes only locks of a later rank, waiting for them: a circle of waiting cannot come about then. Several
of one rank are held only where none of them is waited for (`acquire_nowait`). Who waits for work of another task that
takes locks says so (`waits_for`), as if it took them itself.

They are trio's and threading's own locks. Under tests each acquisition is checked (`tests/lockorder.py`).

Owner: none; each lock's own module says what it guards.
"""

from __future__ import annotations

import enum
import threading
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

import trio


class Rank(enum.IntEnum):
    """CONCURRENCY.md says what each guards."""

    FILE = 1
    FILE_ROOM = 2
    STREAM = 3
    TENANT_ROOM = 4
    PUSH = 5
    PARTS = 6
    FILE_IO = 7
    WINDOW = 8
    DOOMED = 9
    EVICTION = 10
    WALK = 11
    SNAPSHOT = 12
    NAMING = 13
    COMMIT = 14
    BRIEF = 15


class TaskLock(AbstractAsyncContextManager[None], Protocol):
    """What is used of `trio.Lock`."""

    def locked(self) -> bool: ...

    def acquire_nowait(self) -> None: ...

    def release(self) -> None: ...


ThreadLock = AbstractContextManager[object]


class Maker:
    """Makes locks; that of the tests makes such as are checked."""

    def task_lock(self, rank: Rank) -> TaskLock:
        return trio.Lock()

    def thread_lock(self, rank: Rank) -> ThreadLock:
        return threading.Lock()

    def waits_for(self, rank: Rank) -> None:
        pass


_maker = Maker()


def made_by(maker: Maker) -> None:
    """From here on."""
    global _maker
    _maker = maker


def task_lock(rank: Rank) -> TaskLock:
    return _maker.task_lock(rank)


def thread_lock(rank: Rank = Rank.BRIEF) -> ThreadLock:
    return _maker.thread_lock(rank)


def waits_for(rank: Rank) -> None:
    """The task is about to wait for work that takes locks of this rank and later ones."""
    _maker.waits_for(rank)
