"""What publishing did so far: counts for metrics and events, and the moment at which each stage of a job is over.

A job stages, uploads and publishes many blobs at once. `on_staged` is called when the last of them is staged,
`on_uploaded` when the last is in the remote, each once; a blob whose content is there already is through with both. Of
blobs that are not wanted any more no stage is seen: `finish` says what was not said by then.

Owner: the worker threads that stage and upload, and the trio thread; a lock guards the counts. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from aof2.engine.locks import thread_lock

Told = Callable[["Tally"], object]


class Tally:
    """`on_blob` is called after blobs, with how many, on the trio thread; the others on the thread that ended the
    stage."""

    def __init__(self, on_blob: Callable[[int], object] | None = None, expected_blobs: int = 0) -> None:
        self.blobs = 0
        self.staged_blobs = 0
        self.staged_bytes = 0
        self.staged_s = 0.0
        self.uploaded_blobs = 0
        self.uploaded_bytes = 0
        self.uploaded_s = 0.0
        self.released_bytes = 0
        self.failed_stage = ""  # the first that failed
        self.on_staged: Told | None = None
        self.on_uploaded: Told | None = None
        self._on_blob = on_blob
        self._expected = expected_blobs
        self._staged: set[int] = set()
        self._uploaded: set[int] = set()
        self._lock = thread_lock()

    def staged(self, chunk_id: int, size_bytes: int, took_s: float) -> None:
        self.staged_all((chunk_id,), size_bytes, took_s)

    def staged_all(self, chunk_ids: Collection[int], size_bytes: int, took_s: float) -> None:
        """The blobs of a pack, which are staged together."""
        with self._lock:
            self.staged_blobs += len(chunk_ids)
            self.staged_bytes += size_bytes
            self.staged_s += took_s
            self._staged.update(chunk_ids)
        self._tell()

    def uploaded(self, chunk_id: int, size_bytes: int, took_s: float) -> None:
        self.uploaded_all((chunk_id,), size_bytes, took_s)

    def uploaded_all(self, chunk_ids: Collection[int], size_bytes: int, took_s: float) -> None:
        with self._lock:
            self.uploaded_blobs += len(chunk_ids)
            self.uploaded_bytes += size_bytes
            self.uploaded_s += took_s
            self._uploaded.update(chunk_ids)
        self._tell()

    def blob_done(self, chunk_id: int) -> None:
        self.blobs_done((chunk_id,))

    def blobs_done(self, chunk_ids: Collection[int]) -> None:
        self.blobs += len(chunk_ids)
        with self._lock:
            self._staged.update(chunk_ids)
            self._uploaded.update(chunk_ids)
        self._tell()
        if self._on_blob is not None:
            self._on_blob(len(chunk_ids))

    def finish(self) -> None:
        """The job is through: nothing more will come."""
        self._expected = 0
        self._tell()

    @contextlib.contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """What fails inside failed in that stage."""
        try:
            yield
        except Exception:
            self.failed_stage = self.failed_stage or stage
            raise

    def _tell(self) -> None:
        with self._lock:
            staged = self.on_staged if len(self._staged) >= self._expected else None
            uploaded = self.on_uploaded if len(self._uploaded) >= self._expected else None
            self.on_staged = None if staged is not None else self.on_staged
            self.on_uploaded = None if uploaded is not None else self.on_uploaded
        if staged is not None:
            staged(self)
        if uploaded is not None:
            uploaded(self)
