"""Room for writers: how a file is opened, and budgets for those that ask.

    seek.py   finds room for who waits                 brake.py  holds passthrough writers at the end of their room
    watch.py  what writers take; stops those without a brake

A file is opened for passthrough writing only while room is comfortable. A ranged writer asks: the channel answers WRITE
against a budget that is granted here, out of the quota, a little more each time; without room it waits (`seek.py`).

Invariants
- A dirty file's charge is what its backing file takes, what the channel may still write, and what is being written
  here (`charges.py`). Only what the quota gave is granted.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

import trio

from aof2.engine import objects
from aof2.engine.aio import open_nursery
from aof2.engine.files.brake import Brake
from aof2.engine.files.ledger import Ledger
from aof2.engine.files.seek import RoomSeeker, Writing
from aof2.engine.files.state import OpenFile
from aof2.engine.files.watch import MASK_BLOCKS_MAX, WATCH_S, Watch
from aof2.engine.quota.accounts import disk_space
from aof2.engine.settings.model import FilesTenant

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

MANY_FILES: Final = 256
UNSEALED_FILES: Final = 16384
PER_WRITER_BYTES: Final = 1 << 30
GRANT_BYTES: Final = 16 << 20
# Of all budgets together, the share of hot_bytes: idle writers sit on theirs.
BUDGETS_SHARE: Final = 8
# Blocks that the channel is told of ahead of a writer. The budget holds it back, not these.
AHEAD_BLOCKS: Final = 1024
COUNT_EVERY: Final = 50  # times what a count took
K = TypeVar("K")


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


class Space(NamedTuple):
    """How much can be held here, and how much of that can be written before writers wait for uploads."""

    total_bytes: int
    free_bytes: int


class WriteRoom:
    """Who may write how."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume
        self._limit_bytes = files.volume.settings.cache.hot_bytes
        self.seeker = RoomSeeker(files)
        self.brake = Brake(files, self.seeker)
        self.watch = Watch(files, self.seeker, self.brake, self.disk_room)
        self.beside: list[Ledger] = []  # of kinds whose unsealed bytes are in no file table
        self._passing: dict[str, tuple[float, bool]] = {}
        self._pending: _Counted[int] = _Counted(self._count_pending)

    # -- how a file is opened ----------------------------------------------------------------------------------

    def _hurries(self) -> bool:
        """Whether sealing and uploading are what a request waits for, or will: each unsealed file takes memory."""
        return len(self._files.known) > UNSEALED_FILES or self.watch.is_tight(0)

    @property
    def is_behind(self) -> bool:
        """Whether files are closed faster than they are sealed, for long: new ones had better come one by one."""
        return len(self._files.known) > 4 * UNSEALED_FILES

    def lets_pass(self, tenant: str) -> bool:
        """Whether a new writer of this tenant may write past us. With many dirty files it is looked at now and then:
        the thresholds are wide, and what passes is watched."""
        if len(self._files.known) < MANY_FILES:
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
        if not self.watch.can_stop:
            return False
        writers = 1 + self.watch.passing
        usage = self._volume.quota.tenant_usage(tenant)
        clean = max(0, self._volume.quota.usage.used_bytes - self._unevictable())
        return (
            _comfortable(self._limit_bytes, self._limit_bytes - self.unevictable_bytes(), writers)
            and (
                usage.limit_bytes is None
                or _comfortable(
                    usage.limit_bytes,
                    usage.limit_bytes
                    - self._unevictable(tenant)
                    - usage.reserved_bytes
                    + self.brake.window_bytes(tenant),
                    writers,
                )
            )
            and self.disk_room() + clean >= writers * min(PER_WRITER_BYTES, self._limit_bytes // 8)
        )

    def unevictable_bytes(self) -> int:
        """What cannot make way: dirty, sealed but not in the remote, reserved (but for passthrough writers)."""
        return self._unevictable() + self._volume.quota.usage.reserved_bytes - self.brake.window_bytes()

    def space(self, tenant: str | None) -> Space:
        """What statfs says, of a tenant's directory or of all: within every limit that a writer meets."""
        usage = self._volume.quota.usage
        clean = max(0, usage.used_bytes - self._unevictable())
        total = self._limit_bytes
        free = min(total - self.unevictable_bytes(), self.disk_room() + clean)
        limit = self._volume.quota.tenant_usage(tenant).limit_bytes if tenant is not None else None
        if tenant is not None and limit is not None:
            reserved = self._volume.quota.tenant_usage(tenant).reserved_bytes - self.brake.window_bytes(tenant)
            total = min(total, limit)
            free = min(free, limit - self._unevictable(tenant) - reserved)
        return Space(total, max(0, min(free, total)))

    def _unevictable(self, tenant: str | None = None) -> int:
        names = self._volume.tenant_names()
        dirty = sum(ledger.bytes_in(tenant) for ledger in (self._files.known.ledger, *self.beside))
        return dirty + sum(n for stream, n in self._pending.get().items() if tenant in (None, names.get(stream)))

    def _count_pending(self) -> dict[int, int]:
        """Sealed and not in the remote, by stream."""
        with self._volume.catalog.view() as view:
            return {stream_id: objects.pending_bytes(view, stream_id) for stream_id in self._volume.tenant_names()}

    def disk_room(self) -> int:
        """What may still land on the disk before it is fuller than it should be; negative when it is."""
        try:
            space = disk_space(self._volume.state_dir)
        except OSError:
            return 0
        return space.free_bytes - self._volume.settings.cache.min_free.bytes_of(space.total_bytes)

    # -- who writes --------------------------------------------------------------------------------------------

    def opened(self, file: OpenFile, flags: int) -> None:
        """A writer's open is about to be answered."""
        self.brake.opened(file, flags)
        self.watch.opened(file)

    def closed(self, file: OpenFile) -> None:
        if not file.writers:
            self.watch.closed(file)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self._volume.foreground.hurried_by(self._hurries):
            async with open_nursery() as nursery:
                await nursery.start(self.brake.tasks.run)
                await nursery.start(self.watch.run)
                task_status.started()

    def tell_ahead(self, file: OpenFile, end: int) -> None:
        """The channel learns what is here, and that behind it nothing has to be fetched."""
        block_bytes, channel = self._files.block_bytes, file.channel
        if not channel.masked or not channel.registered or end // block_bytes + AHEAD_BLOCKS // 2 < channel.told:
            return
        stop = min(end // block_bytes + AHEAD_BLOCKS, MASK_BLOCKS_MAX)
        first = channel.told
        fetched = min(stop, -(-file.base_len // block_bytes))
        for block in file.absent_blocks(first, fetched, block_bytes):
            if block > first:
                self._files.parts.tell(file, first, block - first)
            first = block + 1
        if stop > first:
            self._files.parts.tell(file, first, stop - first)
        channel.told = max(channel.told, stop)

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
        async with file.room:
            await self._files.charges.recharge(file)
            channel, window = file.channel, self._next_window(file)
            wanted = size + max(0, window - channel.budget)
            reservation = await self.seeker.take(Writing(file.tenant, file.ino, offset), size, wanted)
            granted = reservation.remaining_bytes
            reservation.commit(granted)
            file.charged_bytes += granted
            file.pending_bytes += size
            self.brake.expects(file, size)
            if granted > size:
                channel.window_bytes = window
                channel.budget += granted - size
                channel.granted_bytes += granted - size
                self._files.kernel.grant(file.ino, granted - size)

    def _next_window(self, file: OpenFile) -> int:
        """Twice as much each time: a short file costs little, a long one is seldom held up."""
        if not file.channel.ranged:
            return 0
        writers = self.watch.ranged()
        most = min(GRANT_BYTES, self._limit_bytes // (BUDGETS_SHARE * max(1, writers)))
        return min(max(2 * file.channel.window_bytes, self._files.block_bytes), most)


def _comfortable(limit_bytes: int, room_bytes: int, writers: int) -> bool:
    return room_bytes >= max(limit_bytes // 2, writers * min(PER_WRITER_BYTES, limit_bytes // 8))
