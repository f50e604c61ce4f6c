"""One log as the target of a group thread: what the tests of `engine/group.py` commit to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final, cast

from aof2.engine.group import GroupThread
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LogPosition
from aof2.engine.manifest.writer import ManifestLogWriter, SealedChunk

GROUP_BYTES_MAX: Final = 4 << 20


class _LogTarget:
    """A ManifestLogWriter as the thread sees it."""

    def __init__(self, writer: ManifestLogWriter, on_sealed: Callable[[SealedChunk], None] | None) -> None:
        self.writer = writer
        self._on_sealed = on_sealed

    def before(self, batch: RecordBatch) -> Iterator[None]:
        return iter(())

    def append(self, batch: RecordBatch) -> Callable[[], LogPosition]:
        self.writer.append_batch(batch)
        return lambda: self.writer.position

    def full(self) -> bool:
        return self.writer.uncommitted_bytes >= GROUP_BYTES_MAX

    def commit(self, *, sync: bool) -> None:
        self.writer.commit(sync=sync)

    def sync(self) -> None:
        self.writer.sync()

    def due_s(self) -> float | None:
        return self.writer.rotation_wait_s()

    def housekeep(self) -> None:
        if self.writer.needs_rotation():
            sealed = self.writer.rotate()
            if sealed is not None and self._on_sealed is not None:
                self._on_sealed(sealed)

    def close(self) -> None:
        self.writer.close()


class GroupCommit:
    """Owns a ManifestLogWriter on a thread of its own."""

    def __init__(
        self,
        writer: ManifestLogWriter,
        *,
        commit_period_ms: int = 100,
        on_sealed: Callable[[SealedChunk], None] | None = None,
    ) -> None:
        target = _LogTarget(writer, on_sealed)
        self._thread: GroupThread[RecordBatch] = GroupThread(
            writer.env, target, name="aof2-manifest", commit_period_ms=commit_period_ms
        )

    def start(self) -> GroupCommit:
        self._thread.start()
        return self

    def submit(self, batch: RecordBatch, *, sync: bool) -> Future[LogPosition]:
        """Queues the records; the future gives the end of the commit they are in."""
        if not batch:
            raise ValueError("an empty batch has no place in the log")
        return cast("Future[LogPosition]", self._thread.submit(batch, sync=sync))

    def flush(self) -> None:
        """Returns when everything submitted before is durable."""
        self._thread.flush().result()

    def commit_now(self, batch: RecordBatch) -> LogPosition:
        """`submit` with sync, waited for."""
        return self.submit(batch, sync=True).result()

    def close(self) -> None:
        """Commits and syncs what was submitted, ends the thread, closes the writer. Harmless when called again."""
        self._thread.close()
