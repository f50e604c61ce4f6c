"""Writing the log: append, commit, rotate as separate steps.

append puts records into the active chunk's mapping; commit makes them part of the log (a marker, one header write) and,
unless told otherwise, durable (one fsync); rotate seals the chunk and hands it over for upload. Rotation happens only
between commits, so a commit is always whole in one chunk.

Invariants
- One writer a stream: an exclusive lock on the folder.
- What `commit(sync=True)` returned for survives power loss; `commit(sync=False)`, the end of the process.
- After a failed fsync the writer takes nothing more (FatalIOError once, ReadOnlyError from then on).
- Chunk indexes and record ordinals have no holes.

A crash leaves an unsealed chunk or a `.tmp`; `ManifestLogWriter.open` trims the one and removes the other.
Owner: one thread (see `group`); not safe for several.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import FatalIOError, LimitError, ReadOnlyError
from aof2.engine.manifest import format as fmt
from aof2.engine.manifest import payloads
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.chunk import ActiveChunk, is_bookkeeping, sealed_rw
from aof2.engine.manifest.quarantine import refuse_if_quarantined
from aof2.engine.manifest.reader import Chunk, Stream, parse_chunk

log = logging.getLogger(__name__)

CRASH_POINTS: Final = ("manifest.open.emptied", "manifest.rotate.sealed")
# A commit every now and then must not keep a chunk from its upload for ever.
ROTATION_AGE_PERIODS_MAX: Final = 20
COMMIT_LEN_MAX: Final = 128 << 20


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`[manifest]` of mount.conf. `record_len_max` is the room that must be left for a chunk to take another record."""

    chunk_capacity: int = 256 << 10
    rotation_period_ms: int = 250
    durable: bool = True
    record_len_max: int = 4096

    def __post_init__(self) -> None:
        if not fmt.CAPACITY_MIN <= self.chunk_capacity <= fmt.CAPACITY_MAX:
            raise ValueError(
                f"chunk_capacity is {self.chunk_capacity}; it may be {fmt.CAPACITY_MIN} to {fmt.CAPACITY_MAX} bytes"
            )
        room = self.chunk_capacity - fmt.CHUNK_HEADER_LEN - fmt.COMMIT_RECORD_LEN
        if not 0 < self.record_len_max < room:
            raise ValueError(
                f"record_len_max is {self.record_len_max}; with this chunk_capacity it may be 1 to {room - 1}"
            )
        if self.rotation_period_ms <= 0:
            raise ValueError(f"rotation_period_ms is {self.rotation_period_ms}; it must be positive")


class SealedChunk(NamedTuple):
    """A chunk that will not change any more, ready for upload."""

    path: Path
    header: fmt.ChunkHeader
    record_count: int


class ManifestLogWriter:
    """The one writer of a stream's folder. Use `open`."""

    def __init__(
        self,
        env: Env,
        directory: Path,
        settings: LogSettings,
        lock_fd: int,
        start: fmt.LogPosition,
        chunk: ActiveChunk | None,
    ) -> None:
        self.env = env
        self.directory = directory
        self.settings = settings
        self.fsyncs = 0
        self.substantive = 0  # records committed since `open` that are more than the log's own bookkeeping
        self._lock_fd = lock_fd
        self._next = start
        self._chunk = chunk
        self._failed = False

    @classmethod
    def open(
        cls, env: Env, directory: Path, settings: LogSettings | None = None, *, start: fmt.LogPosition | None = None
    ) -> ManifestLogWriter:
        """Opens or creates the log in `directory`. `start` is where it begins when there are no chunks at all."""
        settings = settings or LogSettings()
        env.make_dirs(directory)
        lock_fd = _lock(directory)
        try:
            refuse_if_quarantined(directory)
            for name in os.listdir(directory):  # noqa: PTH208
                if fmt.TEMP_NAME.fullmatch(name):
                    env.files.unlink(directory / name)
            position, chunk = _resume(env, directory, settings, start or fmt.LogPosition(0, fmt.CHUNK_HEADER_LEN, 0))
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(env, directory, settings, lock_fd, position, chunk)

    def __enter__(self) -> ManifestLogWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def position(self) -> fmt.LogPosition:
        """The end of what is committed: where a snapshot taken now belongs."""
        chunk = self._chunk
        if chunk is None:
            return self._next
        return fmt.LogPosition(chunk.index, chunk.committed_len, chunk.base_record + chunk.committed_count)

    @property
    def uncommitted_bytes(self) -> int:
        return 0 if self._chunk is None else self._chunk.tail - self._chunk.committed_len

    def append(
        self, payload: payloads.Payload, *, segment_id: int = 0, logical_offset: int = 0, timestamp_ms: int = 0
    ) -> int:
        """Adds one record; its ordinal. OSError (no room) changes nothing."""
        kind, data = payloads.encode(payload)
        chunk = self._writable(len(data))
        ordinal = chunk.base_record + chunk.count
        chunk.append_one(int(kind), segment_id, logical_offset, timestamp_ms or self.env.now_ms(), data)
        return ordinal

    def append_batch(self, batch: RecordBatch) -> int:
        """Adds records together, all or (on OSError) none; the first one's ordinal."""
        if not batch:
            raise ValueError("an empty batch has no place in the log")
        batch.stamp(self.env.now_ms())
        chunk = self._writable(batch.encoded_len)
        ordinal = chunk.base_record + chunk.count
        chunk.append(batch)
        return ordinal

    def commit(self, *, sync: bool = True) -> fmt.LogPosition:
        """Everything appended so far is in the log; with `sync`, also after power loss."""
        chunk = self._chunk
        if chunk is not None:
            self._refuse_if_failed()
            before = chunk.committed_substantive
            with self._fatal():
                committed = chunk.commit(self.env.now_ms())
            if committed:
                self.substantive += chunk.committed_substantive - before
                if not (sync and self.settings.durable):
                    chunk.publish()
        if sync:
            self.sync()
        return self.position

    def rollback(self) -> None:
        """Forgets what was appended since the last commit: the callers that wanted it are told that it failed."""
        if self._chunk is not None:
            self._chunk.rollback()

    def sync(self) -> None:
        """What is committed is durable when this returns. One fsync however much that is; none if there is nothing."""
        chunk = self._chunk
        if chunk is None or not self.settings.durable or chunk.committed_len == fmt.CHUNK_HEADER_LEN:
            return
        self._refuse_if_failed()
        self.fsyncs += chunk.durable_len != chunk.committed_len
        with self._fatal():
            chunk.sync()

    def sync_name(self) -> None:
        """A new chunk's name is durable when this returns: who syncs next waits for its bytes alone."""
        if self._chunk is not None and self.settings.durable and not self._failed:
            with self._fatal():
                self._chunk.sync_name()

    def needs_rotation(self) -> bool:
        """Full, or quiet for a rotation period with something in it worth uploading."""
        chunk = self._chunk
        if chunk is None or chunk.count == 0:
            return False
        if chunk.tail + self.settings.record_len_max > self.settings.chunk_capacity:
            return True
        return self.rotation_wait_s() == 0.0

    def holds_below(self, ordinal: int) -> bool:
        """Whether the active chunk holds records before that one."""
        chunk = self._chunk
        return chunk is not None and chunk.count > 0 and chunk.base_record < ordinal

    def rotation_wait_s(self) -> float | None:
        """Seconds until the timer rotates, 0 when it is time; None: nothing but the log's own bookkeeping is in it."""
        chunk = self._chunk
        if chunk is None or chunk.substantive == 0:
            return None
        period = self.settings.rotation_period_ms
        quiet = max(chunk.last_commit_ms, chunk.first_substantive_ms) + period
        due_ms = min(quiet, chunk.first_substantive_ms + ROTATION_AGE_PERIODS_MAX * period)
        now_ms = self.env.now_ms()
        # A clock that went backwards must not hold a chunk back for as long as it was off.
        return 0.0 if now_ms < chunk.last_commit_ms else max(0, due_ms - now_ms) / 1000

    def rotate(self, on_sealed: Callable[[SealedChunk], object] = lambda _: None) -> SealedChunk | None:
        """Commits, seals the active chunk and gives it out for upload; None when there is nothing to seal. `on_sealed`
        is told as soon as that is durable: who waits for the upload need not wait for the file to be cut."""
        chunk = self._chunk
        if chunk is None or chunk.count == 0:
            return None
        self.commit(sync=False)
        self.sync()
        self._refuse_if_failed()
        with self._fatal():
            header = chunk.seal(sync=self.settings.durable)
        self.fsyncs += self.settings.durable
        self._chunk = None
        self._next = fmt.LogPosition(chunk.index + 1, fmt.CHUNK_HEADER_LEN, chunk.base_record + chunk.count)
        sealed = SealedChunk(self.directory / fmt.chunk_name(chunk.index), header, chunk.count)
        on_sealed(sealed)
        with self._fatal():
            chunk.cut()
        self.env.failpoint("manifest.rotate.sealed")
        return sealed

    def make_ready(self) -> None:
        """The next chunk has its file, so that who commits next does not wait for that; where there is no room now, it
        is asked for again then. A crash leaves a `.tmp`."""
        if self._chunk is None and not self._failed:
            with contextlib.suppress(OSError):
                self._writable(0)

    def close(self) -> None:
        """Commits and syncs what was appended, and lets go. The active chunk stays open for the next writer."""
        if self._lock_fd < 0:
            return
        try:
            if self._chunk is not None and not self._failed:
                self.commit()
        finally:
            if self._chunk is not None:
                self._chunk.abandon()
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._chunk = None

    def _writable(self, length: int) -> ActiveChunk:
        self._refuse_if_failed()
        if self._lock_fd < 0:
            raise ReadOnlyError(f"{self.directory}: the log is closed")
        if length + self.uncommitted_bytes > COMMIT_LEN_MAX:
            raise LimitError(f"one commit holds at most {COMMIT_LEN_MAX} bytes; commit before appending more")
        if self._chunk is None:
            capacity = self.settings.chunk_capacity
            self._chunk = ActiveChunk.create(
                self.env, self.directory, self._next.chunk_index, self._next.ordinal, capacity
            )
        return self._chunk

    def _refuse_if_failed(self) -> None:
        if self._failed:
            raise ReadOnlyError(
                f"{self.directory}: the log failed to reach the disk and takes no more; see the log file"
            )

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        try:
            yield
        except (FatalIOError, OSError) as e:
            self._failed = True
            log.critical("manifest log failed", extra={"directory": str(self.directory), "error": str(e)})
            if isinstance(e, FatalIOError):
                raise
            raise FatalIOError(f"{self.directory}: {e.strerror} while making the log durable") from e


def _lock(directory: Path) -> int:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise ReadOnlyError(f"{directory}: another process is writing this log; stop it first") from None
    return fd


def _resume(
    env: Env, directory: Path, settings: LogSettings, start: fmt.LogPosition
) -> tuple[fmt.LogPosition, ActiveChunk | None]:
    """Where the log ends, and the unsealed chunk to go on in."""
    stream = Stream(directory)
    while stream.chunks:
        where = stream.chunks[-1]
        chunk = parse_chunk(where.read(), path=str(where.path), last=True, expect_index=where.index)
        if chunk is not None:
            return _resume_after(env, directory, settings, chunk)
        # Never committed, or its only commit was torn: the index is free again.
        _clear_away(env, where.path)
        env.failpoint("manifest.open.emptied")
        env.files.fsync_dir(directory)
        stream.chunks.pop()
        if stream.chunks and stream.chunks[-1].index != where.index - 1:
            raise fmt.ManifestIntegrityError("chunk is missing", path=str(directory), chunk_index=where.index - 1)
        start = max(start, fmt.LogPosition(where.index, fmt.CHUNK_HEADER_LEN, start.ordinal))
    return start, None


def _clear_away(env: Env, path: Path) -> None:
    """Removes a chunk that holds no commit. Bytes in it that are not zero are kept aside for the operator."""
    data = path.read_bytes()
    if not any(data):
        env.files.unlink(path)
        return
    kept = path.with_name(path.name + ".torn")
    log.warning("chunk without a commit put aside", extra={"path": str(path), "kept": kept.name, "bytes": len(data)})
    env.files.rename(path, kept)


def _resume_after(
    env: Env, directory: Path, settings: LogSettings, last: Chunk
) -> tuple[fmt.LogPosition, ActiveChunk | None]:
    end = last.end_position
    if last.header.sealed:
        if last.trimmed:
            # Sealed and synced, but the process ended before the file was cut.
            with sealed_rw(env, Path(last.path)) as fd:
                env.files.truncate(fd, last.end)
                if settings.durable:
                    env.files.fsync(fd)
        return fmt.LogPosition(end.chunk_index + 1, fmt.CHUNK_HEADER_LEN, end.ordinal), None
    header = last.header._replace(tail_offset=last.end)
    substantive = sum(not is_bookkeeping(r.type_id, r.segment_id, r.payload) for r in last.records())
    chunk = ActiveChunk.resume(
        env,
        directory,
        header,
        count=last.count,
        substantive=substantive,
        capacity=settings.chunk_capacity,
        sync=settings.durable,
    )
    return end, chunk
