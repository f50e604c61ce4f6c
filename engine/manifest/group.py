"""Group commit: many callers, one writer thread, one fsync for all who wait.

Callers submit a RecordBatch and get a Future of the position where it was committed. The thread takes everything that
is queued, appends it, commits once, syncs once if anybody asked for it, and answers them all. While it syncs, the next
group gathers. Submissions without `sync` are answered once committed (they survive the process) and synced within
`commit_period_ms`.

Invariants
- Only this thread touches the writer. Order of submission is order in the log.
- A batch that cannot be appended (no room on disk) fails alone; a failed fsync fails everyone, and the log is over.
- The queue is bounded: submitters wait, memory does not grow.
- The thread sleeps until there is work or a deadline; it never polls.

Owner: this thread, started by `start`, ended by `close`. A crash leaves what `writer` says.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from aof2.engine.errors import FatalIOError, ReadOnlyError
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LogPosition
from aof2.engine.manifest.writer import ManifestLogWriter, SealedChunk

QUEUE_LEN_MAX: Final = 4096
GROUP_BYTES_MAX: Final = 4 << 20


class _Submission(NamedTuple):
    batch: RecordBatch | None
    sync: bool
    future: Future[LogPosition]


class GroupCommit:
    """Owns a ManifestLogWriter on a thread of its own."""

    def __init__(
        self,
        writer: ManifestLogWriter,
        *,
        commit_period_ms: int = 100,
        on_sealed: Callable[[SealedChunk], None] | None = None,
    ) -> None:
        self.groups = 0
        self._writer = writer
        self._commit_period_s = commit_period_ms / 1000
        self._on_sealed = on_sealed
        self._queue: queue.Queue[_Submission | None] = queue.Queue(QUEUE_LEN_MAX)
        self._closing = threading.Lock()
        self._closed = False
        self._ending = False
        self._sync_due_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="aof2-manifest", daemon=True)

    def start(self) -> GroupCommit:
        self._thread.start()
        return self

    def submit(self, batch: RecordBatch, *, sync: bool) -> Future[LogPosition]:
        """Queues the records; the future gives the end of the commit they are in."""
        if not batch:
            raise ValueError("an empty batch has no place in the log")
        return self._put(_Submission(batch, sync, Future()))

    def flush(self) -> Future[LogPosition]:
        """Everything submitted before is durable when the future is done."""
        return self._put(_Submission(None, True, Future()))

    def commit_now(self, batch: RecordBatch) -> LogPosition:
        """`submit` with sync, waited for."""
        return self.submit(batch, sync=True).result()

    def close(self) -> None:
        """Commits and syncs what was submitted, ends the thread, closes the writer. Harmless when called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _put(self, submission: _Submission) -> Future[LogPosition]:
        with self._closing:
            if self._closed:
                raise ReadOnlyError("the manifest log is closed")
            self._queue.put(submission)
        if not self._thread.is_alive():
            # The thread ended while we waited for room in the queue: nobody else will answer.
            self._refuse_rest()
        return submission.future

    def _run(self) -> None:
        try:
            while (group := self._gather()) is not None:
                if group:
                    self._commit(group)
                self._housekeep()
        finally:
            self._closed = True
            self._refuse_rest()
            with contextlib.suppress(FatalIOError):  # said by the writer, and told to whoever waited
                self._writer.close()

    def _gather(self) -> list[_Submission] | None:
        """Whatever is queued, or [] when a deadline came first, or None at the end."""
        if self._ending:
            return None
        try:
            item = self._queue.get(timeout=self._wait_s())
        except queue.Empty:
            return []
        group: list[_Submission] = []
        size = 0
        while item is not None:
            group.append(item)
            size += item.batch.encoded_len if item.batch else 0
            if size >= GROUP_BYTES_MAX:
                return group
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return group
        self._ending = True
        return group

    def _wait_s(self) -> float | None:
        """Until the next sync or rotation is due; None when only new work can wake us."""
        due = [] if self._sync_due_s is None else [self._sync_due_s - self._writer.env.monotonic_s()]
        rotation_ms = self._writer.rotation_due_ms()
        if rotation_ms is not None:
            due.append((rotation_ms - self._writer.env.now_ms()) / 1000)
        return max(0.0, min(due)) if due else None

    def _commit(self, group: list[_Submission]) -> None:
        accepted = self._append(group)
        if not accepted:
            return
        sync = any(s.sync for s in accepted)
        try:
            position = self._writer.commit(sync=sync)
        except BaseException as e:
            for s in accepted:
                s.future.set_exception(e)
            if not isinstance(e, FatalIOError | ReadOnlyError):
                raise
            return
        self.groups += 1
        self._plan_sync(sync)
        for s in accepted:
            s.future.set_result(position)

    def _append(self, group: list[_Submission]) -> list[_Submission]:
        accepted = []
        for s in group:
            try:
                if s.batch is not None:
                    self._writer.append_batch(s.batch)
            except Exception as e:  # noqa: BLE001 (the caller's future carries it; the others go on)
                s.future.set_exception(e)
            else:
                accepted.append(s)
        return accepted

    def _plan_sync(self, synced: bool) -> None:
        if synced or not self._writer.settings.durable:
            self._sync_due_s = None
        elif self._sync_due_s is None:
            self._sync_due_s = self._writer.env.monotonic_s() + self._commit_period_s

    def _housekeep(self) -> None:
        """The timed work: the periodic sync, and rotation."""
        try:
            if self._sync_due_s is not None and self._writer.env.monotonic_s() >= self._sync_due_s:
                self._sync_due_s = None
                self._writer.sync()
            if self._writer.needs_rotation():
                sealed = self._writer.rotate()
                if sealed is not None and self._on_sealed is not None:
                    self._on_sealed(sealed)
        except (FatalIOError, ReadOnlyError):
            # Said once by the writer; every later submission is refused with the reason.
            self._sync_due_s = None

    def _refuse_rest(self) -> None:
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item.future.set_exception(ReadOnlyError("the manifest log is closed"))
