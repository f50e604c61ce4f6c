"""Sealing: a while after the last close a dirty file is hashed, synced and recorded, and goes to the remote from there.

Files that were closed together are sealed together: hashed one after the other, written back all at once, synced, and
recorded in one group commit; ten thousand small files do not mean ten thousand journal commits.

Invariants
- A seal speaks of bytes nobody changes: no writer has the file open, and the kernel grants a read lease on it, which it
  refuses while a writable mapping or another descriptor lives. Refused means trying again later, not sealing.
- A write-open at any moment makes the seal under way void (`OpenFile.seal_attempt`).
- Bytes and name are durable before the seal is recorded.

Owner: the trio thread; hashing and syncing on worker threads. A crash leaves dirty files; recovery brings them here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2.engine import objects
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.errors import Aof2Error, CorruptError, FatalIOError, ReadOnlyError, TransientError
from aof2.engine.files import marks
from aof2.engine.files.state import OpenFile, Stamp
from aof2.engine.local.hot import Identity
from aof2.engine.tiering.hashing import ObjectDigest, digest_file

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

# What is closed is often opened again at once: editors, databases, builds.
QUIET_S: Final = 0.5
RETRY_S: Final = 2.0
BATCH_FILES: Final = 256
BATCH_BYTES: Final = 256 << 20
PARALLEL: Final = 2
LET_PASS_S: Final = 2.0  # what closed files wait for requests to be answered first
CRASH_POINTS: Final = ("seal.hashed", "seal.synced", "seal.recorded")


class Hashed(NamedTuple):
    file: OpenFile
    attempt: int
    digest: ObjectDigest
    identity: Identity
    times: marks.Times
    stamp: Stamp
    parts: dict[int, int]  # chunks that were uploaded before, and their blocks that are here


class Sealer:
    """What waits to be sealed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._due: dict[int, float] = {}  # inode → when, by the trio clock
        self._wake = trio.Event()
        self._busy: dict[int, trio.Event] = {}
        self._limiter = trio.CapacityLimiter(PARALLEL)
        self.sealed_files = 0

    def closed(self, file: OpenFile) -> None:
        """Nobody has this dirty file open any more."""
        self._due[file.ino] = trio.current_time() + QUIET_S
        self._wake.set()

    def wait(self, file: OpenFile) -> None:
        """It is open again, or gone."""
        self._due.pop(file.ino, None)

    @property
    def waiting(self) -> int:
        return len(self._due) + len(self._busy)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            if not self._due:
                self._wake = trio.Event()
                await self._wake.wait()
            await trio.sleep_until(min(self._due.values(), default=0.0))
            await self._files.volume.foreground.let_pass(LET_PASS_S)
            now_s = trio.current_time()
            # Not all at once: whoever asks meanwhile goes first, and may want them removed.
            ready = (ino for ino, due_s in self._due.items() if due_s <= now_s and ino not in self._busy)
            await self._seal_all(list(itertools.islice(ready, PARALLEL * BATCH_FILES)))

    async def seal_now(self, inos: Collection[int] | None = None) -> int:
        """Seals at once what is closed and dirty, and waits for what is being sealed; how many files."""
        before = self.sealed_files
        await self._files.kernel.settled()
        wanted = [ino for ino in self._due if inos is None or ino in inos]
        busy = [over for ino, over in self._busy.items() if inos is None or ino in inos]
        await self._seal_all(wanted)
        for over in busy:
            await over.wait()
        return self.sealed_files - before

    async def _seal_all(self, inos: Sequence[int]) -> None:
        batch: list[OpenFile] = []
        size = 0
        async with trio.open_nursery() as nursery:
            for ino in inos:
                file = self._files.file(ino)
                self._due.pop(ino, None)
                if file is None or not file.dirty or file.handles or ino in self._busy:
                    continue
                self._busy[ino] = trio.Event()
                if not file.whole:  # it may wait for the remote: nobody waits with it
                    await self._start_batch(nursery, [file])
                    continue
                batch.append(file)
                with contextlib.suppress(OSError):
                    size += file.stat().st_size
                if len(batch) >= BATCH_FILES or size >= BATCH_BYTES:
                    await self._start_batch(nursery, batch)
                    batch, size = [], 0
            if batch:
                await self._start_batch(nursery, batch)

    async def _start_batch(self, nursery: trio.Nursery, batch: list[OpenFile]) -> None:
        nursery.start_soon(self._seal_batch, batch)
        await trio.lowlevel.checkpoint()

    async def _seal_batch(self, batch: list[OpenFile]) -> None:
        try:
            await self._fill_all(batch)
            attempts = {file.ino: file.seal_attempt for file in batch}
            hashed, later = await trio.to_thread.run_sync(self._hash_all, batch, attempts, limiter=self._limiter)
            await self._record_all(hashed)
            self._again(later)
        except (ReadOnlyError, FatalIOError) as e:
            log.critical("files stay unsealed", extra={"files": len(batch), "error": str(e)})
        except TransientError as e:
            log.info("files are sealed when the remote answers", extra={"files": len(batch), "error": str(e)})
            self._again(batch)
        except (Aof2Error, OSError) as e:
            log.warning("files are sealed later", extra={"files": len(batch), "error": str(e)})
            self._again(batch)
        finally:
            for file in batch:
                over = self._busy.pop(file.ino, None)
                if over is not None:
                    over.set()

    def _again(self, files: Sequence[OpenFile]) -> None:
        for file in files:
            if file.dirty and not file.handles and self._files.file(file.ino) is file:
                self._due[file.ino] = trio.current_time() + RETRY_S
                self._wake.set()

    async def _fill_all(self, batch: list[OpenFile]) -> None:
        """A file that was only partly here is hashed whole."""
        for file in batch:
            if not file.whole:
                await self._files.parts.settle(file)

    # -- on a worker thread ------------------------------------------------------------------------------------

    def _hash_all(self, batch: Sequence[OpenFile], attempts: dict[int, int]) -> tuple[list[Hashed], list[OpenFile]]:
        """Hashes and syncs; what could not be sealed now comes back second."""
        files = self._files.volume.env.files
        hashed: list[Hashed] = []
        later: list[OpenFile] = []
        fds: list[int] = []
        try:
            for file in batch:
                try:
                    fd = files.open_ro(file.path)
                except FileNotFoundError:
                    continue  # unlinked meanwhile
                fds.append(fd)
                one = self._hash(file, fd, attempts[file.ino])
                if one is None:
                    later.append(file)
                else:
                    hashed.append(one)
                    files.start_writeback(fd, 0, one.digest.size)
            self._files.volume.env.failpoint("seal.hashed")
            for fd in fds:
                files.fsync(fd)
            for folder in {file.path.parent for file in batch}:
                files.fsync_dir(folder)
            self._files.volume.env.failpoint("seal.synced")
        finally:
            for fd in fds:
                files.close(fd)
        return hashed, later

    def _hash(self, file: OpenFile, fd: int, attempt: int) -> Hashed | None:
        if not _nobody_writes(fd):
            return None
        engine = self._files.volume.settings.engine
        before = os.fstat(fd)
        parts: dict[int, int] = {}
        try:
            if file.whole:
                digest = digest_file(
                    fd,
                    before.st_size,
                    chunk_bytes=engine.chunk_bytes,
                    block_bytes=engine.block_bytes,
                    path=str(file.path),
                )
            else:
                digest, parts = self._files.parts.digest(file, fd, before.st_size)
        except CorruptError:
            return None  # cut, or written to, while it was read
        after = os.fstat(fd)
        if Stamp.of(before) != Stamp.of(after) or file.seal_attempt != attempt:
            return None
        times = marks.Times(after.st_mtime_ns, after.st_ctime_ns, before.st_atime_ns)  # hashing is no access
        identity = Identity(after.st_ino, after.st_size, after.st_mtime_ns)
        return Hashed(file, attempt, digest, identity, times, Stamp.of(after), parts)

    # -- recording ---------------------------------------------------------------------------------------------

    async def _record_all(self, hashed: Sequence[Hashed]) -> None:
        """One commit a tenant for all that nobody opened meanwhile. Whoever opens one now waits for that commit."""
        files = self._files
        async with contextlib.AsyncExitStack() as held:
            by_stream: dict[int, list[Hashed]] = {}
            for one in hashed:
                file = one.file
                if files.is_held(file.ino):
                    self._again([file])  # somebody opens it: nobody else waits for that here
                    continue
                await held.enter_async_context(files.holding(file.ino))
                if file.handles or file.seal_attempt != one.attempt or files.file(file.ino) is not file:
                    self._again([file])  # opened again: then the next close brings it back
                elif not await self._was_unchanged(one):
                    by_stream.setdefault(file.key[0], []).append(one)
            for stream_id, group in by_stream.items():
                await self._record(stream_id, group)

    async def _record(self, stream_id: int, group: Sequence[Hashed]) -> None:
        seals = [
            marks.Seal(one.file.ino, one.file.key[2], one.digest, one.identity, one.times, one.parts) for one in group
        ]
        work = partial(marks.seal_all, seals=seals, block_bytes=self._files.block_bytes)
        rows = await result_of(self._files.volume.writer.submit(stream_id, work))
        self._files.volume.env.failpoint("seal.recorded")
        for one, row in zip(group, rows, strict=True):
            if row is not None:
                self._sealed(one, row)
                self._files.volume.jobs.sealed(stream_id, one.digest.size)

    def _sealed(self, one: Hashed, row: ObjectRow) -> None:
        files, file = self._files, one.file
        file.state = row.state
        self.sealed_files += 1
        if file.told_stamp not in (None, one.stamp):
            files.kernel.invalidate_attr(file.ino)  # stores through a mapping told nobody
        files.sealed(file, row, self._disk_bytes(one))

    async def _was_unchanged(self, one: Hashed) -> bool:
        """Whether the file is what was published before it was opened to write; if so it is that again."""
        file, volume = one.file, self._files.volume
        if file.clean_stamp is None or one.parts:
            return False
        with volume.catalog.view() as view:
            dirty = view.get(file.key[0], t.DIRTY, file.ino)
            base = dirty.base_generation if dirty is not None else 0
            old = view.get(file.key[0], t.OBJECTS, (file.ino, base)) if base else None
        if old is None or old.state != ObjectState.PUBLISHED or old.sha256 != one.digest.sha256:
            return False
        path = volume.hot.path(file.tenant, file.ino, base)
        volume.env.files.rename(file.path, path)  # a crash from here on: recovery names it as the catalog has it
        work = partial(
            marks.unwritten, ino=file.ino, backing=one.identity, times=one.times, block_bytes=self._files.block_bytes
        )
        try:
            row = await result_of(volume.writer.submit(file.key[0], work))
        except BaseException:
            volume.env.files.rename(path, file.path)
            raise
        if row is None:
            volume.env.files.rename(path, file.path)
            return False
        volume.handles.forget((file.key[0], file.ino, base))
        self._sealed(one, row)
        return True

    def _disk_bytes(self, one: Hashed) -> int:
        """What the catalog counts of it: what is here."""
        size = objects.on_disk(one.digest.size)
        for index, mask in one.parts.items():
            length = one.digest.chunks[index].length
            size += objects.disk_bytes(mask, length, self._files.block_bytes) - objects.on_disk(length)
        return size


def _nobody_writes(fd: int) -> bool:
    """Whether no descriptor or mapping can write to the file: then a read lease on it is granted."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if e.errno in (errno.EINVAL, errno.ENOLCK):
            return True  # a filesystem without leases: the stamps before and after must do
        raise
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
