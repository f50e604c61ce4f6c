"""DirectoryStore: the remote tier in a folder (`file:///path`), with S3's semantics and no server.

    <root>/<key>                      the object's bytes, nothing else
    <root>/.aof2-meta/<key>.json      size, mtime, crc64, metadata: about the object that has this size and mtime
    <root>/<folder>/.aof2-tmp-…       a put under way
    <root>/.aof2-lock                 flock of replace_if_match

`cp -a` and `rsync -a` copy a volume: the note beside an object names its mtime, not its inode. A note that is about
other bytes, or is missing, costs a reading of the object to learn its crc64, never a wrong answer.

Invariants
- An object appears by link(2) or rename(2) of a synced file, then its folder is synced: old or new, whole.
- Keys never leave the root: `check_key` refuses dots and NULs, and no symbolic link below the root is followed.
- The root is the folder that was opened. When it is gone or another one (an unmounted disk), calls fail as unavailable
  instead of finding nothing, and nothing is written into the empty mount point.

Owner: any thread, any process. A crash leaves `.aof2-tmp-…` files, which abort_stale_uploads removes, and at worst an
object without its note.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.fds import opened
from aof2.engine.remote import directory_files as tree
from aof2.engine.remote.errors import FencedError, RemoteCorruptError, RemoteMissingError, RemoteUnavailableError
from aof2.engine.remote.keys import RESERVED_PREFIX, check_key, check_prefix
from aof2.engine.remote.resilience import Deadline, RemoteStats, Resilience
from aof2.engine.remote.source import ChunksSource, FileTarget, Source, checked_crc64, pieces
from aof2.engine.remote.store import (
    BlobInfo,
    check_metadata,
    combined_crc64,
    default_timeout_s,
    split_checksums,
    with_checksums,
)
from aof2.engine.settings.remote import RemoteSettings, parse_url
from aof2.native import crc64 as crc64_of_bytes

T = TypeVar("T")

PIECE_BYTES: Final = 1 << 20
LOCK_NAME: Final = f"{RESERVED_PREFIX}lock"

CRASH_POINTS: Final = (
    "remote.dir.temp",
    "remote.dir.synced",
    "remote.dir.named",
    "remote.dir.note.temp",
    "remote.dir.note.synced",
    "remote.dir.note.renamed",
)

link = os.link
"""Beside Env.files, which has no link(2) yet; the crash tests replace it by one that keeps their journal."""


class DirectoryStore:
    """See the module's text."""

    def __init__(self, env: Env, settings: RemoteSettings, *, sleep_s: Callable[[float], object] | None = None) -> None:
        self._env = env
        self._root = parse_url(settings.url).path
        self._timeout_s = settings.timeout_s
        self._weather = Resilience(
            env, f"file://{self._root}", retries=settings.retries, timeout_s=settings.timeout_s, sleep_s=sleep_s
        )
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._identity = self._root_identity()
        except OSError as e:
            raise tree.translate(e, f"opening {self._root}") from None

    # Puts

    def put_blob(
        self, key: str, source: Source, size: int, *, crc64: int | None = None, sha256: bytes | None = None
    ) -> str:
        return self._put(key, source, size, crc64, sha256, if_absent=False)

    def _put(
        self, key: str, source: Source, size: int, crc64: int | None, sha256: bytes | None, *, if_absent: bool
    ) -> str:
        path, deadline = self._path(key), self._deadline(size)
        crc = checked_crc64(source, size, crc64, sha256)
        meta = with_checksums({}, crc, sha256)

        def attempt() -> str:
            found = self._info(key)
            if found is not None and (found.size, found.crc64) == (size, crc):
                self._weather.skipped_put()
                return self._noted(key, path, crc, meta)
            if found is not None and if_absent:
                raise _fenced(key)
            with self._temp(path, source, size, crc, deadline) as temp:
                mine = temp.stat()
                if not if_absent:
                    self._env.files.rename(temp, path)
                if not if_absent or self._link(temp, path):
                    return self._named(key, path, crc, meta, mine)
            raise RemoteUnavailableError(f"put of {key}: another put came first")  # the next try finds what it put

        return self._run(f"put of {key}", attempt, deadline)

    def put_if_absent(self, key: str, data: bytes, metadata: Mapping[str, str] | None = None) -> str:
        path, crc = self._path(key), crc64_of_bytes(data)
        meta = with_checksums(check_metadata(metadata), crc, None)
        deadline = self._deadline(len(data))

        def attempt() -> str:
            with self._temp(path, data, len(data), crc, deadline) as temp:
                mine = temp.stat()
                if self._link(temp, path):
                    return self._named(key, path, crc, meta, mine)
            if self._content(key) != data:
                raise _fenced(key)
            return self._noted(key, path, crc, meta)

        return self._run(f"put of {key}", attempt, deadline)

    def replace_if_match(self, key: str, data: bytes, etag: str | None) -> str:
        path, crc = self._path(key), crc64_of_bytes(data)
        meta = with_checksums({}, crc, None)
        deadline = self._deadline(len(data))

        def attempt() -> str:
            with self._lock(deadline):
                now = self._content(key)
                if now == data:
                    return self._noted(key, path, crc, meta)
                if etag != (None if now is None else _etag(len(now), crc64_of_bytes(now))):
                    raise _fenced(key)
                with self._temp(path, data, len(data), crc, deadline) as temp:
                    mine = temp.stat()
                    self._env.files.rename(temp, path)
                return self._named(key, path, crc, meta, mine)

        return self._run(f"replacement of {key}", attempt, deadline)

    @contextmanager
    def _temp(self, path: Path, source: Source, size: int, crc64: int, deadline: Deadline) -> Iterator[Path]:
        """A synced file of these bytes in the folder of `path`; gone afterwards unless it was renamed."""
        env = self._env
        temp, fd = tree.create_temp(env, self._root, path.parent)
        try:
            try:
                at = crc = 0
                for piece in pieces(source, size, PIECE_BYTES):
                    deadline.check(f"put of {path.name}")
                    crc = crc64_of_bytes(piece, crc)
                    env.files.pwrite(fd, piece, at)
                    at += len(piece)
                if crc != crc64:
                    raise CorruptError(f"the source of {path.name} has changed: crc64 {crc:016x}, not {crc64:016x}")
                env.failpoint("remote.dir.temp")
                # No other put shares this mtime: the clock's tick is too coarse to tell two puts apart.
                now_ns = env.now_ms() * 1_000_000 + env.rng.getrandbits(20) % 1_000_000
                os.utime(fd, ns=(now_ns, now_ns))
                env.files.fsync(fd)
            finally:
                env.files.close(fd)
            self._weather.sent(size)
            env.failpoint("remote.dir.synced")
            yield temp
        finally:
            with suppress(FileNotFoundError):
                env.files.unlink(temp)

    def _link(self, temp: Path, path: Path) -> bool:
        with suppress(FileExistsError):
            link(temp, path)
            return True
        return False

    def _named(self, key: str, path: Path, crc64: int, meta: dict[str, str], mine: os.stat_result) -> str:
        """The object has its name: make that durable, then leave the note."""
        self._env.failpoint("remote.dir.named")
        return self._noted(key, path, crc64, meta, mine)

    def _noted(self, key: str, path: Path, crc64: int, meta: dict[str, str], mine: os.stat_result | None = None) -> str:
        """Leaves the note unless there is one; the etag. An object found there was perhaps not durable yet: synced.
        `mine`: what was put there; another put may have replaced it since, and leaves a note of its own."""
        self._env.files.fsync_dir(path.parent)
        found = path.stat()
        if mine is not None and (found.st_size, found.st_mtime_ns) != (mine.st_size, mine.st_mtime_ns):
            return _etag(mine.st_size, crc64)
        if tree.read_note(self._root, key, found) is None:
            note = tree.Note(size=found.st_size, mtime_ns=found.st_mtime_ns, crc64=crc64, metadata=meta)
            tree.write_note(self._env, self._root, key, note)
        return _etag(found.st_size, crc64)

    # Gets

    def get_blob(self, key: str, *, timeout_s: float | None = None) -> tuple[BlobInfo, bytes]:
        self._path(key)
        given = None if timeout_s is None else Deadline(self._env, timeout_s)

        def attempt() -> tuple[BlobInfo, bytes]:
            for _ in range(2):
                with self._opened(key) as (fd, found):
                    note = tree.read_note(self._root, key, found)
                    data = self._whole(fd, found.st_size, f"get of {key}", given or self._deadline(found.st_size))
                crc = crc64_of_bytes(data)
                if note is None or note.crc64 == crc:
                    return self._info_of(key, found, note or tree.Note.bare(found, crc)), data
            raise RemoteCorruptError("the object's bytes fail their checksum, read twice", path=key)

        return self._run(f"get of {key}", attempt, given or self._deadline(0))

    def _whole(self, fd: int, size: int, what: str, deadline: Deadline) -> bytes:
        pieces: list[bytes] = []
        for at in range(0, size, PIECE_BYTES):
            deadline.check(what)
            pieces.append(os.pread(fd, min(PIECE_BYTES, size - at), at))
        self._weather.received(size)
        return b"".join(pieces)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._path(key)
        if offset < 0 or length < 0:
            raise ValueError(f"range {offset}+{length}")

        def attempt() -> bytes:
            with self._opened(key) as (fd, found):
                if offset + length > found.st_size:
                    what = f"the object has {found.st_size} bytes, {length} at {offset} were expected"
                    raise RemoteCorruptError(what, path=key)
                data = os.pread(fd, length, offset)
            if len(data) != length:
                raise RemoteUnavailableError(f"get of {key}: {len(data)} bytes came of {length}")
            self._weather.received(length)
            return data

        return self._run(f"get of {key}", attempt, self._deadline(length))

    async def glance(self, key: str, offset: int, length: int) -> bytes | None:
        return None  # a disk may take its time

    def receive_range(self, key: str, offset: int, length: int, target: FileTarget) -> None:
        step = max(target.piece_bytes, PIECE_BYTES // target.piece_bytes * target.piece_bytes)
        piece = 0
        for at in range(0, length, step):
            piece = target.put_from(piece, self.get_range(key, offset + at, min(step, length - at)))

    def head_blob(self, key: str) -> BlobInfo | None:
        self._path(key)
        return self._run(f"head of {key}", lambda: self._info(key), self._deadline(0))

    # Listing and deleting

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        check_prefix(prefix)
        self._run(f"list of {prefix}", lambda: None, self._deadline(0))
        try:
            for key, found in tree.walk(self._root, prefix):
                note = tree.read_note(self._root, key, found)
                etag = _etag(found.st_size, note.crc64) if note else ""
                yield BlobInfo(key=key, size=found.st_size, etag=etag, modified_ms=found.st_mtime_ns // 1_000_000)
        except OSError as e:
            raise tree.translate(e, f"list of {prefix}") from None

    def delete(self, keys: Iterable[str]) -> None:
        for key in [check_key(key) for key in keys]:
            self._run(f"delete of {key}", partial(self._delete, key), self._deadline(0))

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with suppress(RemoteMissingError, FileNotFoundError), self._opened(key):
            self._env.files.unlink(path)
            self._env.files.fsync_dir(path.parent)
        note = tree.note_path(self._root, key)
        with suppress(FileNotFoundError, NotADirectoryError):
            self._env.files.unlink(note)
        for folder in (path.parent, note.parent):
            tree.prune_folders(self._root, folder)

    # Composing

    def compose(self, key: str, sources: Sequence[str]) -> str:
        self._path(key)
        found = [self.head_blob(source) for source in sources]
        infos = [info for info in found if info is not None]
        if len(infos) < len(sources):
            raise RemoteMissingError(f"compose: {sources[found.index(None)]} is not there")
        whole_of = ChunksSource(lambda: self._concatenated(infos))
        size, crc = sum(info.size for info in infos), combined_crc64(infos)
        return self._put(key, whole_of, size, crc, None, if_absent=True)

    def _concatenated(self, infos: Sequence[BlobInfo]) -> Iterator[bytes]:
        for info in infos:
            for at in range(0, info.size, PIECE_BYTES):
                yield self.get_range(info.key, at, min(PIECE_BYTES, info.size - at))

    # Upkeep

    def abort_stale_uploads(self, older_than_s: float) -> int:
        before_ns = (self._env.now_ms() - int(older_than_s * 1000)) * 1_000_000

        def attempt() -> int:
            removed = 0
            for folder, _, files in os.walk(self._root):
                for name in files:
                    path = Path(folder) / name
                    with suppress(FileNotFoundError):
                        if name.startswith(tree.TEMP_PREFIX) and path.lstat().st_mtime_ns <= before_ns:
                            self._env.files.unlink(path)
                            removed += 1
            return removed

        return self._run("list of uploads", attempt, self._deadline(0))

    def stats(self) -> RemoteStats:
        return self._weather.stats()

    def close(self) -> None:
        self._weather.close()

    # Inside

    def _run(self, what: str, attempt: Callable[[], T], deadline: Deadline) -> T:
        def checked() -> T:
            try:
                if self._root_identity() != self._identity:
                    raise RemoteUnavailableError(
                        f"{what}: another folder is at {self._root}; is its disk mounted?", retryable=False
                    )
                return attempt()
            except OSError as e:
                raise tree.translate(e, what) from None

        return self._weather.run(what, checked, deadline)

    def _root_identity(self) -> tuple[int, int]:
        found = self._root.stat()
        return found.st_dev, found.st_ino

    @contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, os.stat_result]]:
        fd = tree.open_object(self._root, key)
        if fd is None:
            raise RemoteMissingError(f"{key}: no such object")
        try:
            yield fd, os.fstat(fd)
        finally:
            os.close(fd)

    def _content(self, key: str) -> bytes | None:
        with suppress(RemoteMissingError), self._opened(key) as (fd, found):
            return os.pread(fd, found.st_size, 0)
        return None

    def _info(self, key: str) -> BlobInfo | None:
        with suppress(RemoteMissingError), self._opened(key) as (fd, found):
            note = tree.read_note(self._root, key, found)
            if note is None:
                crc = 0
                for at in range(0, found.st_size, PIECE_BYTES):
                    crc = crc64_of_bytes(os.pread(fd, PIECE_BYTES, at), crc)
                note = tree.Note.bare(found, crc)
            return self._info_of(key, found, note)
        return None

    def _info_of(self, key: str, found: os.stat_result, note: tree.Note) -> BlobInfo:
        metadata, _, sha = split_checksums(note.metadata)
        return BlobInfo(
            key=key,
            size=found.st_size,
            etag=_etag(found.st_size, note.crc64),
            modified_ms=found.st_mtime_ns // 1_000_000,
            crc64=note.crc64,
            sha256=sha,
            metadata=metadata,
        )

    @contextmanager
    def _lock(self, deadline: Deadline) -> Iterator[None]:
        """One replacement at a time, in any process; waits for its turn without holding anything."""
        with opened(self._root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644) as fd:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    deadline.check("waiting for another writer's lock")
                    self._weather.pause("waiting for another writer's lock", 0.005)
            yield

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _deadline(self, size: int) -> Deadline:
        return Deadline(self._env, default_timeout_s(self._timeout_s, size))


def _etag(size: int, crc64: int) -> str:
    return f'"{size:x}-{crc64:016x}"'


def _fenced(key: str) -> FencedError:
    return FencedError(f"{key}: holds other bytes, put there by another writer")
