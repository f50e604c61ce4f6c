"""Getting sealed chunks to the remote, and many small ones into bundles. The remote itself is behind an interface.

Every attempt is in the log: UploadStarted, then UploadDone, or UploadFailed with its reason and another try. They are
about the log itself, so they carry LOG_SEGMENT_ID and land in a later chunk than the one they speak of: history stays
linear. Work that a crash cut short is in ManifestIndex.pending_uploads and pending_deletes.

Invariants
- A chunk is marked uploaded only after UploadDone is committed; a crash between repeats an idempotent put.
- A superseded object is deleted only after the bundle is there and Tier2DeleteQueued is durable.
- Reason 2 (authentication) ends the attempts of one call: keys and rights do not change within seconds. The caller
  comes again.
- `on_put` is told of a chunk as soon as the remote has it; that the log says so may take longer.

Owner: the task that runs `upload`/`compact`; appends go through the log's writer thread by way of `LogAppender`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, ReadOnlyError, TransientError
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.chunk import as_uploaded, mark_uploaded
from aof2.engine.manifest.format import LOG_SEGMENT_ID, LogPosition, ReasonCode, bundle_key, chunk_key
from aof2.engine.manifest.payloads import (
    Payload,
    SnapshotMarker,
    Tier2Deleted,
    Tier2DeleteQueued,
    UploadDone,
    UploadFailed,
    UploadStarted,
)
from aof2.engine.manifest.reader import parse_chunk, read_file
from aof2.engine.manifest.writer import SealedChunk

log = logging.getLogger(__name__)

CRASH_POINTS: Final = (
    "manifest.upload.put",
    "manifest.upload.logged",
    "manifest.compact.composed",
    "manifest.compact.queued",
    "manifest.compact.deleted",
)


class ManifestRemote(Protocol):
    """What the log asks of a remote. Failures are TransientError with a reason code, or another Aof2Error for good."""

    def put(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        """Stores the object unless it is already there with these bytes; its etag."""

    def compose(self, key: str, sources: Sequence[str]) -> str:
        """Stores the concatenation of the sources under `key`; its etag."""

    def delete(self, keys: Iterable[str]) -> None:
        """The objects are gone afterwards, whether or not they were there."""


# Appends records and commits them durably; the group commit's `commit_now`, or a writer's own.
LogAppender = Callable[[RecordBatch], LogPosition]


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    attempts: int = 5
    backoff_s: float = 0.2
    backoff_max_s: float = 10.0


class UploadGaveUpError(Aof2Error):
    """The upload failed for now; the log says why, and it is tried again at the next opportunity or after a fix."""

    def __init__(self, key: str, reason_code: int, attempts: int) -> None:
        self.key = key
        self.reason_code = reason_code
        super().__init__(f"{key}: not uploaded after {attempts} attempt(s), reason {reason_code}")


class ChunkUploader:
    """Uploads one stream's sealed chunks and compacts them."""

    def __init__(
        self,
        env: Env,
        stream_id: int,
        remote: ManifestRemote,
        append: LogAppender,
        *,
        policy: RetryPolicy | None = None,
        sleep_s: Callable[[float], None] = time.sleep,
        begin: Callable[[RecordBatch], object] | None = None,
    ) -> None:
        """`begin` takes records that need not be durable before what they announce is done; else `append` does."""
        self.env = env
        self.stream_id = stream_id
        self.retries = 0
        self._remote = remote
        self._append = append
        self._begin = begin or append
        self._policy = policy or RetryPolicy()
        self._sleep_s = sleep_s

    def upload(self, sealed: SealedChunk, *, snapshot_id: int = 0) -> str:
        """Puts the chunk on the remote and says so in the log; its etag. Repeating it is harmless."""
        return self.upload_all([sealed], snapshot_id=snapshot_id)[0]

    def upload_all(
        self,
        chunks: Sequence[SealedChunk],
        *,
        snapshot_id: int = 0,
        on_put: Callable[[SealedChunk], object] = lambda _: None,
        on_uploaded: Callable[[SealedChunk], object] = lambda _: None,
    ) -> list[str]:
        """Puts the chunks in their order; their etags. They share the commits that say so, which may be slow to come.

        What fails stops the ones after it; those before it are uploaded, and `on_uploaded` was told. A damaged one that
        is not the first is left for the next call, with those after it.
        """
        bodies = self._bodies(chunks)
        chunks = chunks[: len(bodies)]
        started = [(UploadStarted(self._key(sealed)), sealed.header.chunk_index) for sealed in chunks]
        self._log_about(started, self._begin)
        etags: list[str] = []
        error: Aof2Error | None = None
        for sealed, body in zip(chunks, bodies, strict=True):
            try:
                etags.append(self._put(sealed, body, snapshot_id))
            except ReadOnlyError:
                raise  # not ours to write any more, neither there nor here
            except Aof2Error as e:
                error = e
                break
            self.env.failpoint("manifest.upload.put")
            on_put(sealed)
        done = list(zip(chunks, etags, strict=False))
        self._log_about([(UploadDone(self._key(sealed), etag), sealed.header.chunk_index) for sealed, etag in done])
        self.env.failpoint("manifest.upload.logged")
        for sealed, _ in done:
            mark_uploaded(self.env, sealed.path)
            on_uploaded(sealed)
        if error is not None:
            raise error
        return etags

    def _key(self, sealed: SealedChunk) -> str:
        return chunk_key(self.stream_id, sealed.header.chunk_index)

    def _bodies(self, chunks: Sequence[SealedChunk]) -> list[bytes]:
        bodies: list[bytes] = []
        for sealed in chunks:
            try:
                bodies.append(self._body_of(sealed))
            except CorruptError:
                if not bodies:
                    raise
                break
        return bodies

    @staticmethod
    def _body_of(sealed: SealedChunk) -> bytes:
        data = read_file(sealed.path)
        # What leaves this machine is checked once more: a chunk damaged on disk must not become the good copy.
        parse_chunk(data, path=str(sealed.path), last=False, expect_index=sealed.header.chunk_index)
        return as_uploaded(data[: sealed.header.committed_len])

    def _put(self, sealed: SealedChunk, body: bytes, snapshot_id: int) -> str:
        metadata = {
            "chunk_crc64": f"{sealed.header.chunk_crc64:016x}",
            "base_record": str(sealed.header.base_record),
            "record_count": str(sealed.record_count),
            "snapshot_id": str(snapshot_id),
        }
        key = self._key(sealed)
        return self._retrying(key, sealed.header.chunk_index, lambda: self._remote.put(key, body, metadata))

    def compact(self, first: int, last: int, marker: SnapshotMarker) -> str:
        """Replaces the remote chunks first..last, which a snapshot covers, by one bundle."""
        key = bundle_key(self.stream_id, first, last)
        sources = [chunk_key(self.stream_id, index) for index in range(first, last + 1)]
        self._log(UploadStarted(key), first)
        etag = self._retrying(key, first, lambda: self._remote.compose(key, sources))
        self.env.failpoint("manifest.compact.composed")
        queued: list[Payload] = [UploadDone(key, etag), marker, *(Tier2DeleteQueued(source) for source in sources)]
        self._log_all(queued, first)
        self.env.failpoint("manifest.compact.queued")
        self.finish_deletes(sources, first)
        return etag

    def finish_deletes(self, keys: Sequence[str], chunk_index: int = 0) -> None:
        """Deletes objects whose deletion is queued in the log; also what a restart resumes."""
        for key in keys:
            self._retrying(key, chunk_index, functools.partial(self._delete, key), upload=False)
            self.env.failpoint("manifest.compact.deleted")
        self._log_all([Tier2Deleted(key) for key in keys], chunk_index)

    def _delete(self, key: str) -> str:
        self._remote.delete([key])
        return ""

    def _retrying(self, key: str, chunk_index: int, attempt: Callable[[], str], *, upload: bool = True) -> str:
        """A failed upload is in the log, with its reason; a failed delete is still queued there."""
        policy = self._policy
        for number in range(1, policy.attempts + 1):
            try:
                return attempt()
            except TransientError as e:
                if upload:
                    self._log(UploadFailed(key, e.reason_code), chunk_index)
                log.info(
                    "manifest object not reached", extra={"key": key, "reason_code": e.reason_code, "attempt": number}
                )
                if e.reason_code == ReasonCode.AUTH or number == policy.attempts:
                    raise UploadGaveUpError(key, e.reason_code, number) from e
                self.retries += 1
                ceiling = min(policy.backoff_max_s, policy.backoff_s * 2 ** (number - 1))
                self._sleep_s(self.env.rng.uniform(ceiling / 2, ceiling))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _log(self, payload: Payload, chunk_index: int) -> None:
        self._log_all([payload], chunk_index)

    def _log_all(self, records: Sequence[Payload], chunk_index: int) -> None:
        self._log_about([(payload, chunk_index) for payload in records])

    def _log_about(
        self, records: Sequence[tuple[Payload, int]], append: Callable[[RecordBatch], object] | None = None
    ) -> None:
        batch = RecordBatch()
        for payload, chunk_index in records:
            batch.add(payload, segment_id=LOG_SEGMENT_ID, logical_offset=chunk_index)
        if batch:
            (append or self._append)(batch)
