"""Getting sealed chunks to the remote, and many small ones into bundles. The remote itself is behind an interface.

Every attempt is in the log: UploadStarted, then UploadDone, or UploadFailed with its reason and another try. They are
about the log itself, so they carry LOG_SEGMENT_ID and land in a later chunk than the one they speak of: history stays
linear. Of chunks it is said after the put, or before its UploadFailed: a caller that waits for an upload waits for
nothing of that, and a chunk tells by its name where it is. Other work that a crash cut short is in
ManifestIndex.pending_uploads and pending_deletes.

Invariants
- A chunk is marked uploaded only after UploadDone is committed; a crash between repeats an idempotent put, and so does
  a power loss that takes both away. What is deleted for it waits until UploadDone is durable.
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
from typing import Final, Protocol, TypeVar

import msgspec

from aof2 import native
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, ReadOnlyError, TransientError
from aof2.engine.manifest import format as fmt
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.chunk import FLAGS_AT, as_uploaded, mark_uploaded
from aof2.engine.manifest.reader import parse_chunk, read_file
from aof2.engine.manifest.writer import SealedChunk

log = logging.getLogger(__name__)

T = TypeVar("T")

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
LogAppender = Callable[[RecordBatch], object]
# Appends records that need not be durable; the answer is to wait for their commit.
SoonAppender = Callable[[RecordBatch], Callable[[], object]]


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
        soon: SoonAppender | None = None,
    ) -> None:
        """`soon` takes what is said of chunks, which need not be durable: they tell by themselves where they are."""
        self.env = env
        self.stream_id = stream_id
        self.retries = 0
        self._remote = remote
        self._append = append
        self._soon = soon or _at_once(append)
        self._begun: Sequence[SealedChunk] = ()  # being put, and not in the log as such
        self._unsaid: list[tuple[SealedChunk, str]] = []  # there, and not in the log as such: with their etags
        # Commits of that, and what each speaks of.
        self._said: list[tuple[Callable[[], object], list[tuple[SealedChunk, str]]]] = []
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
    ) -> list[str]:
        """`put_all`, and the log says of those that are there that they are."""
        try:
            etags = self.put_all(chunks, snapshot_id=snapshot_id, on_put=on_put)
        except ReadOnlyError:
            raise  # not ours to write any more, neither there nor here
        except Aof2Error:
            self.say_done()
            raise
        self.say_done()
        return etags

    def put_all(
        self, chunks: Sequence[SealedChunk], *, snapshot_id: int, on_put: Callable[[SealedChunk], object]
    ) -> list[str]:
        """Puts the chunks in their order; their etags. They share the commits about them, which may be slow to come.

        What fails stops the ones after it; those before it are there, and `on_put` was told. A damaged one that is not
        the first is left for the next call, with those after it.
        """
        bodies = self._bodies(chunks)
        self._begun = chunks = chunks[: len(bodies)]
        etags: list[str] = []
        for sealed, body in zip(chunks, bodies, strict=True):
            etag = self._put(sealed, body, snapshot_id)
            self._unsaid.append((sealed, etag))
            etags.append(etag)
            self.env.failpoint("manifest.upload.put")
            on_put(sealed)
        self._say()
        return etags

    @property
    def has_unsaid(self) -> bool:
        return bool(self._unsaid or self._said)

    def say_done(self) -> None:
        """What is uploaded is in the log as such, and marked. What a failed commit was to say is said next time."""
        self._say()
        try:
            while self._said:
                committed, done = self._said[0]
                committed()
                self.env.failpoint("manifest.upload.logged")
                for sealed, _ in done:
                    mark_uploaded(self.env, sealed.path, sync=False)
                del self._said[0]
        except BaseException:
            self._unsaid = [pair for _, done in self._said for pair in done] + self._unsaid
            self._said = []
            raise

    def _say(self) -> None:
        """That uploads began, and that some are done."""
        begun, done = self._begun, self._unsaid
        records: list[tuple[p.Payload, int]] = [(p.UploadStarted(self._key(s)), s.header.chunk_index) for s in begun]
        records += [(p.UploadDone(self._key(s), e), s.header.chunk_index) for s, e in done]
        self._begun = ()
        if records:
            self._said.append((self._soon(_about(records)), done))
            self._unsaid = []

    def _key(self, sealed: SealedChunk) -> str:
        return fmt.chunk_key(self.stream_id, sealed.header.chunk_index)

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
        data = read_file(sealed.path, length=sealed.header.committed_len)  # it may not be cut to it yet
        # What leaves this machine is checked once more: a chunk damaged on disk must not become the good copy.
        if not _is_as_sealed(data, sealed.header):
            parse_chunk(data, path=str(sealed.path), last=False, expect_index=sealed.header.chunk_index)
        return as_uploaded(data)

    def _put(self, sealed: SealedChunk, body: bytes, snapshot_id: int) -> str:
        metadata = {
            "chunk_crc64": f"{sealed.header.chunk_crc64:016x}",
            "base_record": str(sealed.header.base_record),
            "record_count": str(sealed.record_count),
            "snapshot_id": str(snapshot_id),
        }
        key = self._key(sealed)
        return self._retrying(key, sealed.header.chunk_index, lambda: self._remote.put(key, body, metadata))

    def compact(self, first: int, last: int, marker: p.SnapshotMarker) -> str:
        """Replaces the remote chunks first..last, which a snapshot covers, by one bundle."""
        key = fmt.bundle_key(self.stream_id, first, last)
        sources = [fmt.chunk_key(self.stream_id, index) for index in range(first, last + 1)]
        self._log([p.UploadStarted(key)], first)
        etag = self._retrying(key, first, lambda: self._remote.compose(key, sources))
        self.env.failpoint("manifest.compact.composed")
        self.bundled(key, etag, sources, marker, first)
        return etag

    def bundled(self, key: str, etag: str, sources: Sequence[str], marker: p.SnapshotMarker, first: int) -> None:
        """The bundle is there: it stands for its chunks, whose objects go."""
        queued: list[p.Payload] = [
            p.UploadDone(key, etag),
            marker,
            *(p.Tier2DeleteQueued(source) for source in sources),
        ]
        self._log(queued, first)
        self.env.failpoint("manifest.compact.queued")
        self.finish_deletes(sources, first)

    def finish_deletes(self, keys: Sequence[str], chunk_index: int = 0) -> None:
        """Deletes objects whose deletion is queued in the log; also what a restart resumes."""
        for key in keys:
            self._retrying(key, chunk_index, functools.partial(self._remote.delete, [key]), upload=False)
            self.env.failpoint("manifest.compact.deleted")
        self._log([p.Tier2Deleted(key) for key in keys], chunk_index)

    def _retrying(self, key: str, chunk_index: int, attempt: Callable[[], T], *, upload: bool = True) -> T:
        """A failed upload is in the log, with its reason; a failed delete is still queued there."""
        policy = self._policy
        for number in range(1, policy.attempts + 1):
            try:
                return attempt()
            except TransientError as e:
                if upload:
                    self._say()
                    self._log([p.UploadFailed(key, e.reason_code)], chunk_index)
                log.info(
                    "manifest object not reached", extra={"key": key, "reason_code": e.reason_code, "attempt": number}
                )
                if e.reason_code == fmt.ReasonCode.AUTH or number == policy.attempts:
                    raise UploadGaveUpError(key, e.reason_code, number) from e
                self.retries += 1
                ceiling = min(policy.backoff_max_s, policy.backoff_s * 2 ** (number - 1))
                self._sleep_s(self.env.rng.uniform(ceiling / 2, ceiling))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _log(self, records: Sequence[p.Payload], chunk_index: int) -> None:
        if records:
            self._append(_about([(payload, chunk_index) for payload in records]))


def _about(records: Sequence[tuple[p.Payload, int]]) -> RecordBatch:
    batch = RecordBatch()
    for payload, chunk_index in records:
        batch.add(payload, segment_id=fmt.LOG_SEGMENT_ID, logical_offset=chunk_index)
    return batch


def _at_once(append: LogAppender) -> SoonAppender:
    def soon(batch: RecordBatch) -> Callable[[], object]:
        append(batch)
        return lambda: None

    return soon


def _is_as_sealed(data: bytes, header: fmt.ChunkHeader) -> bool:
    """Whether these are the bytes whose checksum was taken when they were sealed."""
    with memoryview(data) as whole, whole[fmt.CHUNK_HEADER_LEN :] as records:
        return data[:FLAGS_AT] == header.pack()[:FLAGS_AT] and native.crc64(records) == header.chunk_crc64
