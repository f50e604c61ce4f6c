"""Checks the order in which locks are taken (`engine/locks.py`), in tests that run the engine in their own process.

What a task holds counts for the tasks of a nursery that it opened under that lock: it waits for them.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import trio

from aof2.engine.locks import Maker, Rank, TaskLock, ThreadLock


class LockOrderError(AssertionError):
    """A lock was taken against the order: two who do that each way round wait for each other."""


class CheckedLocks(Maker):
    def __init__(self) -> None:
        self._check = _Check()

    def task_lock(self, rank: Rank) -> TaskLock:
        return _CheckedTaskLock(self._check, rank)

    def thread_lock(self, rank: Rank) -> ThreadLock:
        return _CheckedThreadLock(self._check, rank)

    def waits_for(self, rank: Rank) -> None:
        self._check.may_take(rank)


class _Held(NamedTuple):
    rank: Rank
    nurseries: int  # that its task had open when it took it: what runs in those is not waited for under it


class _Check:
    def __init__(self) -> None:
        self._by_task: WeakKeyDictionary[trio.lowlevel.Task, list[_Held]] = WeakKeyDictionary()
        self._by_thread = threading.local()

    def may_take(self, rank: Rank) -> None:
        held = self.by_thread()
        if trio.lowlevel.in_trio_task():
            held = held + self._by_task_and_above()
        if held and max(held) >= rank:
            raise LockOrderError(f"{rank.name} after {', '.join(r.name for r in held)}")

    def by_thread(self) -> list[Rank]:
        held: list[Rank] | None = getattr(self._by_thread, "held", None)
        if held is None:
            held = self._by_thread.held = []
        return held

    def _by_task_and_above(self) -> list[Rank]:
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        found: list[Rank] = []
        depth = 1 << 30
        while task is not None:
            found += [one.rank for one in self._by_task.get(task, ()) if one.nurseries <= depth]
            nursery = task.parent_nursery
            task = nursery.parent_task if nursery is not None else None
            depth = task.child_nurseries.index(nursery) if task is not None and nursery in task.child_nurseries else 0
        return found

    def taken(self, rank: Rank) -> None:
        task = trio.lowlevel.current_task()
        self._by_task.setdefault(task, []).append(_Held(rank, len(task.child_nurseries)))

    def released(self, rank: Rank) -> None:
        held = self._by_task[trio.lowlevel.current_task()]
        held.remove(next(one for one in reversed(held) if one.rank == rank))


class _CheckedTaskLock:
    def __init__(self, check: _Check, rank: Rank) -> None:
        self._check = check
        self._rank = rank
        self._lock = trio.Lock()

    def locked(self) -> bool:
        return self._lock.locked()

    def acquire_nowait(self) -> None:
        self._lock.acquire_nowait()
        self._check.taken(self._rank)

    def release(self) -> None:
        self._lock.release()
        self._check.released(self._rank)

    async def __aenter__(self) -> None:
        self._check.may_take(self._rank)
        await self._lock.acquire()
        self._check.taken(self._rank)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _CheckedThreadLock:
    def __init__(self, check: _Check, rank: Rank) -> None:
        self._check = check
        self._rank = rank
        self._lock = threading.Lock()

    def __enter__(self) -> bool:
        self._check.may_take(self._rank)
        self._lock.acquire()
        self._check.by_thread().append(self._rank)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._check.by_thread().remove(self._rank)
        self._lock.release()
