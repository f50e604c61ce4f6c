"""Room for writers: hot_bytes holds against them too, within what they can add before the next look.

A ranged writer asks: the channel answers WRITE against a budget that is granted here, out of the quota, a little more
each time. Without room, what is closed is sealed and uploaded, completed chunks of what is open are (`parts.py`), clean
data makes way, and the writer waits; when nothing of that moves for as long as a remote may take to answer, it is told
ENOSPC.

A passthrough writer cannot be asked. A file is opened so only while room is comfortable; its growth is charged every
WATCH_S, clean data makes way ahead of it, and when it outruns all that it is stopped: its backing file is made
immutable, which also stops descriptors that are open (EPERM), until there is room or it is closed.

Invariants
- A dirty file's charge is what its backing file takes, what the channel may still write, and what is being written
  here (`Files.recharge`). Only what the quota gave is granted.
- Whoever waits is woken by what moves; nobody waits longer than PATIENCE deadlines of the remote without any movement.
- No file stays immutable without a writer.

Owner: the trio thread. A crash leaves immutable files: recovery lets go of them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import trio

from aof2.engine import objects
from aof2.engine.aio import open_nursery
from aof2.engine.catalog.rows import JobState, JobType
from aof2.engine.errors import FatalIOError, ReadOnlyError, os_error
from aof2.engine.files.recover import set_immutable
from aof2.engine.files.state import Mode, OpenFile
from aof2.engine.opening import disk_space
from aof2.engine.quota import Level, Reservation
from aof2.engine.settings.model import FilesTenant

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

WATCH_S: Final = 0.25
MANY_FILES: Final = 256
UNSEALED_FILES: Final = 16384
PER_WRITER_BYTES: Final = 1 << 30
GRANT_BYTES: Final = 16 << 20
# Of all budgets together, the share of hot_bytes: idle writers sit on theirs.
BUDGETS_SHARE: Final = 8
# Blocks that the channel is told of ahead of a writer. The budget holds it back, not these.
AHEAD_BLOCKS: Final = 1024
MASK_BLOCKS_MAX: Final = 1 << 24
# Clean data makes way for what a passthrough writer may add in so many looks.
AHEAD_LOOKS: Final = 4
# What moves tells itself; other files' writers, and other users of the disk, do not.
LOOK_AGAIN_S: Final = 0.5
PUSH_EVERY_S: Final = 2.0
# An upload that is under way and has not failed moves only when it is done.
PATIENCE: Final = 10
PROBE_NAME: Final = ".probe"
COUNT_EVERY: Final = 50  # times what a count took
K = TypeVar("K")


class _Moved(NamedTuple):
    """What changes when there is hope."""

    uploaded_bytes: int
    evicted_bytes: int
    sealed_files: int
    part_bytes: int


class _Counted(Generic[K]):
    """Sums over many files, counted now and then: not for each of ten thousand creates, and of a hundred thousand
    files so seldom that counting stays a small share of all work."""

    def __init__(self, count: Callable[[], dict[K, int]]) -> None:
        self._count = count
        self._due_s = float("-inf")
        self._sums: dict[K, int] = {}

    def get(self) -> dict[K, int]:
        now_s = trio.current_time()
        if now_s >= self._due_s:
            began_s = time.perf_counter()
            self._sums = self._count()
            self._due_s = now_s + max(WATCH_S, COUNT_EVERY * (time.perf_counter() - began_s))
        return self._sums


class WriteRoom:
    """Who may write how."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume
        self._limit_bytes = files.volume.settings.cache.hot_bytes
        self._writers: dict[int, OpenFile] = {}
        self._wake = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._can_stop: bool | None = None
        self._turns: dict[str, trio.Lock] = {}  # by tenant: one at a time waits for room, the others for it
        self._moved: _Moved | None = None
        self._moved_s = 0.0
        self._pushed_s = float("-inf")
        self._pushing = trio.Lock()
        self._evicting = False
        self._draining = False
        self._passing: dict[str, tuple[float, bool]] = {}
        files.volume.foreground.hurry = self._hurries
        self._pending: _Counted[int] = _Counted(self._count_pending)

    # -- how a file is opened ----------------------------------------------------------------------------------

    def _hurries(self) -> bool:
        """Whether sealing and uploading are what somebody waits for, or will: each unsealed file takes memory."""
        return self._files.unsealed_count() > UNSEALED_FILES or self._is_tight(0)

    @property
    def is_behind(self) -> bool:
        """Whether files are closed faster than they are sealed, for long: new ones had better come one by one."""
        return self._files.unsealed_count() > 4 * UNSEALED_FILES

    def lets_pass(self, tenant: str) -> bool:
        """Whether a new writer of this tenant may write past us. With many dirty files it is looked at now and then:
        the thresholds are wide, and what passes is watched."""
        if self._files.unsealed_count() < MANY_FILES:
            return self._lets_pass(tenant)
        now_s = trio.current_time()
        looked_s, answer = self._passing.get(tenant, (float("-inf"), False))
        if now_s - looked_s >= WATCH_S:
            looked_s, answer = self._passing[tenant] = (now_s, self._lets_pass(tenant))
        return answer

    def _lets_pass(self, tenant: str) -> bool:
        settings = self._volume.settings.tenants.get(tenant)
        mode = settings.write_mode if isinstance(settings, FilesTenant) else "auto"
        if mode != "auto":
            return mode == "passthrough"
        if not self.can_stop:
            return False
        writers = 1 + sum(1 for file in self._writers.values() if file.mode is Mode.PASSTHROUGH)
        usage = self._volume.quota.tenant_usage(tenant)
        clean = max(0, self._volume.quota.usage.used_bytes - self._unevictable())
        return (
            _comfortable(self._limit_bytes, self._limit_bytes - self.unevictable_bytes(), writers)
            and (
                usage.limit_bytes is None
                or _comfortable(
                    usage.limit_bytes, usage.limit_bytes - self._unevictable(tenant) - usage.reserved_bytes, writers
                )
            )
            and self._disk_room() + clean >= writers * min(PER_WRITER_BYTES, self._limit_bytes // 8)
        )

    def unevictable_bytes(self) -> int:
        """What cannot make way: dirty, sealed but not in the remote, reserved."""
        return self._unevictable() + self._volume.quota.usage.reserved_bytes

    def _unevictable(self, tenant: str | None = None) -> int:
        names = self._volume.tenant_names()
        return self._files.dirty_bytes_of(tenant) + sum(
            n for stream, n in self._pending.get().items() if tenant in (None, names.get(stream))
        )

    def _count_pending(self) -> dict[int, int]:
        """Sealed and not in the remote, by stream."""
        with self._volume.catalog.view() as view:
            return {stream_id: objects.pending_bytes(view, stream_id) for stream_id in self._volume.tenant_names()}

    def _disk_room(self) -> int:
        """What may still land on the disk before it is fuller than it should be; negative when it is."""
        try:
            space = disk_space(self._volume.state_dir)
        except OSError:
            return 0
        return space.free_bytes - self._volume.settings.cache.min_free.bytes_of(space.total_bytes)

    @property
    def can_stop(self) -> bool:
        """Whether a passthrough writer can be stopped here. Without that, room is never comfortable enough."""
        if self._can_stop is None:
            self._can_stop = _probe(self._volume.hot.root)
            if not self._can_stop:
                log.info(
                    "this filesystem has no immutable flag for us: files are written through the channel",
                    extra={"path": str(self._volume.hot.root)},
                )
        return self._can_stop

    # -- who writes --------------------------------------------------------------------------------------------

    def opened(self, file: OpenFile) -> None:
        self._writers[file.ino] = file
        self._wake.set()

    def closed(self, file: OpenFile) -> None:
        if not file.writers:
            self._writers.pop(file.ino, None)
            self.let_go(file)

    def tell_ahead(self, file: OpenFile, end: int) -> None:
        """The channel learns what is here, and that behind it nothing has to be fetched."""
        block_bytes = self._files.block_bytes
        if not file.masked or not file.registered or end // block_bytes + AHEAD_BLOCKS // 2 < file.told:
            return
        stop = min(end // block_bytes + AHEAD_BLOCKS, MASK_BLOCKS_MAX)
        first = file.told
        fetched = 0 if file.whole else min(stop, -(-file.base_len // block_bytes))
        for block in file.absent_blocks(first, fetched, block_bytes):
            if block > first:
                self._files.parts.tell(file, first, block - first)
            first = block + 1
        if stop > first:
            self._files.parts.tell(file, first, stop - first)
        file.told = max(file.told, stop)

    # -- writers that ask --------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def admit(self, file: OpenFile, offset: int, length: int, *, more: int = 0) -> AsyncIterator[None]:
        """Room for a write that is made inside the block, for `more` bytes that come in with it, and a budget for those
        behind it; ENOSPC or EDQUOT when there will be none."""
        size = objects.on_disk(length) + more
        await self._admit(file, offset, size)
        self.tell_ahead(file, offset + length)
        try:
            yield
        finally:
            file.pending_bytes -= size

    async def _admit(self, file: OpenFile, offset: int, size: int) -> None:
        if not size:
            return
        began_s = trio.current_time()
        async with file.room:
            await self._files.recharge(file)
            window = self._next_window(file)
            wanted = size + max(0, window - file.budget)
            reservation = await self._take(file, offset, size, wanted, began_s)
            granted = reservation.remaining_bytes
            reservation.commit(granted)
            file.charged_bytes += granted
            file.pending_bytes += size
            if granted > size:
                file.window_bytes = window
                file.budget += granted - size
                file.granted_bytes += granted - size
                self._files.kernel.grant(file.ino, granted - size)

    def _next_window(self, file: OpenFile) -> int:
        """Twice as much each time: a short file costs little, a long one is seldom held up."""
        if file.mode is not Mode.RANGED or not file.registered:
            return 0
        writers = sum(1 for f in self._writers.values() if f.mode is Mode.RANGED)
        most = min(GRANT_BYTES, self._limit_bytes // (BUDGETS_SHARE * max(1, writers)))
        return min(max(2 * file.window_bytes, self._files.block_bytes), most)

    async def _take(self, file: OpenFile, offset: int, size: int, wanted: int, began_s: float) -> Reservation:
        reservation = await self._take_now(file.tenant, size, wanted)
        if reservation is not None:
            return reservation
        async with self._turns.setdefault(file.tenant, trio.Lock()):
            return await self._wait_for_room(file, offset, size, wanted, began_s)

    async def _take_now(self, tenant: str, size: int, wanted: int) -> Reservation | None:
        """As much as is wanted; else what there is, if that is enough."""
        quota = self._volume.quota
        reservation = await self._volume.evictor.take(tenant, wanted)
        if reservation is None and wanted > size:
            short = quota.shortage(tenant, wanted)
            less = max(size, wanted - max(short.everyones_bytes, short.tenants_bytes))
            reservation = quota.try_reserve(tenant, less) or quota.try_reserve(tenant, size)
        return reservation

    async def _wait_for_room(self, file: OpenFile, offset: int, size: int, wanted: int, began_s: float) -> Reservation:
        volume = self._volume
        while True:
            change = volume.jobs.runner.changes.next()
            reservation = await self._take_now(file.tenant, size, wanted)
            if reservation is not None:
                return reservation
            short = volume.quota.shortage(file.tenant, size)
            if short.never is not None:
                raise _no_room(short.never)
            await self._push()
            tenant = None if short.everyones_bytes else file.tenant
            if await self._files.parts.make_room(wanted, tenant=tenant, writing=(file.ino, offset)):
                continue
            waited_s = trio.current_time() - max(began_s, self._last_moved_s())
            left_s = self._patience_s() - waited_s
            if left_s <= 0:
                log.info("a writer found no room", extra={"path": str(file.path), "waited_s": round(waited_s, 1)})
                raise _no_room(Level.TENANT if short.tenants_bytes and not short.everyones_bytes else Level.VOLUME)
            with trio.move_on_after(min(left_s, LOOK_AGAIN_S)):
                await change.wait()

    async def _push(self) -> None:
        """Whatever can become clean is on its way to the remote, at once."""
        async with self._pushing:
            if trio.current_time() - self._pushed_s < PUSH_EVERY_S:
                return
            await self._files.sealer.seal_now()
            for stream_id in self._volume.tenant_names():
                await self._volume.jobs.checkpoint(stream_id, wait=False)
            self._pushed_s = trio.current_time()

    def _last_moved_s(self) -> float:
        volume = self._volume
        moved = _Moved(
            volume.publisher.uploaded_bytes,
            volume.evictor.evicted_bytes,
            self._files.sealer.sealed_files,
            self._files.parts.taken_bytes,
        )
        if moved != self._moved:
            self._moved, self._moved_s = moved, trio.current_time()
        return self._moved_s

    def _patience_s(self) -> float:
        timeout_s = self._volume.settings.remote.timeout_s
        return timeout_s * PATIENCE if self._is_uploading() else timeout_s

    def _is_uploading(self) -> bool:
        runner = self._volume.jobs.runner
        return any(
            row.type == JobType.CREATE_CHECKPOINT and row.state == JobState.RUNNING and not row.reason
            for stream_id in self._volume.tenant_names()
            for row in runner.jobs(stream_id)
        )

    # -- writers that cannot be asked --------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Looks after writers, while there are any."""
        await trio.to_thread.run_sync(lambda: self.can_stop)
        async with open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                if not self._writers:
                    self._wake = trio.Event()
                    await self._wake.wait()
                await trio.sleep(WATCH_S)
                try:
                    await self._look()
                except (ReadOnlyError, FatalIOError, OSError) as e:  # said where it happened
                    log.info("writers are looked after again soon", extra={"error": str(e)})

    async def _look(self) -> None:
        grown = 0
        growing: list[OpenFile] = []
        for file in list(self._writers.values()):
            more = await self._charge(file)
            if more > 0:
                grown += more
                growing.append(file)
        if self._is_tight(AHEAD_LOOKS * grown):
            self._evict_soon(AHEAD_LOOKS * grown)
        if not self._is_over(growing):
            if not self._is_tight(0):
                for file in list(self._writers.values()):
                    self.let_go(file)
            return
        self._drain_soon()
        await self._volume.evictor.make_room(0, demote=False)
        for file in growing:
            if self._is_over([file]):
                await self._stop(file)

    async def _charge(self, file: OpenFile) -> int:
        """How much more the file takes than the quota knew."""
        before = file.charged_bytes
        if file.mode is Mode.PASSTHROUGH:
            self._files.charge(file)
        elif file.stat().st_blocks * 512 > before:
            await self._files.recharge(file)  # many small writes take more than they were granted
        return file.charged_bytes - before

    def _is_tight(self, more_bytes: int) -> bool:
        """Whether it is time for clean data to make way for so much."""
        usage, cache = self._volume.quota.usage, self._volume.settings.cache
        level = usage.used_bytes + usage.reserved_bytes + more_bytes
        return level > self._limit_bytes * cache.low_water or self._disk_room() < more_bytes

    def _is_over(self, growing: list[OpenFile]) -> bool:
        """Whether a limit is passed: everybody's, the disk's, or one of these files' tenants'."""
        quota = self._volume.quota
        limits = [quota.usage, *(quota.tenant_usage(tenant) for tenant in {f.tenant for f in growing})]
        over = any(u.limit_bytes is not None and u.used_bytes + u.reserved_bytes > u.limit_bytes for u in limits)
        return over or self._disk_room() < 0

    def _evict_soon(self, size_bytes: int) -> None:
        if self._nursery is not None and not self._evicting:
            self._evicting = True
            self._nursery.start_soon(self._evict, min(size_bytes, self._limit_bytes // 2))

    async def _evict(self, size_bytes: int) -> None:
        try:
            usage = self._volume.quota.usage
            fits = usage.used_bytes + usage.reserved_bytes + size_bytes <= self._limit_bytes
            await self._volume.evictor.make_room(size_bytes, demote=fits)
            usage = self._volume.quota.usage
            level = int(self._limit_bytes * self._volume.settings.cache.low_water)
            over = usage.used_bytes + usage.reserved_bytes + size_bytes - level
            if over > 0:
                await self._files.parts.make_room(over)
        except (ReadOnlyError, FatalIOError, OSError) as e:
            log.info("no room was made", extra={"error": str(e)})
        finally:
            self._evicting = False

    def _drain_soon(self) -> None:
        if self._nursery is not None and not self._draining:
            self._draining = True
            self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        try:
            await self._push()
        except (ReadOnlyError, FatalIOError, OSError) as e:
            log.info("nothing was sealed or planned", extra={"error": str(e)})
        finally:
            self._draining = False

    async def _stop(self, file: OpenFile) -> None:
        """This writer goes no further for now."""
        if file.mode is Mode.PASSTHROUGH:
            if not file.frozen and set_immutable(file.path, on=True):
                file.frozen = True
                log.warning("a writer is stopped: the cache is full", extra={"path": str(file.path)})
        elif file.masked:
            # From here on each of its writes asks.
            await self._files.kernel.clear(file.ino, 0, MASK_BLOCKS_MAX)
            file.told = 0

    def let_go(self, file: OpenFile) -> None:
        """Whoever writes to it may go on."""
        if file.frozen:
            file.frozen = False
            set_immutable(file.path, on=False)


def _comfortable(limit_bytes: int, room_bytes: int, writers: int) -> bool:
    return room_bytes >= max(limit_bytes // 2, writers * min(PER_WRITER_BYTES, limit_bytes // 8))


def _no_room(level: Level) -> OSError:
    code = errno.EDQUOT if level is Level.TENANT else errno.ENOSPC
    return os_error(code)


def _probe(folder: Path) -> bool:
    """Whether the immutable flag of a file in this folder stops a descriptor that is open."""
    path = folder / PROBE_NAME
    set_immutable(path, on=False)  # of a probe that a crash cut short
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        if not set_immutable(path, on=True):
            return False
        try:
            os.pwrite(fd, b"x", 0)
        except PermissionError:
            return True
        return False
    finally:
        set_immutable(path, on=False)
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()
