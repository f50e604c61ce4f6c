"""Sealing: a while after its last writer closed it, a dirty file is hashed, synced and recorded, and goes to the remote
from there. Where a caller waits for that, the commit of the seal begins the job that takes it there.

Processes may go on reading it, unless one of them could have mapped it to write: such a file waits for its last close.

Files that were closed together are sealed together: hashed one after the other, written back all at once, synced, and
recorded in one group commit; ten thousand small files do not mean ten thousand journal commits. A large file is sealed
by itself, in a lane of its own: the small ones do not wait for it, and its chunks are uploaded as they are hashed
(`ahead.py`).

Invariants
- A seal speaks of bytes that no writer changes: none has the file open; and the kernel grants a read lease on it, which
  it refuses while a writable mapping or another descriptor lives, or no descriptor that can be mapped to write was ever
  open on it (`OpenFile.sealable`). Refused means trying again later, not sealing.
- A write-open at any moment makes the seal under way void (`OpenFile.seal_attempt`).
- Bytes and name are durable before the seal is recorded.
- Hashing ends within a few MiB once its file is removed, opened to be written to, or the sealer is told to stop.

Owner: the trio thread; hashing and syncing on worker threads. A crash leaves dirty files; recovery brings them here.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2.engine import objects
from aof2.engine.aio import Tasks, beside, open_nursery, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error, CorruptError, FatalIOError, ReadOnlyError, TransientError
from aof2.engine.files import marks
from aof2.engine.files.ahead import Ahead
from aof2.engine.files.state import OpenFile, Stamp
from aof2.engine.jobs.checkpoint import Begun
from aof2.engine.local.hot import Identity, clear_range
from aof2.engine.locks import Rank, waits_for
from aof2.engine.tiering.hashing import (
    PIECE_BYTES,
    HashingCancelledError,
    ObjectDigest,
    small_digest,
)
from aof2.native import small
from aof2.native.small import SmallStatus

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

# What is closed is often opened again at once: editors, databases, builds.
QUIET_S: Final = 0.5
RETRY_S: Final = 2.0
BATCH_FILES: Final = 512
BATCH_BYTES: Final = 256 << 20
LARGE_BYTES: Final = 64 << 20  # on the disk: holes cost nothing
PARALLEL: Final = 2
LARGE_PARALLEL: Final = 1
SMALL_BYTES: Final = 1 << 20  # what is hashed many files a call
SMALL_TOGETHER_BYTES: Final = 8 << 20  # … before it is asked whether to go on
LOOSE_BYTES: Final = 64 << 10  # what a file may take for its extents beside its bytes
LET_PASS_S: Final = 2.0  # what closed files wait for requests to be answered first
CRASH_POINTS: Final = ("seal.hashed", "seal.synced", "seal.recorded")


class Hashed(NamedTuple):
    file: OpenFile
    attempt: int
    seal: marks.Seal
    stamp: Stamp
    loose: tuple[tuple[int, int], ...] = ()  # (offset, length) where space is reserved, and nothing was written


class _Batch(NamedTuple):
    """Files that are sealed together, or one large one. `begin`: a caller waits for their upload."""

    files: list[OpenFile]
    large: bool
    begin: bool
    over: trio.Event


class Sealer:
    """What waits to be sealed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._due: OrderedDict[int, float] = OrderedDict()  # inode → when, by the trio clock; soonest first
        self._later: OrderedDict[int, float] = OrderedDict()  # the same, of those that are tried again
        self._wake = trio.Event()
        self._busy: dict[int, trio.Event] = {}
        self._lanes = {False: trio.CapacityLimiter(PARALLEL), True: trio.CapacityLimiter(LARGE_PARALLEL)}
        self._tasks = Tasks()
        self._stopping = False
        self.sealed_files = 0

    def closed(self, file: OpenFile) -> None:
        """The last writer of this dirty file closed it, or the last reader of one that may be mapped."""
        self.closed_all((file,))

    def closed_all(self, files: Sequence[OpenFile]) -> None:
        due_s = trio.current_time() + QUIET_S
        for file in files:
            ino = file.ino
            self._due.pop(ino, None)
            self._later.pop(ino, None)
            self._due[ino] = due_s
        self._wake.set()

    def wait(self, file: OpenFile) -> None:
        """It is open again, or gone."""
        self._due.pop(file.ino, None)
        self._later.pop(file.ino, None)

    def stop(self) -> None:
        """Nothing more is hashed; what is being hashed is left off within a few MiB."""
        self._stopping = True

    @property
    def waiting(self) -> int:
        return len(self._due) + len(self._later) + len(self._busy)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with self._tasks.running():
            task_status.started()
            while True:
                await self._until_due()
                await self._files.volume.foreground.let_pass(LET_PASS_S)
                # Not all at once: requests go first, and some of them may remove what waits here.
                batches = self._batches(self._ready(PARALLEL * BATCH_FILES))
                for batch in batches:
                    self._tasks.begin(self._seal_batch, batch)
                small = [batch for batch in batches if not batch.large]
                for batch in small:
                    await batch.over.wait()

    async def _until_due(self) -> None:
        while not self._due and not self._later:
            self._wake = trio.Event()
            await self._wake.wait()
        await trio.sleep_until(min(next(iter(q.values())) for q in (self._due, self._later) if q))

    def _ready(self, most: int) -> list[int]:
        """Those that are due, the longest waiting first. Each queue is in order, so only its head is looked at."""
        now_s = trio.current_time()
        found: list[int] = []
        for queue in (self._due, self._later):
            for ino, due_s in queue.items():
                if due_s > now_s or len(found) >= most:
                    break
                if ino not in self._busy:
                    found.append(ino)
        return found

    async def seal_now(self, inos: Collection[int] | None = None, *, begin: bool = False) -> int:
        """Seals at once what is closed and dirty, and waits for what is being sealed; how many files. `begin`: their
        upload begins with that, it does not wait for others to be planned with."""
        waits_for(Rank.FILE_IO)  # of files that are sealed; one that is held is passed over (`_record_all`)
        before = self.sealed_files
        await self._files.kernel.caught_up()
        waiting = [*self._due, *self._later]
        wanted = waiting if inos is None else [ino for ino in waiting if ino in inos]
        busy = {over for ino, over in self._busy.items() if inos is None or ino in inos}
        batches = self._batches(wanted, begin=begin)
        # A caller that goes away leaves what it began to the sealer, while that runs.
        own = [batch for batch in batches if not self._tasks.begin(self._seal_batch, batch)]
        if own:
            async with open_nursery() as nursery:
                for batch in own:
                    nursery.start_soon(self._seal_batch, batch)
        for batch in batches:
            await batch.over.wait()
        for over in busy:
            await over.wait()
        return self.sealed_files - before

    def _batches(self, inos: Sequence[int], *, begin: bool = False) -> list[_Batch]:
        """From here on these files are being sealed."""
        batches: list[_Batch] = []
        small = _Batch([], False, begin, trio.Event())
        size = 0
        for ino in inos:
            file = self._files.known.get(ino)
            self._due.pop(ino, None)
            self._later.pop(ino, None)
            if file is None or not file.sealable or ino in self._busy:
                continue
            # It may wait for the remote, or take long.
            if file.partial or file.clearing or file.charged_bytes >= LARGE_BYTES:
                batch = _Batch([file], file.charged_bytes >= LARGE_BYTES, begin, trio.Event())
                self._busy[ino] = batch.over
                batches.append(batch)
                continue
            self._busy[ino] = small.over
            small.files.append(file)
            size += file.charged_bytes
            if len(small.files) >= BATCH_FILES or size >= BATCH_BYTES:
                batches.append(small)
                small, size = _Batch([], False, begin, trio.Event()), 0
        if small.files:
            batches.append(small)
        return batches

    async def _seal_batch(self, batch: _Batch) -> None:
        files = batch.files
        ahead: Ahead | None = None
        try:
            await self._fill_all(files)
            attempts = {file.ino: file.seal_attempt for file in files}
            if batch.large and not files[0].partial:
                ahead = Ahead(self._files.volume, files[0], self._tasks, lambda: not self._stopping)
            work = partial(self._hash_all, files, attempts, ahead)
            hashed, later = await trio.to_thread.run_sync(work, limiter=self._lanes[batch.large])
            if ahead is not None:
                await ahead.over()
            await self._record_all(hashed, begin=batch.begin)
            self._again(later)
        except (ReadOnlyError, FatalIOError) as e:
            log.critical("files stay unsealed", extra={"files": len(files), "error": str(e)})
        except TransientError as e:
            log.info("files are sealed when the remote answers", extra={"files": len(files), "error": str(e)})
            self._again(files)
        except (Aof2Error, OSError) as e:
            log.warning("files are sealed later", extra={"files": len(files), "error": str(e)})
            self._again(files)
        finally:
            if ahead is not None:
                ahead.ended()
            for file in files:
                self._busy.pop(file.ino, None)
            batch.over.set()

    def _again(self, files: Sequence[OpenFile]) -> None:
        for file in files:
            if file.sealable and not file.unlinked and file.ino not in self._due:
                self._later.pop(file.ino, None)
                self._later[file.ino] = trio.current_time() + RETRY_S
                self._wake.set()

    async def _fill_all(self, batch: list[OpenFile]) -> None:
        """A file that was only partly here is hashed whole; one that loses a chunk this moment, once that is over."""
        for file in batch:
            if file.partial or file.clearing:
                await self._files.parts.complete(file)

    # -- on a worker thread ------------------------------------------------------------------------------------

    def _hash_all(
        self, batch: Sequence[OpenFile], attempts: dict[int, int], ahead: Ahead | None
    ) -> tuple[list[Hashed], list[OpenFile]]:
        """Hashes and syncs; what could not be sealed now comes back second."""
        files = self._files.volume.env.files
        hashed: list[Hashed] = []
        later: list[OpenFile] = []
        fds: list[int] = []
        try:
            together: list[OpenFile] = []
            alone: list[OpenFile] = []
            for file in batch:  # looked at once: one of them may be opened meanwhile
                (together if _is_small(file) else alone).append(file)
            for group in _small_groups(together):
                alone += self._hash_small(group, attempts, hashed, later, fds)
            for file in alone:
                try:
                    fd = files.open_ro(file.path_text)
                except FileNotFoundError:
                    continue  # unlinked meanwhile
                fds.append(fd)
                one = self._hash(file, fd, attempts[file.ino], ahead)
                if one is None:
                    later.append(file)
                else:
                    hashed.append(one)
                    files.start_writeback(fd, 0, one.seal.digest.size)
            self._files.volume.env.failpoint("seal.hashed")
            # While others write, each sync waits for a commit of the filesystem's journal: both for the same one.
            named = beside(partial(self._sync_names, {os.path.dirname(file.path_text) for file in batch}))  # noqa: PTH120
            try:
                files.fsync_all(fds)
            finally:
                named()
            self._files.volume.env.failpoint("seal.synced")
        finally:
            small.close_all(fds)
        return hashed, later

    def _sync_names(self, folders: Collection[str]) -> None:
        for folder in folders:
            self._files.volume.env.files.fsync_dir(Path(folder))

    def _hash_small(
        self,
        group: Sequence[OpenFile],
        attempts: dict[int, int],
        hashed: list[Hashed],
        later: list[OpenFile],
        fds: list[int],
    ) -> list[OpenFile]:
        """Hashes them in one call; those that must be looked at one by one are left."""
        if self._stopping:
            later += group
            return []
        size_max = min(SMALL_BYTES, self._files.block_bytes)
        paths, piece_bytes = [file.path_text for file in group], min(PIECE_BYTES, size_max)
        found = small.hash_small(paths, size_max=size_max, loose_max=LOOSE_BYTES, piece_bytes=piece_bytes)
        fds += [one.fd for one in found if one.fd >= 0]
        left: list[OpenFile] = []
        for file, (size, inode, mtime_ns, ctime_ns, atime_ns, crc64, _, status, sha256, piece_crcs) in zip(
            group, found, strict=True
        ):
            attempt = attempts[file.ino]
            if status == SmallStatus.READ and file.seal_attempt == attempt:
                digest = small_digest(size, sha256, crc64, piece_crcs)
                times, identity = marks.Times(mtime_ns, ctime_ns, atime_ns), Identity(inode, size, mtime_ns)
                seal = marks.Seal(file.ino, file.key[2], digest, identity, times, {}, {})
                hashed.append(Hashed(file, attempt, seal, Stamp(size, mtime_ns, ctime_ns)))
            elif status == SmallStatus.OTHER:
                left.append(file)
            elif status >= 0:
                later.append(file)
            elif status != -errno.ENOENT:  # unlinked meanwhile
                raise OSError(-status, os.strerror(-status), file.path_text)
        return left

    def _hash(self, file: OpenFile, fd: int, attempt: int, ahead: Ahead | None) -> Hashed | None:
        # A reader may be here for this moment alone: of a file that may be mapped only the lease tells.
        if (file.mappable or not file.handles) and not _no_writer(fd):
            return None

        def go_on() -> bool:
            return file.seal_attempt == attempt and not self._stopping

        assembler = self._files.parts.assembler
        before = os.fstat(fd)
        parts: dict[int, int] = {}
        loose: tuple[tuple[int, int], ...] = ()
        try:
            if not file.partial:
                hasher = assembler.hasher(file, fd, before.st_size, go_on, ahead.hashed if ahead is not None else None)
                digest = hasher.digest()
                if before.st_blocks * 512 > hasher.data.disk_bytes + LOOSE_BYTES:
                    loose = tuple(hasher.data.hole_ranges())
            else:
                digest, parts = assembler.digest(file, fd, before.st_size, go_on)
        except (CorruptError, HashingCancelledError):
            return None  # cut, written to, or removed while it was read
        after = os.fstat(fd)
        if Stamp.of(before) != Stamp.of(after) or file.seal_attempt != attempt:
            return None
        times = marks.Times(after.st_mtime_ns, after.st_ctime_ns, before.st_atime_ns)  # hashing is no access
        identity = Identity(after.st_ino, after.st_size, after.st_mtime_ns)
        ids = ahead.ids if ahead is not None else {}
        seal = marks.Seal(file.ino, file.key[2], digest, identity, times, parts, ids)
        return Hashed(file, attempt, seal, Stamp.of(after), loose)

    def _give_back_loose(self, one: Hashed) -> None:
        """Space that was reserved and not written to goes: the catalog counts what is there. The file is held, and no
        process can write to it. On a worker thread."""
        with self._files.volume.env.files.closing(self._files.volume.hot.open(one.file.path)) as fd:
            for offset, length in one.loose:
                clear_range(fd, offset, length)
            os.utime(fd, ns=(one.seal.times.atime_ns, one.seal.times.mtime_ns))
            self._files.volume.env.files.fsync(fd)

    # -- recording ---------------------------------------------------------------------------------------------

    async def _record_all(self, hashed: Sequence[Hashed], *, begin: bool) -> None:
        """One commit a tenant for files not opened meanwhile. A caller that opens one now waits for that commit."""
        files = self._files
        with files.known.holding_all_now([one.file.ino for one in hashed]) as held:
            by_stream: dict[int, list[Hashed]] = {}
            for one in hashed:
                file = one.file
                if file.ino not in held:
                    self._again([file])  # it is being opened: the others of the batch do not wait for that
                    continue
                if not file.sealable or file.seal_attempt != one.attempt:
                    self._again([file])  # opened again: then the next close brings it back
                    continue
                if one.loose and self._files.parts.can_punch:
                    await trio.to_thread.run_sync(self._give_back_loose, one)
                if file.clean_stamp is None or file.handles or not await self._was_unchanged(one):
                    by_stream.setdefault(file.key[0], []).append(one)
            for stream_id, group in by_stream.items():
                await self._record(stream_id, group, begin=begin)

    async def _record(self, stream_id: int, group: Sequence[Hashed], *, begin: bool) -> None:
        seals = [one.seal for one in group]
        volume, block_bytes = self._files.volume, self._files.block_bytes
        # A follower shows what the log publishes, not what a seal foretells: for those who follow, `wait` waits for it.
        lone = volume.replication.is_lone(stream_id) and not volume.followers.live_count
        with volume.jobs.beginning(stream_id, wanted=begin, lone=lone) as begin_job:

            def work(b: Batch) -> tuple[list[ObjectRow | None], Begun | None]:
                rows = marks.seal_all(b, seals, block_bytes=block_bytes)
                return rows, begin_job(b, [row for row in rows if row is not None])

            with trio.CancelScope(shield=True):  # the job is claimed, and started below
                rows, job = await result_of(volume.writer.submit(stream_id, work))
                volume.env.failpoint("seal.recorded")
                sealed = [(one, row) for one, row in zip(group, rows, strict=True) if row is not None]
                for one, row in sealed:
                    await self._sealed(one, row)
        if sealed:
            volume.jobs.begun(stream_id, sum(one.seal.digest.data_bytes for one, _ in sealed), job)

    async def _sealed(self, one: Hashed, row: ObjectRow) -> None:
        files, file = self._files, one.file
        self.sealed_files += 1
        if not file.dirty:
            return  # removed since its commit, and given back with what it was charged
        if one.loose or file.told_stamp not in (None, one.stamp):
            files.kernel.invalidate_attr(file.ino)  # the kernel reports no stores through a mapping
        await files.sealed(file, row, self._disk_bytes(one.seal))

    async def _was_unchanged(self, one: Hashed) -> bool:
        """Whether the file is what was published before it was opened to write; if so it is that again."""
        file, seal, volume = one.file, one.seal, self._files.volume
        if file.clean_stamp is None or seal.parts:
            return False
        with volume.catalog.view() as view:
            dirty = view.get(file.key[0], t.DIRTY, file.ino)
            base = dirty.base_generation if dirty is not None else 0
            old = view.get(file.key[0], t.OBJECTS, (file.ino, base)) if base else None
            same_holes = old is not None and self._has_holes_of(view, file.key[0], old, seal.digest)
        if old is None or old.state != ObjectState.PUBLISHED or old.sha256 != seal.digest.sha256 or not same_holes:
            return False
        path = volume.hot.path(file.tenant, file.ino, base)
        volume.env.files.rename(file.path, path)  # a crash from here on: recovery names it as the catalog has it
        work = partial(marks.unwritten, seal=seal, block_bytes=self._files.block_bytes)
        try:
            row = await result_of(volume.writer.submit(file.key[0], work))
        except BaseException:
            volume.env.files.rename(path, file.path)
            raise
        if row is None:
            volume.env.files.rename(path, file.path)
            return False
        volume.handles.forget((file.key[0], file.ino, base))
        await self._sealed(one, row)
        return True

    def _has_holes_of(self, view: View, stream_id: int, old: ObjectRow, digest: ObjectDigest) -> bool:
        """Whether holes are where they were: a generation counts what its rows say."""
        if len(old.chunks) != len(digest.chunks) or old.hole_bytes != digest.hole_bytes:
            return False
        for chunk_id, c in zip(old.chunks, digest.chunks, strict=True):
            chunk = view.get(stream_id, t.CHUNKS, chunk_id) if chunk_id else None
            if c.is_hole != (not chunk_id) or (chunk is not None and chunk.holes != c.holes):
                return False
        return True

    def _disk_bytes(self, one: marks.Seal) -> int:
        """What the catalog counts of it: what is here."""
        block_bytes = self._files.block_bytes
        size = objects.digest_disk_bytes(one.digest, block_bytes)
        for index, mask in one.parts.items():
            chunk = one.digest.chunks[index]
            absent = objects.full_mask(chunk.length, block_bytes) & ~mask
            size -= objects.chunk_disk_bytes(absent, chunk, block_bytes)
        return size


def _is_small(file: OpenFile) -> bool:
    """Whether it is tried with others: it is all here, takes little, and the kernel grants a lease on it."""
    return not file.partial and not file.handles and file.charged_bytes <= SMALL_BYTES


def _small_groups(batch: Sequence[OpenFile]) -> Iterator[list[OpenFile]]:
    """So many of them together that to be told to stop does not take long."""
    group: list[OpenFile] = []
    size = 0
    for file in batch:
        if size >= SMALL_TOGETHER_BYTES:
            yield group
            group, size = [], 0
        group.append(file)
        size += file.charged_bytes
    if group:
        yield group


def _no_writer(fd: int) -> bool:
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
