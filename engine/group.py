"""A thread that owns something and commits for many at once.

Callers submit items and get Futures. The thread takes everything queued, appends each item to its target, commits
once, syncs once if a caller asked for it, and answers them all. While it syncs, the next group gathers. Items submitted
without `sync` are answered once committed (they survive the process) and synced within the commit period.

Invariants
- Only this thread touches the target. Order of submission is order of application.
- An item that cannot be appended fails alone; a failed commit or sync fails every item in it.
- The queue is bounded: threads that submit wait for room, memory does not grow. The trio thread never waits here: its
  tasks wait for their Futures, so what it has queued is bounded by the tasks there are.
- The thread sleeps until there is work or a deadline; it never polls.
- Every Future is answered, also when the thread ends.

Owner: the thread itself, started by `start`, ended by `close`. A crash leaves what the target says.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import trio

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, FatalIOError, ReadOnlyError
from aof2.engine.locks import thread_lock

log = logging.getLogger(__name__)

QUEUE_LEN_MAX: Final = 4096
HOUSEKEEP_AGAIN_S: Final = 1.0

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class GroupTarget(Protocol[T_contra]):
    """What the thread commits to."""

    def before(self, item: T_contra) -> Iterator[None]:
        """Takes in what must be there before the item; each time it stops that is enough for a commit of its own."""

    def append(self, item: T_contra) -> Callable[[], object]:
        """Takes the item in; the callable gives its answer once the commit is done. Raising fails the item alone."""

    def full(self) -> bool:
        """Whether the group is large enough to be committed before more is taken."""

    def commit(self, *, sync: bool) -> None:
        """Everything appended is in; with `sync`, durable."""

    def sync(self) -> None:
        """Everything committed is durable."""

    def due_s(self) -> float | None:
        """Seconds until `housekeep` wants to run, or None."""

    def housekeep(self) -> None:
        """Work that time or size calls for, between groups."""

    def close(self) -> None:
        """The end: commits what is left and lets go."""


class _Submission(NamedTuple, Generic[T]):
    item: T | None  # None: only a sync, or housekeeping
    sync: bool
    future: Future[object]
    waited: bool = False  # its submitter took a place in the queue


class GroupThread(Generic[T]):
    """The thread and its queue."""

    def __init__(self, env: Env, target: GroupTarget[T], *, name: str, commit_period_ms: int = 100) -> None:
        self.groups = 0
        self._env = env
        self._target = target
        self._commit_period_s = commit_period_ms / 1000
        self._queue: queue.SimpleQueue[_Submission[T] | None] = queue.SimpleQueue()
        self._places = threading.Semaphore(QUEUE_LEN_MAX)
        self._closing = thread_lock()
        self._closed = False
        self._ending = False
        self._ended = False
        self._quiet_until_s = 0.0
        self._sync_due_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, item: T, *, sync: bool) -> Future[object]:
        """Queues the item; the future gives what the target answers."""
        return self._put(_Submission(item, sync, Future()))

    def flush(self) -> Future[object]:
        """Everything submitted before is durable when the future is done."""
        return self._put(_Submission(None, True, Future()))

    def nudge(self) -> None:
        """Housekeeping runs after what was submitted before."""
        self._put(_Submission(None, False, Future()))

    def close(self) -> None:
        """Commits and syncs what was submitted, ends the thread, closes the target. Harmless when called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _put(self, submission: _Submission[T]) -> Future[object]:
        if not trio.lowlevel.in_trio_run():
            self._places.acquire()
            submission = submission._replace(waited=True)
        with self._closing:
            if self._closed:
                self._left(submission)
                raise ReadOnlyError(f"{self._thread.name} is closed")
            self._queue.put(submission)
        if self._ended:
            # The thread ended while we waited for room in the queue: it may have looked there for the last time.
            self._refuse_rest()
        return submission.future

    def _left(self, submission: _Submission[T]) -> None:
        """It is out of the queue, or was never in it."""
        if submission.waited:
            self._places.release()

    def _run(self) -> None:
        try:
            while (group := self._gather()) is not None:
                if group:
                    self._commit(group)
                self._housekeep()
        except BaseException:
            log.critical("%s ended by an unexpected error", self._thread.name, exc_info=True)
            raise
        finally:
            self._closed = self._ended = True
            self._refuse_rest()
            with contextlib.suppress(FatalIOError, ReadOnlyError):  # said already, and told to the callers that waited
                self._target.close()
            self._refuse_rest()

    def _gather(self) -> list[tuple[_Submission[T], Callable[[], object]]] | None:
        """Takes in whatever is queued; [] when a deadline came first; None at the end."""
        if self._ending:
            return None
        try:
            item = self._queue.get(timeout=self._wait_s())
        except queue.Empty:
            return []
        group: list[tuple[_Submission[T], Callable[[], object]]] = []
        while item is not None:
            self._append(item, group)
            if self._target.full():
                return group
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return group
        self._ending = True
        return group

    def _append(self, s: _Submission[T], group: list[tuple[_Submission[T], Callable[[], object]]]) -> None:
        self._left(s)
        if not s.future.set_running_or_notify_cancel():
            return  # its caller gave up before its turn came
        before = self._target.before(s.item) if s.item is not None else iter(())
        while True:
            try:
                if next(before, _nothing) is _nothing:
                    answer = self._target.append(s.item) if s.item is not None else _nothing
                    break
            except Exception as e:  # noqa: BLE001 (the caller's future carries it; the others go on)
                s.future.set_exception(e)
                return
            so_far, group[:] = group[:], []
            self._commit(so_far)
        group.append((s, answer))

    def _wait_s(self) -> float | None:
        """Until the next sync or housekeeping is due; None when only new work can wake us."""
        due = self._target.due_s()
        if due is not None:
            due = max(due, self._quiet_until_s - self._env.monotonic_s())
        if self._sync_due_s is not None:
            left = self._sync_due_s - self._env.monotonic_s()
            due = left if due is None else min(due, left)
        return None if due is None else max(0.0, due)

    def _commit(self, group: list[tuple[_Submission[T], Callable[[], object]]]) -> None:
        sync = any(s.sync for s, _ in group)
        try:
            self._target.commit(sync=sync)
            answers = [answer() for _, answer in group]
        except BaseException as e:
            for s, _ in group:
                s.future.set_exception(e)
            if not isinstance(e, Aof2Error | OSError):
                raise
            return
        self.groups += 1
        self._plan_sync(sync)
        for (s, _), answer in zip(group, answers, strict=True):
            s.future.set_result(answer)

    def _plan_sync(self, synced: bool) -> None:
        if synced:
            self._sync_due_s = None
        elif self._sync_due_s is None:
            self._sync_due_s = self._env.monotonic_s() + self._commit_period_s

    def _housekeep(self) -> None:
        try:
            if self._sync_due_s is not None and self._env.monotonic_s() >= self._sync_due_s:
                self._sync_due_s = None
                self._target.sync()
            if self._env.monotonic_s() >= self._quiet_until_s:
                self._target.housekeep()
        except (FatalIOError, ReadOnlyError):
            # Said once by the target; every later submission is refused with the reason.
            self._rest()
        except Exception:
            # What housekeeping could not do now it tries again later; no commit depends on it.
            log.exception("%s: housekeeping failed", self._thread.name)
            self._rest()

    def _rest(self) -> None:
        self._sync_due_s = None
        self._quiet_until_s = self._env.monotonic_s() + HOUSEKEEP_AGAIN_S

    def _refuse_rest(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is None:
                continue
            self._left(item)
            if item.future.set_running_or_notify_cancel():
                item.future.set_exception(ReadOnlyError(f"{self._thread.name} is closed"))


def _nothing() -> None:
    return None
