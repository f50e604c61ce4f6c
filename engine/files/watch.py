"""Watching what writers take, and stopping those that outrun everything.

Where there is a brake (`brake.py`), passthrough writers are the channel's to watch, and this settles what they took.
Without one a passthrough writer cannot be asked and cannot be held: its growth is charged every WATCH_S, clean data
makes way ahead of it, and when it outruns all that it is stopped: its backing file is made immutable, which also stops
descriptors that are open (EPERM), until there is room or it is closed. Ranged writers are stopped by taking back what
the channel may answer for.

Invariants
- No file stays immutable without a writer.
- A look costs the same whatever the number of writers (`rounds.py`).
- While more is used than the limits allow, clean data makes way, with writers or without.

Owner: the trio thread. A crash leaves immutable files: recovery lets go of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.aio import Tasks
from aof2.engine.errors import FatalIOError, ReadOnlyError
from aof2.engine.files.brake import Brake
from aof2.engine.files.recover import set_immutable
from aof2.engine.files.rounds import Rounds
from aof2.engine.files.seek import RoomSeeker
from aof2.engine.files.state import Mode, OpenFile

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

WATCH_S: Final = 0.25
IDLE_WATCH_S: Final = 2.0
# Clean data makes way for what a passthrough writer may add in so many looks.
AHEAD_LOOKS: Final = 4
MASK_BLOCKS_MAX: Final = 1 << 24
PROBE_NAME: Final = ".probe"


class Watch:
    """Looks after writers."""

    def __init__(self, files: Files, seeker: RoomSeeker, brake: Brake, disk_room: Callable[[], int]) -> None:
        self._files = files
        self._volume = files.volume
        self._seeker = seeker
        self._brake = brake
        self._disk_room = disk_room
        self._limit_bytes = files.volume.settings.cache.hot_bytes
        self._writers = Rounds()  # those that are looked at; with a brake, the ranged ones
        self._passing: dict[int, str] = {}  # inode → tenant, of all that are passed through
        self._passing_of: Counter[str] = Counter()  # by tenant, how many
        self.stopped: dict[int, OpenFile] = {}  # by inode, immutable until there is room
        self._wake = trio.Event()
        self._tasks = Tasks()
        self._can_stop: bool | None = None
        self._evicting = False
        self._draining = False

    @property
    def can_stop(self) -> bool:
        """Whether a passthrough writer can be stopped here. Without that, room is never comfortable enough."""
        if self._brake.on:
            return True
        if self._can_stop is None:
            self._can_stop = probe_immutable(self._volume.hot.root)
            if not self._can_stop:
                log.info(
                    "this filesystem has no immutable flag for us: files are written through the channel",
                    extra={"path": str(self._volume.hot.root)},
                )
        return self._can_stop

    @property
    def passing(self) -> int:
        """How many files are open for passthrough writing."""
        return len(self._passing)

    def ranged(self) -> int:
        return self._writers.count(Mode.RANGED)

    def opened(self, file: OpenFile) -> None:
        if file.channel.mode is Mode.PASSTHROUGH and file.ino not in self._passing:
            self._passing[file.ino] = file.tenant
            self._passing_of[file.tenant] += 1
        if file.channel.mode is not Mode.PASSTHROUGH or not self._brake.on:
            self._writers.add(file)
        self._wake.set()

    def closed(self, file: OpenFile) -> None:
        self._writers.remove(file)
        tenant = self._passing.pop(file.ino, None)
        if tenant is not None:
            self._passing_of -= Counter({tenant: 1})
        self.let_go(file)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Looks after writers, while there are any, and after what they leave."""
        await trio.to_thread.run_sync(lambda: self.can_stop)
        async with self._tasks.running():
            task_status.started()
            while True:
                if not self._writers and not self._passing and not self._brake.is_busy and not self._is_over([]):
                    self._wake = trio.Event()
                    await self._wake.wait()
                await trio.sleep(WATCH_S if self._writers or self._passing or self._brake.is_busy else IDLE_WATCH_S)
                try:
                    await self._look()
                except (ReadOnlyError, FatalIOError, OSError) as e:  # said where it happened
                    log.info("writers are looked after again soon", extra={"error": str(e)})

    async def _look(self) -> None:
        grown = 0
        growing: list[OpenFile] = []
        for file in self._writers.next():
            more = await self._charge(file)
            self._writers.looked_at(file, grew=more > 0)
            if more > 0:
                grown += more
                growing.append(file)
        if self._brake.on:
            await self._brake.look(set(self._passing_of))
        if self.is_tight(AHEAD_LOOKS * grown):
            self._evict_soon(AHEAD_LOOKS * grown)
        if not self._is_over(growing):
            if not self.is_tight(0):
                for file in list(self.stopped.values()):
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
        if file.channel.mode is Mode.PASSTHROUGH:
            self._files.charges.charge(file)
        elif file.stat().st_blocks * 512 > before:
            await self._files.charges.recharge(file)  # many small writes take more than they were granted
        return file.charged_bytes - before

    def is_tight(self, more_bytes: int) -> bool:
        """Whether it is time for clean data to make way for so much."""
        usage, cache = self._volume.quota.usage, self._volume.settings.cache
        level = usage.used_bytes + usage.reserved_bytes + more_bytes
        return level > self._limit_bytes * cache.low_water or self._disk_room() < more_bytes

    def _is_over(self, growing: list[OpenFile]) -> bool:
        """Whether a limit is passed: the volume's, the disk's, or one of these files' tenants'."""
        quota = self._volume.quota
        limits = [quota.usage, *(quota.tenant_usage(tenant) for tenant in {f.tenant for f in growing})]
        over = any(u.limit_bytes is not None and u.used_bytes + u.reserved_bytes > u.limit_bytes for u in limits)
        return over or self._disk_room() < 0

    def _evict_soon(self, size_bytes: int) -> None:
        if not self._evicting:
            self._evicting = self._tasks.begin(self._evict, min(size_bytes, self._limit_bytes // 2))

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
        if not self._draining:
            self._draining = self._tasks.begin(self._drain)

    async def _drain(self) -> None:
        try:
            await self._seeker.push()
        except (ReadOnlyError, FatalIOError, OSError) as e:
            log.info("nothing was sealed or planned", extra={"error": str(e)})
        finally:
            self._draining = False

    async def _stop(self, file: OpenFile) -> None:
        """This writer goes no further for now."""
        if file.channel.mode is Mode.PASSTHROUGH:
            if file.ino not in self.stopped and set_immutable(file.path, on=True):
                self.stopped[file.ino] = file
                log.warning("a writer is stopped: the cache is full", extra={"path": str(file.path)})
        elif file.channel.masked:
            # From here on each of its writes asks.
            await self._files.kernel.clear(file.ino, 0, MASK_BLOCKS_MAX)
            file.channel.told = 0

    def let_go(self, file: OpenFile) -> None:
        """Its writers may go on."""
        if self.stopped.pop(file.ino, None) is not None:
            set_immutable(file.path, on=False)


def probe_immutable(folder: Path) -> bool:
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
