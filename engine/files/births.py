"""Files that the channel creates by itself: the daemon's side (`native/channel/births.h` says how it works).

Directories in which many files are made become nests: the channel is told their names, and from then on answers for
names that are not among them. New directories are nests from the start. What it created is in the tenant's intent log
(`engine/intents`); once that is folded, the file table takes the files over here.

Owner: the trio thread. A crash leaves intent logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine import namespace
from aof2.engine.aio import Tasks, result_of
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.errors import Aof2Error
from aof2.engine.fds import opened
from aof2.engine.intents import fold
from aof2.engine.intents.format import DROPPED, Intent, IntentKind
from aof2.engine.intents.log import IntentLog
from aof2.engine.intents.mounted import Intents
from aof2.engine.kinds.kernel import Kernel, KernelGoneError, NestAction

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

INOS_GRANTED: Final = 1 << 16
NEST_AFTER: Final = 4  # creates in one directory that came here
NEST_AGAIN: Final = 256
NAMES_MAX: Final = 50_000
NAMES_PAGE: Final = 1024
MESSAGE_BYTES: Final = 60_000
INODES_MIN: Final = 256  # with fewer left on the disk, files are made one by one
S_ISGID: Final = 0o2000


class _Granted:
    """The inode numbers that the channel may give to what is new in a tenant."""

    def __init__(self) -> None:
        self.count = 0
        self.end = 0
        self.bears = False  # also to files


class Births:
    """What the channel may create, and what becomes of it."""

    def __init__(self, files: Files, kernel: Kernel, intents: Intents) -> None:
        self._files = files
        self._channel = kernel
        self._intents = intents
        self._granted: dict[int, _Granted] = {}
        self._bears = False
        self._made: Counter[int] = Counter()
        self.tasks = Tasks()
        self._releasing = 0
        self._released = trio.Event()
        self._stopped = False
        self._ended = False

    # -- starting ----------------------------------------------------------------------------------------------

    async def start(self, *, bears: bool = True) -> None:
        """Tells the channel of the intent logs, and where backing files are: it may change names by itself, and, with
        `bears`, create files."""
        self._bears = bears
        self._channel.birth_page(self._intents.page_fd)
        for one in self._intents.logs:
            self._offer(one)
            self._granted[one.stream_id] = _Granted()
        for stream_id in self._granted:
            await self._grant(stream_id)

    def _offer(self, one: IntentLog) -> None:
        volume = self._files.volume
        hot = volume.hot.root / volume.tenant_names()[one.stream_id]
        volume.env.make_dirs(hot)
        with opened(hot, os.O_RDONLY | os.O_DIRECTORY) as hot_fd:
            self._channel.birth_dir(one.stream_id, one.slot, hot_fd)
        self._channel.birth_log(one.stream_id, one.fd)

    async def _grant(self, stream_id: int) -> None:
        volume, granted = self._files.volume, self._granted[stream_id]
        inodes, granted.bears = volume.disk.inodes(), self._may_bear(stream_id)
        # Never more files than the disk has inodes: the channel does not ask before it makes one.
        room = inodes.room // (2 * len(self._granted)) if inodes is not None and granted.bears else INOS_GRANTED
        granted.count = min(INOS_GRANTED, room)
        work = partial(fold.reserve_inos, count=granted.count)
        first = await result_of(volume.writer.submit(stream_id, work))
        volume.unborn_from.setdefault(stream_id, first)
        granted.end = first + granted.count
        if not self._stopped:  # meanwhile
            self._channel.birth_inos(stream_id, first, granted.count, bears=granted.bears)

    async def _grant_again(self, stream_id: int) -> None:
        try:
            await self._grant(stream_id)
        except (Aof2Error, OSError, KernelGoneError):  # a full disk, a log that takes no more, the end of the mount
            self.pause()

    # -- nests -------------------------------------------------------------------------------------------------

    def created(self, parent: int) -> None:
        """A create came here. Where many do, the channel takes over."""
        granted = self._granted.get(stream_of(parent))
        if granted is None or self._intents.has_failed:
            return
        if self._stopped and self._may_change():
            self._stopped = False
            for stream_id in self._granted:
                self.tasks.begin(self._grant_again, stream_id)
        elif not self._stopped and not granted.bears and self._may_bear(stream_of(parent)):
            granted.bears = True  # asked for once
            self.tasks.begin(self._grant_again, stream_of(parent))
        if not self._bears:
            return
        self._made[parent] += 1
        made = self._made[parent]
        if made == NEST_AFTER or made % NEST_AGAIN == 0:
            self.tasks.begin(self._open_nest, parent)
        if len(self._made) > NAMES_PAGE:
            self._made.clear()

    async def _open_nest(self, ino: int) -> None:
        volume = self._files.volume
        if not self._may_bear(stream_of(ino)):
            return
        with volume.catalog.view() as view:
            row = namespace.inode(view, stream_of(ino), ino)
        if row is None:
            return
        gid = row.gid if row.mode & S_ISGID else None
        try:
            if not await self._channel.nest(ino, NestAction.OPEN, gid):
                return
            await self._intents.fold()  # what was born there before: a nest has every name of its directory
            if not await trio.to_thread.run_sync(self._send_names, ino):
                await self._channel.nest(ino, NestAction.END)
                return
            await self._channel.nest(ino, NestAction.SERVE)
        except (Aof2Error, OSError, KernelGoneError):
            return  # the mount is going, or the rows do not have all names: it is opened but serves nothing

    def _send_names(self, ino: int) -> bool:
        """All names of the directory to the channel; False when they are too many."""
        packed, sent, after = bytearray(), 0, None
        while True:
            with self._files.volume.catalog.view() as view:
                page = namespace.list_dir(view, stream_of(ino), ino, after, NAMES_PAGE)
            for name, _ in page:
                if len(packed) + len(name) + 1 > MESSAGE_BYTES:
                    trio.from_thread.run_sync(self._channel.names, ino, bytes(packed))
                    packed.clear()
                packed.append(len(name))
                packed += name
            sent += len(page)
            if sent > NAMES_MAX:
                return False
            if len(page) < NAMES_PAGE:
                break
            after = page[-1][0]
        trio.from_thread.run_sync(self._channel.names, ino, bytes(packed))
        return True

    # -- stopping ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """The channel changes no names by itself until a create that came here went well again."""
        self._stopped = True
        with contextlib.suppress(KernelGoneError):
            for stream_id in self._granted:
                self._channel.birth_inos(stream_id, namespace.root_ino(stream_id), 0)

    def stop_for_good(self) -> None:
        """The volume takes nothing more: neither does the channel."""
        self._ended = True
        self.pause()

    def _may_change(self) -> bool:
        """Whether the channel may change names: the disk has room for them."""
        return not self._ended and self._files.volume.disk.has_room_for_names() and self._intents.has_room()

    def _may_bear(self, stream_id: int) -> bool:
        """Whether it may create files: with little room they come one by one, and what was made ahead is given back."""
        if not self._bears or self._files.room.is_behind or not self._may_change():
            return False
        inodes = self._files.volume.disk.inodes()
        if inodes is not None and inodes.room < INODES_MIN:
            return False
        return self._files.room.lets_pass(self._files.volume.tenant_names()[stream_id])

    # -- taking over -------------------------------------------------------------------------------------------

    def adopt(self, folded: list[tuple[Intent, InodeRow | None]]) -> None:
        """Births and closes, in their order: the file table knows them from here on."""
        closes = {intent.fh: intent for intent, _ in folded if intent.kind is IntentKind.CLOSED}
        born = [(intent, row) for intent, row in folded if intent.kind is IntentKind.BORN]
        closed: list[InodeRow] = []
        if born:
            self._files.room.brake.born(max(intent.ino for intent, _ in born))
        for intent, row in born:
            close = closes.pop(intent.fh, None)
            if row is None:
                continue  # said in the log; its backing file is an orphan
            if close is None:
                self._files.born(row, intent.fh, intent.flags)
                continue
            closed.append(row)
            if not close.flags & DROPPED:
                self._channel.drop(intent.ino)
        if closed:
            self._files.born_closed(closed)
        for close in closes.values():
            self._releasing += self.tasks.begin(self._release, close)
        new = [intent for intent, _ in folded if intent.kind in fold.NEW]
        if self._granted and not self._stopped and not self._may_change():
            self.pause()  # names that only move take room, too: who asks the daemon is told that there is none
        elif new and self._granted:
            self._grant_more(new[-1])

    async def _release(self, close: Intent) -> None:
        try:
            await self._files.born_released(close.fh, dropped=bool(close.flags & DROPPED))
        except (Aof2Error, OSError, KernelGoneError) as e:
            log.warning("a close is left to the next start", extra={"ino": close.ino, "error": str(e)})
        finally:
            self._releasing -= 1
            if not self._releasing:
                self._released.set()
                self._released = trio.Event()

    async def until_released(self) -> None:
        """Every file whose close was adopted is closed."""
        while self._releasing:
            await self._released.wait()

    def _grant_more(self, last: Intent) -> None:
        stream_id = stream_of(last.ino)
        granted = self._granted[stream_id]
        if granted.bears and not self._may_bear(stream_id):
            granted.bears = False
            with contextlib.suppress(KernelGoneError):
                self._channel.birth_inos(stream_id, namespace.root_ino(stream_id), 0, bears=False)
        if last.ino + granted.count // 4 > granted.end:
            granted.end += granted.count  # asked for once
            self.tasks.begin(self._grant_again, stream_id)
