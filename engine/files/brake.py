"""The brake: passthrough writers keep within the room of the cache, and are held, not failed, while room can come.

The channel does the holding (`native/channel/brake.h`): it lets a tenant's passthrough writers take what it was given
here, a window of the quota, and holds a writer that wants more. Here the windows are filled: a little more each time,
out of clean data that makes way; for a writer that is held, out of uploads, too (`seek.py`). What a writer has finished
is uploaded and punched under it where no descriptor was ever open that could map the file (`OpenFile.write_only`,
`parts.py`); a write back into such a chunk is told first and waits until its blocks are here again.

Invariants
- What is given is reserved, and stays so until the channel says it was taken: the quota counts each byte once, as room
  that may be taken or as what a file takes.
- A writer fails only where `seek.py` says that no room will come.
- A window without writers goes back to the quota.
- What files took that the channel made and the file table does not know yet (`births.py`) stays reserved until it does.

Owner: the trio thread; one task a tenant fills its window. A crash leaves nothing: with the channel's descriptor the
kernel lets go of every writer that is held.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.aio import Tasks
from aof2.engine.catalog.rows import stream_of
from aof2.engine.errors import Aof2Error, ReadOnlyError
from aof2.engine.files.seek import RoomSeeker, Writing
from aof2.engine.files.state import Mode, OpenFile
from aof2.engine.kinds.kernel import Short, Touched
from aof2.engine.locks import Rank, task_lock
from aof2.engine.quota import Reservation

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

WINDOW_BYTES_MIN: Final = 64 << 20
WINDOW_BYTES_MAX: Final = 1 << 30
WINDOW_SHARE: Final = 4  # of a limit, for one window
FIRST_SHARE: Final = 32
IDLE_LOOKS: Final = 4
SLACK_BYTES: Final = 64 << 10  # what the channel keeps back of a window


class _Window:
    """What a tenant's passthrough writers may still take."""

    def __init__(self, stream_id: int, tenant: str) -> None:
        self.stream_id = stream_id
        self.tenant = tenant
        self.lock = task_lock(Rank.WINDOW)
        self.reserved: Reservation | None = None
        self.short: Short | None = None  # what the channel said last, until it is seen to
        self.asked = trio.Event()
        self.unborn: dict[int, int] = {}  # what files take on the disk that the file table does not know yet
        self.next_bytes = 0  # the next window is larger
        self.idle_looks = 0

    @property
    def left_bytes(self) -> int:
        return max(0, self.reserved.remaining_bytes - self.unborn_bytes) if self.reserved is not None else 0

    @property
    def unborn_bytes(self) -> int:
        return sum(self.unborn.values())


class Brake:
    """Fills windows, and answers for what is held."""

    def __init__(self, files: Files, seeker: RoomSeeker) -> None:
        self._files = files
        self._volume = files.volume
        self._seeker = seeker
        self._windows: dict[int, _Window] = {}
        self._born_to: dict[int, int] = {}  # by stream, the highest inode number of a file that is known
        self.tasks = Tasks()
        self.on = False
        self.denied = 0
        """Writers that were told ENOSPC or EDQUOT."""

    def window_bytes(self, tenant: str | None = None) -> int:
        """Room that is given to passthrough writers (of a tenant) and not taken yet."""
        return sum(w.left_bytes for w in self._windows.values() if tenant in (None, w.tenant))

    def opened(self, file: OpenFile, flags: int) -> None:
        """A writer's open is about to be answered."""
        if self.on and file.channel.mode is Mode.PASSTHROUGH:
            self._files.kernel.watch(file.ino, append=bool(flags & os.O_APPEND))

    def expects(self, file: OpenFile, more_bytes: int) -> None:
        """Room was reserved for what we are about to write to the file ourselves."""
        if self.on and file.channel.passed:
            self._files.kernel.expect(file.ino, more_bytes)

    async def recount(self, file: OpenFile) -> None:
        """The quota counts a file as the channel sees it: with the write that is on its way."""
        window = self._window(file.key[0])
        if window is not None:
            await self._count_taken(window)

    def born(self, ino: int) -> None:
        """The file table knows the files of this stream up to there, and charges what they take."""
        stream_id = stream_of(ino)
        to = self._born_to[stream_id] = max(ino, self._born_to.get(stream_id, 0))
        window = self._windows.get(stream_id)
        if window is None or not window.unborn:
            return
        before = window.unborn_bytes
        window.unborn = {ino: size for ino, size in window.unborn.items() if ino > to}
        if window.reserved is not None:
            window.reserved.resize(max(0, window.reserved.remaining_bytes - before + window.unborn_bytes))

    def _is_unborn(self, ino: int) -> bool:
        stream_id = stream_of(ino)
        first = self._volume.unborn_from.get(stream_id)
        return first is not None and ino >= first and ino > self._born_to.get(stream_id, 0)

    # -- what the channel says -----------------------------------------------------------------------------------

    def short(self, short: Short) -> None:
        """A window comes to its end, or a writer is held for want of it."""
        window = self._window(short.stream_id)
        if window is not None:
            window.short = short
            window.asked.set()

    def _window(self, stream_id: int) -> _Window | None:
        window = self._windows.get(stream_id)
        tenant = self._volume.tenant_names().get(stream_id)
        if window is None and tenant is not None:
            made = _Window(stream_id, tenant)
            if self.tasks.begin(self._tend, made):
                window = self._windows[stream_id] = made
        return window

    def touched(self, touched: Touched) -> None:
        """A writer goes back into what was uploaded."""
        self.tasks.begin(self._bring_back, touched)

    async def _bring_back(self, touched: Touched) -> None:
        code = 0
        try:
            await self._files.make_present(touched.ino, touched.offset, touched.length)
        except OSError as e:
            code = e.errno if e.errno in (errno.ENOSPC, errno.EDQUOT) else errno.EIO
        except Aof2Error:
            code = errno.EIO
        if code:
            self.denied += 1
            log.info("a write could not be taken", extra={"ino": touched.ino, "error": errno.errorcode[code]})
        self._files.kernel.pass_on(touched.number, code)

    # -- filling -------------------------------------------------------------------------------------------------

    async def _tend(self, window: _Window) -> None:
        while True:
            await window.asked.wait()
            window.asked = trio.Event()
            while window.short is not None:
                short, window.short = window.short, None
                try:
                    await self._refill(window, short)
                except OSError as e:
                    self._deny(window, short, e.errno or errno.ENOSPC)
                except Aof2Error as e:
                    log.info("no room was given", extra={"tenant": window.tenant, "error": str(e)})
                    self._deny(window, short, errno.EROFS if isinstance(e, ReadOnlyError) else errno.EIO)

    def _deny(self, window: _Window, short: Short, code: int) -> None:
        if short.waiting:
            self.denied += short.waiting
            # What fanotify can tell a caller is a short list.
            known = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
            self._files.kernel.deny(window.stream_id, code if code in known else errno.EIO)

    async def _refill(self, window: _Window, short: Short) -> None:
        left = await self._count_taken(window)
        least = max(0, short.need_bytes + SLACK_BYTES - max(0, left)) if short.waiting else 0
        wanted = max(least, self._next_bytes(window) - max(0, left))
        got = await self._seeker.take_now(window.tenant, max(least, 1), wanted)
        if got is None:
            self._files.kernel.stop_silent(window.stream_id)
            if not short.waiting:
                return
            got = await self._seeker.take(Writing(window.tenant, short.ino, short.offset), least, wanted)
        async with window.lock:
            more = got.remaining_bytes
            if window.reserved is None:
                window.reserved = got
            else:
                window.reserved.absorb(got)
            # What was taken past the window is counted already: the channel is to forget it.
            self._files.kernel.room(window.stream_id, more + max(0, -left))

    def _next_bytes(self, window: _Window) -> int:
        """Twice as much each time: few bytes are kept from others for a short file, a long one seldom waits."""
        usage = self._volume.quota.tenant_usage(window.tenant)
        limit = min(self._volume.settings.cache.hot_bytes, usage.limit_bytes or 1 << 62)
        most = min(limit // WINDOW_SHARE, WINDOW_BYTES_MAX)
        # The smaller the window, the more often the channel looks.
        least = max(WINDOW_BYTES_MIN, limit // FIRST_SHARE)
        window.next_bytes = min(max(2 * window.next_bytes, least), most)
        return window.next_bytes

    async def _count_taken(self, window: _Window, *, take: bool = False) -> int:
        """The quota learns what was taken of the window; what is left of it, negative where more was taken."""
        async with window.lock:
            grown = await self._files.kernel.grown(window.stream_id, take=take)
            left = 0 if take else grown.left_bytes
            for ino, disk_bytes in grown.files:
                file = self._files.known.get(ino)
                if file is not None and file.channel.mode is Mode.PASSTHROUGH:
                    self._files.charges.charge(file, disk_bytes)
                elif file is None and self._is_unborn(ino):
                    window.unborn[ino] = disk_bytes
            reserved, unborn = window.reserved, window.unborn_bytes
            if reserved is not None and not reserved.resize(max(0, left) + unborn):
                # A write took less than it was expected to, and another request has that room already.
                self._files.kernel.room(window.stream_id, reserved.remaining_bytes - unborn - left)
                left = reserved.remaining_bytes - unborn
            if reserved is not None and not reserved.remaining_bytes:
                reserved.release()
                window.reserved = None
            return left

    # -- now and then --------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return any(window.reserved is not None for window in self._windows.values())

    async def look(self, writers: set[str]) -> None:
        """Settles windows; those of tenants without passthrough writers go back."""
        for window in list(self._windows.values()):
            if window.reserved is None:
                continue
            before = window.left_bytes
            idle = window.idle_looks >= IDLE_LOOKS
            left = await self._count_taken(window, take=idle)
            quiet = window.tenant not in writers and left == before
            window.idle_looks = window.idle_looks + 1 if quiet and not idle else 0
            if idle:
                window.next_bytes = 0
