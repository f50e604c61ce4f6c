"""The kind `files`: ordinary files. Names are rows of the catalog, bytes are in the file table (`table.py`).

A log holds what is acknowledged before the catalog has it (`engine/intents`): files that the channel created
(`births.py`), and unlinks (`unlinks.py`). Every change meets it folded; `is_folded` says whether a request that
only looks could see the difference, `fold` ends it.

Invariants
- A replaced file stays whole until the kernel forgets it: a caller that looked its name up a moment ago finds it.
- Permissions are the kernel's to check.

Owner: the trio thread. A crash leaves DIRTY rows, backing files, intent logs: `recover` is for those.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine import namespace
from aof2.engine.aio import Tasks
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import DeliveryRow, InodeRow, stream_of
from aof2.engine.errors import Aof2Error
from aof2.engine.files import arriving
from aof2.engine.files.births import Births
from aof2.engine.files.cold import COLD_SCAN, check_value
from aof2.engine.files.recover import recover_dirty
from aof2.engine.files.state import Stamp
from aof2.engine.files.table import Files
from aof2.engine.files.unlinks import Unlinks
from aof2.engine.inbox.check import CheckedJob
from aof2.engine.intents.format import Intent, IntentKind
from aof2.engine.intents.mounted import Intents
from aof2.engine.intents.recover import recover_intents
from aof2.engine.kinds.catalogued import CAPABILITY, Catalogued, without_privileges
from aof2.engine.kinds.kernel import Short, Touched
from aof2.engine.kinds.kind import Answers, Asked, Caller, Told, Unsealed, Way
from aof2.engine.kinds.registry import Surroundings

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

SEAL_AT_END_MAX_S: Final = 30.0  # `aof2 umount` has sealed before; what a signal or umount(8) left may take longer
# What fanotify answers where pre-content events cannot be had.
BRAKE_WHY: Final = {
    errno.EPERM: "pre-content events take CAP_SYS_ADMIN",
    errno.EINVAL: "this kernel has no pre-content events (6.14 has)",
    errno.EOPNOTSUPP: "the filesystem of hot_cache has no pre-content events (ext4, xfs and btrfs have)",
    errno.ENOSYS: "this kernel has no fanotify",
}


def make(at: Surroundings) -> FilesKind:
    if at.volume.following is not None:
        from aof2.engine.files.followed import FollowedFiles  # which is one of these

        return FollowedFiles(at)
    return FilesKind(at)


def recover(volume: Volume, tenants: Mapping[int, str]) -> None:
    """What was acknowledged is folded; every dirty file is where it can be opened and sealed."""
    recover_intents(volume, tenants)
    volume.dirty_inos += recover_dirty(volume, tenants)


class FilesKind(Catalogued):
    """All tenants of kind `files` of one mount."""

    def __init__(self, at: Surroundings, files: Files | None = None) -> None:
        super().__init__(at.volume, at.tenants)
        self.kernel = at.kernel
        self._wish = at.wish
        self.files = files or Files(at.volume, at.kernel, at.opens, self.kill_privileges)
        self.intents = Intents(at.volume, self)
        self.births = Births(self.files, at.kernel, self.intents)
        self.unlinks = Unlinks(self.files, self.intents)
        self._replaced: set[int] = set()  # without a name, whole until the kernel forgets them
        self._way = Way()
        # By the kernel, while something was not folded: where the intent log ended then. The catalog thread looks, too.
        self._forgotten: dict[int, int] = {}
        self._tasks = Tasks()
        self.files.removal.stayed = self._keep_replaced

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.files.run)
            await nursery.start(self._tasks.run)
            self._way = await self._find_way()
            self._announce_capabilities()
            self.files.cold.load()
            if not self._wish.read_only and self.volume.settings.manifest.enabled:
                await self._start_intents(nursery)
            for ino in self.volume.dirty_inos:
                nursery.start_soon(self._adopt, ino)
            task_status.started()

    async def _start_intents(self, nursery: trio.Nursery) -> None:
        """The channel may change names by itself, and create files where they can be passed through and look as they
        are."""
        await self.intents.start(s for s in self.volume.writable_tenants() if s in self.tenants)
        await nursery.start(self.births.tasks.run)
        if self._way.passthrough:
            self.files.known.page = self.volume.evictor.page = self.intents.page
        await self.births.start(bears=self._way.passthrough and self._wish.as_recorded)
        await nursery.start(self.intents.run)

    async def _find_way(self) -> Way:
        """Passthrough and brake or not: once for the mount, said once."""
        why = await self._why_no_passthrough() if self._wish.passthrough else "turned off by -o nopassthrough"
        self.files.modes.passthrough = not why
        if why:
            log.warning("passthrough is off; reads and writes go through the channel", extra={"reason": why})
            return Way(passthrough_why=why, brake_why="nothing is passed through")
        with tempfile.TemporaryFile(dir=self.volume.hot.root) as probe:
            code = await self.kernel.brake(probe.fileno(), self.files.block_bytes)
        self.files.room.brake.on = not code
        brake_why = BRAKE_WHY.get(code, os.strerror(code)) if code else ""
        if code:
            log.info("passthrough writers cannot be held; room is kept in other ways", extra={"reason": brake_why})
        return Way(passthrough=True, brake=not code, brake_why=brake_why)

    async def _why_no_passthrough(self) -> str:
        """Why the kernel will not pass files of this cache through; "" when it will."""
        await self.kernel.initialised()
        if not self.kernel.passthrough_offered:
            return "this kernel has no FUSE passthrough (6.9 has), or the mount lacks CAP_SYS_ADMIN"
        root = self.volume.hot.root
        self.volume.env.make_dirs(root)
        with tempfile.TemporaryFile(dir=root) as probe:
            code = await self.kernel.probe(probe.fileno())
        return f"the filesystem of {root} refuses it ({os.strerror(code)})" if code else ""

    def _announce_capabilities(self) -> None:
        """The few inodes with file capabilities: for all others the channel answers by itself."""
        with self.volume.catalog.view() as view:
            for stream_id in self.tenants:
                for (ino, name), _ in view.scan(stream_id, t.XATTRS):
                    if name == CAPABILITY:
                        self.kernel.caps(ino, True)

    async def _adopt(self, ino: int) -> None:
        try:
            await self.files.adopt(ino)
        except (Aof2Error, OSError) as e:
            if isinstance(e, OSError) and e.errno == errno.ESTALE:
                return  # removed since: its last name is gone
            log.warning("a file that was being written is not sealed yet", extra={"ino": ino, "error": str(e)})

    async def end(self) -> None:
        with contextlib.suppress(Aof2Error, OSError):  # said, and left to recovery
            await self.intents.fold()
        self.intents.close()
        for ino in list(self._replaced):
            await self._drop_replaced(ino)
        if left := self.unsealed().files:
            log.info("sealing what is not sealed yet", extra={"files": left})
        with trio.move_on_after(SEAL_AT_END_MAX_S), contextlib.suppress(Aof2Error, OSError):
            await self.seal()
        self.files.sealer.stop()

    def way(self) -> Way:
        return self._way

    def stop_ahead(self) -> None:
        self.births.pause()

    def refuse_writes(self) -> int:
        self.births.stop_for_good()
        return self.files.refuse_writes()

    # -- names: reading ----------------------------------------------------------------------------------------

    def row(self, ino: int) -> InodeRow:
        return self.unlinks.as_told(super().row(ino))

    def find(self, parent: int, name: bytes) -> InodeRow | None:
        if self.unlinks.is_gone(parent, name):
            return None
        row = super().find(parent, name)
        return None if row is None else self.unlinks.as_told(row)

    def named(self, ino: int) -> InodeRow | None:
        return None if self.unlinks.is_nameless(ino) else super().named(ino)

    def answers(self, stream_id: int) -> Answers:
        has_log = any(one.stream_id == stream_id for one in self.intents.logs)
        if not has_log:
            return Answers.READING
        opens = Answers.OPENS if self._way.passthrough else Answers.NOTHING
        return Answers.READING | Answers.INTENTS | Answers.CHANGES | opens

    def told(self, row: InodeRow) -> Told:
        """A dirty file's size and times are its backing file's."""
        file = self.files.known.get(row.ino)
        if file is None or not file.dirty:
            return Told()
        try:
            now = file.stat()
        except FileNotFoundError:
            return Told()
        file.told_stamp = Stamp.of(now)
        return Told(now, changing=file.writers > 0)

    def _is_whole(self, ino: int) -> bool:
        file = self.files.known.get(ino)
        return file is None or file.whole

    def space(self, ino: int) -> tuple[int, int]:
        """What can be written before writers wait for uploads: clean data makes way. A tenant's within its quota."""
        return self.files.room.space(self.tenants.get(stream_of(ino)))

    # -- names: acknowledged, not folded -----------------------------------------------------------------------

    def is_folded(self, ino: int, asked: Asked) -> bool:
        if not self.intents.is_folded(own=False):
            return False
        if asked in (Asked.LOOK_UP, Asked.UNLINK, Asked.HANDLE):  # which mind by themselves what was unlinked
            return True
        return not self.unlinks.is_nameless(ino) if asked is Asked.ATTRIBUTES else self.intents.is_folded()

    async def fold(self) -> None:
        await self.intents.fold()

    def adopt(self, folded: list[tuple[Intent, InodeRow | None]]) -> None:
        try:
            self.births.adopt(folded)
        finally:
            self.unlinks.adopt(folded)
            self._drop_forgotten(folded)
            self._adopt_changes(folded)

    def _drop_forgotten(self, folded: list[tuple[Intent, InodeRow | None]]) -> None:
        """Those of our own unlinks that stayed, and that the kernel forgot before this."""
        for intent, _ in folded:
            if intent.is_own and intent.ino in self._replaced and self._is_forgotten(intent.ino, intent):
                self._tasks.begin(self._drop_replaced, intent.ino)

    def _adopt_changes(self, folded: list[tuple[Intent, InodeRow | None]]) -> None:
        """What the channel took names from: as `unlink`, `rmdir` and `rename` do."""
        for intent, row in folded:
            if row is None or row.nlink or intent.is_own:
                continue
            if intent.kind in (IntentKind.UNLINKED, IntentKind.RMDIR):
                self._adopt_removed(row, intent)
            elif intent.kind is IntentKind.REPLACED:
                self._adopt_replaced(row, intent)
        if self.intents.is_folded():
            self._forgotten.clear()

    def _adopt_removed(self, row: InodeRow, intent: Intent) -> None:
        self.volume.foreground.removed()
        if not self.files.known.is_open(row.ino) and not self._is_forgotten(row.ino, intent):
            self.lost_its_name(row)
        if stat.S_ISREG(row.mode):
            self.files.removal.removed(row)
        else:
            self.files.known.went(row.ino)
        if row.ino in self._replaced and self._is_forgotten(row.ino, intent):
            self._tasks.begin(self._drop_replaced, row.ino)

    def _adopt_replaced(self, row: InodeRow, intent: Intent) -> None:
        with self.volume.catalog.view() as view:
            stayed = view.get(stream_of(row.ino), t.NAMELESS, row.ino) is not None
        if not stayed:
            self._adopt_removed(row, intent)
            return
        self._keep_replaced(row.ino)
        if self._is_forgotten(row.ino, intent):
            self._tasks.begin(self._drop_replaced, row.ino)

    def _is_forgotten(self, ino: int, intent: Intent) -> bool:
        """Whether the kernel forgot the inode after that was answered."""
        return self._forgotten.get(ino, 0) >= intent.end

    def must_stay(self, intent: Intent) -> bool:
        if intent.kind is not IntentKind.REPLACED:
            return self.files.known.must_stay(intent.ino)
        return not self._is_forgotten(intent.other, intent) or self.files.known.must_stay(intent.other)

    async def adopted(self) -> None:
        await self.births.until_released()

    def no_more(self) -> None:
        self.births.pause()

    # -- names: changing ---------------------------------------------------------------------------------------

    async def make_node(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> InodeRow:
        if stat.S_ISREG(mode):
            return await self.files.create_closed(parent, name, mode=stat.S_IMODE(mode), uid=caller.uid, gid=caller.gid)
        return await self._make(parent, name, caller, partial(namespace.make_node, mode=mode, rdev=rdev))

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: Caller) -> InodeRow:
        return await self._make(parent, name, caller, partial(namespace.mkdir, mode=stat.S_IMODE(mode)))

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> InodeRow:
        return await self._make(parent, name, caller, partial(namespace.symlink, target=target))

    async def _make(self, parent: int, name: bytes, caller: Caller, new: Callable[..., InodeRow]) -> InodeRow:
        self.volume.disk.admit_name()
        work = partial(new, parent=parent, name=name, uid=caller.uid, gid=caller.gid)
        row: InodeRow = await self.change(parent, work)
        return row

    async def link(self, ino: int, parent: int, name: bytes) -> InodeRow:
        self.volume.disk.admit_name()
        row: InodeRow = await self.change(ino, partial(namespace.link, ino=ino, parent=parent, name=name))
        self.files.removal.linked(ino)
        return row

    async def unlink(self, parent: int, name: bytes) -> None:
        row = self.unlinks.take(parent, name)
        if row is not None:
            self.lost_its_name(row)
            return
        work = partial(namespace.unlink, parent=parent, name=name, is_open=self.files.known.must_stay)
        row = await self.change(parent, work)
        if row is not None:
            self.went(row)

    def went(self, row: InodeRow) -> None:
        """It lost a name, in a commit that is over."""
        if row.nlink:
            return
        self.files.known.went(row.ino)
        if not self.files.known.is_open(row.ino):
            self.lost_its_name(row)
        if stat.S_ISREG(row.mode):
            self.files.removal.removed(row)

    async def rmdir(self, parent: int, name: bytes) -> None:
        self.lost_its_name(await self.change(parent, partial(namespace.rmdir, parent=parent, name=name)))

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, *, replace: bool, exchange: bool
    ) -> None:
        self.volume.disk.admit_name()
        work = partial(
            namespace.rename,
            parent=parent,
            name=name,
            new_parent=new_parent,
            new_name=new_name,
            replace=replace,
            exchange=exchange,
            is_open=lambda _: True,  # so that what is replaced stays whole
        )
        replaced = (await self.change(parent, work)).replaced
        if replaced is None or (replaced.nlink and not stat.S_ISDIR(replaced.mode)):
            return
        if stat.S_ISREG(replaced.mode):
            self._keep_replaced(replaced.ino)
        else:
            self.lost_its_name(replaced)
            await self.change(parent, partial(namespace.drop_nameless, ino=replaced.ino))

    def _keep_replaced(self, ino: int) -> None:
        self._replaced.add(ino)
        self.files.removal.nameless(ino)

    async def forget(self, ino: int) -> None:
        await super().forget(ino)
        self.files.kept.forget(ino)
        if not self.intents.is_folded():
            self._forgotten[ino] = self.intents.end(stream_of(ino))
        if ino in self._replaced:
            await self._drop_replaced(ino)

    async def _drop_replaced(self, ino: int) -> None:
        try:
            await self.files.removal.drop_nameless(ino)
        except (Aof2Error, OSError) as e:
            log.warning("a replaced file is dropped at the next start", extra={"ino": ino, "error": str(e)})
        self._replaced.discard(ino)

    # -- attributes --------------------------------------------------------------------------------------------

    async def resize(self, row: InodeRow, size: int) -> None:
        if not stat.S_ISREG(row.mode):
            await super().resize(row, size)
        await self.files.truncate(row.ino, size)

    def _before_change(self, ino: int, changes: Mapping[str, int]) -> None:
        """A dirty file's times are its backing file's."""
        file = self.files.known.get(ino)
        if file is not None and file.dirty and {"atime_ns", "mtime_ns"} & changes.keys():
            now = file.stat()
            times = (changes.get("atime_ns", now.st_atime_ns), changes.get("mtime_ns", now.st_mtime_ns))
            os.utime(file.path, ns=times)

    def _check_xattr(self, name: bytes, value: bytes | None) -> None:
        if name != COLD_SCAN:
            super()._check_xattr(name, value)
        elif value is not None:
            check_value(value)

    def _xattr_is(self, ino: int, name: bytes, value: bytes | None) -> None:
        if name == COLD_SCAN:
            self.files.cold.marked(ino, value)
        if name == CAPABILITY:
            self.kernel.caps(ino, value is not None)

    async def kill_privileges(self, ino: int) -> bool:
        changed = await super().kill_privileges(ino)
        if changed:
            self.kernel.invalidate_attr(ino)
        return changed

    # -- bytes -------------------------------------------------------------------------------------------------

    def opening(self, ino: int) -> AbstractContextManager[object]:
        return self.files.known.asked(ino)

    async def open(self, ino: int, flags: int, caller: Caller) -> int:
        if flags & os.O_TRUNC and caller.uid != 0:
            mode = stat.S_IMODE(self.row(ino).mode)
            if without_privileges(mode) != mode:
                await self.kill_privileges(ino)
        return await self.files.open(ino, flags)

    async def create(self, parent: int, name: bytes, flags: int, mode: int, caller: Caller) -> tuple[InodeRow, int]:
        row, fh = await self.files.create(parent, name, flags, mode=stat.S_IMODE(mode), uid=caller.uid, gid=caller.gid)
        if flags & os.O_DSYNC:
            await self.sync_names(parent)
        self.births.created(parent)
        return row, fh

    async def create_unnamed(self, parent: int, flags: int, mode: int, caller: Caller) -> tuple[InodeRow, int]:
        mode = stat.S_IMODE(mode)
        return await self.files.create_unnamed(parent, flags, mode=mode, uid=caller.uid, gid=caller.gid)

    async def sync_file(self, ino: int) -> None:
        await self.files.durability.fsync(ino)

    async def take_opened(self, fh: int) -> None:
        await self.files.take_opened(fh)

    async def sync_all(self) -> None:
        await self.files.durability.sync_all()

    # -- what verbs ask for ------------------------------------------------------------------------------------

    async def take_in(self, tenant_id: int, job: CheckedJob) -> DeliveryRow:
        return await arriving.take_in(self, tenant_id, job)

    def is_open(self, ino: int) -> bool:
        return self.files.known.is_open(ino)

    def is_unsealed(self, ino: int) -> bool:
        return self.files.known.get(ino) is not None or self.files.known.is_open(ino)

    def is_kept_unsealed(self, ino: int) -> bool:
        """It writes, or may have mapped it to write (`OpenFile.sealable`)."""
        file = self.files.known.get(ino)
        return file is not None and file.dirty and not file.sealable

    def open_inos(self) -> set[int]:
        return {file.ino for file in self.files.known.all() if file.handles}

    def open_count(self) -> int:
        return self.files.open_count

    def writing(self) -> set[int]:
        return {file.ino for file in self.files.known.all() if file.writers}

    def unsealed(self) -> Unsealed:
        return Unsealed(self.files.known.ledger.files, self.files.known.ledger.bytes)

    async def seal(self, inos: Collection[int] | None = None, *, begin: bool = False) -> int:
        return await self.files.sealer.seal_now(inos, begin=begin)

    def holding(self, ino: int) -> AbstractAsyncContextManager[None]:
        return self.files.known.holding(ino)

    async def drop_kernel_pages(self, ino: int) -> None:
        await self.files.drop_kernel_pages(ino)

    # -- what the channel tells --------------------------------------------------------------------------------

    def refused(self, ino: int) -> None:
        self.files.refused(ino)

    def used(self, inos: Sequence[int]) -> None:
        self.files.used(inos)

    def changes_waiting(self) -> None:
        self.intents.wake()

    def room_short(self, short: Short) -> None:
        self.files.room.brake.short(short)

    def touched(self, touched: Touched) -> None:
        self.files.room.brake.touched(touched)
