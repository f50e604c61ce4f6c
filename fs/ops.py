"""The operations of the mount: pyfuse3's calls, answered from the catalog and by `engine.files`.

A thin adapter: what POSIX asks of names is in `engine.namespace`, what becomes of bytes in `engine.files`. Here are
only the translation, the special inodes, and what the kernel leaves to us with FUSE_HANDLE_KILLPRIV_V2: taking suid
and sgid away.

Invariants
- Permissions are the kernel's to check (default_permissions).
- Nothing but FUSEError leaves an operation (`answers.py`).
- An inode number means the same for ever, so lookup counts need no table: only inodes that lost their last name while
  the kernel still knows them are kept (`_ghosts`), until it forgets them.

Owner: the trio thread.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeVar

import pyfuse3
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow, TenantKind
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.files import Files, stream_of
from aof2.engine.files.state import Stamp
from aof2.engine.volume import Volume
from aof2.fs import special as s
from aof2.fs.answers import answered, answered_ahead
from aof2.fs.attrs import absent, attributes
from aof2.fs.births import Births
from aof2.fs.channel_wire import SERVE
from aof2.fs.facts import FACTS, fact
from aof2.fs.listing import DOTS, Listing, Page
from aof2.fs.options import Options
from aof2.fs.unlinks import Unlinks

log = logging.getLogger(__name__)

T = TypeVar("T")
NAME_MAX: Final = 255
# Longer answers must not go through a socket. A message takes 16 KiB in a row and up to 17 single pages, which the
# kernel has; past 80 KiB it wants more in a row. Where it finds none the reply is lost, and the caller waits for ever.
LONG_ANSWER: Final = 64 << 10
LISTING_BYTES: Final = 32 << 10
SERVED_BYTES_MIN: Final = 32 << 10  # of what is on the disk: worth asking the channel to read it there
GHOSTS_MAX: Final = 65536
CAPABILITY: Final = b"security.capability"
FACT_PREFIX: Final = b"user.aof2."
COLD_SCAN: Final = b"user.aof2.cold_scan"
XATTR_PREFIXES: Final = (b"user.", b"trusted.", CAPABILITY)


def fail(code: int) -> pyfuse3.FUSEError:
    return pyfuse3.FUSEError(code)


class Operations(pyfuse3.Operations):
    """What the kernel asks, request by request."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, volume: Volume, files: Files, special: s.Special, options: Options) -> None:
        super().__init__()
        self.volume = volume
        self.files = files
        self.special = special
        self.options = options
        self.births: Births | None = None
        self.unlinks: Unlinks | None = None
        self._ghosts: dict[int, InodeRow] = {}
        self._lingering: set[int] = set()
        self._listings: dict[int, Listing | list[tuple[bytes, int]]] = {}
        self._special_handles: dict[int, int] = {}
        self._next_id = 1 << 62  # of handles that are not files', apart from theirs

    # -- rows --------------------------------------------------------------------------------------------------

    def _row(self, view: View, ino: int) -> InodeRow:
        row = self.special.row(ino) if s.is_special(ino) else view.get(stream_of(ino), t.INODES, ino)
        if row is None:
            row = self._ghosts.get(ino)
        if row is None:
            raise fail(errno.ENOENT)
        return row

    def _attributes(self, row: InodeRow) -> pyfuse3.EntryAttributes:
        file = self.files.file(row.ino)
        if file is None or not file.dirty:
            return attributes(row, self.options)
        try:
            now = file.stat()
            file.told_stamp = Stamp.of(now)
            return attributes(row, self.options, now, changing=file.writers > 0)
        except FileNotFoundError:
            return attributes(row, self.options)

    async def _change(self, ino: int, work: Any) -> Any:
        return await result_of(self.volume.writer.submit(stream_of(ino), work))

    def _tenant_dir(self, ino: int) -> int:
        """The stream of a directory in which names may change; EPERM where they may not."""
        if s.is_special(ino):
            raise fail(errno.EPERM)
        stream_id = stream_of(ino)
        if self.volume.tenant_kind(stream_id) != TenantKind.FILES:
            raise fail(errno.EPERM)
        return stream_id

    @staticmethod
    def _check_name(name: bytes) -> None:
        if len(name) > NAME_MAX:
            raise fail(errno.ENAMETOOLONG)

    # -- looking up --------------------------------------------------------------------------------------------

    @answered_ahead
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        self._check_name(name)
        if self.unlinks is not None and self.unlinks.is_gone(parent_inode, name):
            return absent()
        with self.volume.catalog.view() as view:
            if s.is_special(parent_inode):
                row = self._lookup_special(view, parent_inode, name)
            else:
                stream_id = stream_of(parent_inode)
                entry = namespace.entry(view, stream_id, parent_inode, name)
                row = view.get(stream_id, t.INODES, entry.ino) if entry is not None else None
        if row is not None and self.unlinks is not None:
            row = self.unlinks.as_told(row)
        return absent() if row is None else self._attributes(row)

    def _lookup_special(self, view: View, parent: int, name: bytes) -> InodeRow | None:
        if parent == s.ROOT:
            for tenant_id, tenant in self.volume.tenant_names().items():
                if tenant.encode() == name:
                    ino = namespace.root_ino(tenant_id)
                    return view.get(tenant_id, t.INODES, ino)
        ino = self.special.lookup(parent, name) or 0
        return self.special.row(ino) if ino else None

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, _ in inode_list:
            self._ghosts.pop(ino, None)
            self.files.forgotten(ino)
            if ino in self._lingering:
                await self._drop_lingering(ino)

    async def _drop_lingering(self, ino: int) -> None:
        self._lingering.discard(ino)
        try:
            await self.files.drop_nameless(ino)
        except (Aof2Error, OSError) as e:
            log.warning("a replaced file is dropped at the next start", extra={"ino": ino, "error": str(e)})

    async def drop_all_lingering(self) -> None:
        """The mount is gone: nobody can open what has no name."""
        for ino in list(self._lingering):
            await self._drop_lingering(ino)

    def _bury(self, row: InodeRow | None) -> None:
        """An inode lost its last name; the kernel may still ask about it."""
        if row is None or row.nlink > (1 if stat.S_ISDIR(row.mode) else 0):
            return
        while len(self._ghosts) >= GHOSTS_MAX:
            del self._ghosts[next(iter(self._ghosts))]
        self._ghosts[row.ino] = row

    @answered_ahead
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if self.unlinks is not None and self.unlinks.is_nameless(inode):
            await self.unlinks.catch_up()
        with self.volume.catalog.view() as view:
            row = self._row(view, inode)
        return self._attributes(row if self.unlinks is None else self.unlinks.as_told(row))

    @answered
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        with self.volume.catalog.view() as view:
            return self._row(view, inode).target

    # -- attributes --------------------------------------------------------------------------------------------

    @answered
    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if s.is_special(inode):
            raise fail(errno.EPERM)
        with self.volume.catalog.view() as view:
            row = self._row(view, inode)
        if row.nlink == 0 and inode in self._ghosts:
            raise fail(errno.ENOENT)
        if fields.update_size:
            await self._resize(row, attr.st_size)
        changes = self._changes(row, attr, fields, ctx)
        self._set_backing_times(inode, changes)
        if changes:
            row = await self._change(inode, lambda b: namespace.set_attributes(b, inode, **changes))
        if "mode" in changes or "uid" in changes or "gid" in changes:
            await self._drop_capability(row, changes)
        return await self.getattr(inode, ctx)

    async def _resize(self, row: InodeRow, size: int) -> None:
        if not stat.S_ISREG(row.mode):
            raise fail(errno.EISDIR if stat.S_ISDIR(row.mode) else errno.EINVAL)
        await self.files.truncate(row.ino, size)

    def _changes(
        self, row: InodeRow, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields, ctx: pyfuse3.RequestContext
    ) -> dict[str, int]:
        changes: dict[str, int] = {}
        mode = stat.S_IMODE(row.mode)
        if fields.update_mode:
            mode = stat.S_IMODE(attr.st_mode)
        if fields.update_uid:
            changes["uid"] = attr.st_uid
        if fields.update_gid:
            changes["gid"] = attr.st_gid
        nothing = not any(
            (fields.update_mode, fields.update_uid, fields.update_gid, fields.update_size, fields.update_atime,
             fields.update_mtime)
        )  # fmt: skip
        owner_changes = (fields.update_uid or fields.update_gid) and not fields.update_mode
        if (owner_changes or nothing or (fields.update_size and ctx.uid != 0)) and not stat.S_ISDIR(row.mode):
            mode = without_privileges(mode)
        if mode != stat.S_IMODE(row.mode) or fields.update_mode:
            changes["mode"] = mode
        if fields.update_atime:
            changes["atime_ns"] = attr.st_atime_ns
        if fields.update_mtime:
            changes["mtime_ns"] = attr.st_mtime_ns
        if nothing and not changes:
            changes["mode"] = mode  # the change time moves all the same
        return changes

    def _set_backing_times(self, ino: int, changes: dict[str, int]) -> None:
        """A dirty file's times are its backing file's."""
        file = self.files.file(ino)
        if file is None or not file.dirty or not ({"atime_ns", "mtime_ns"} & changes.keys()):
            return
        now = file.stat()
        os.utime(file.path, ns=(changes.get("atime_ns", now.st_atime_ns), changes.get("mtime_ns", now.st_mtime_ns)))

    async def _drop_capability(self, row: InodeRow, changes: dict[str, int]) -> None:
        """A new owner does not inherit what the file may do."""
        if stat.S_ISDIR(row.mode) or not ({"uid", "gid"} & changes.keys()):
            return
        with self.volume.catalog.view() as view:
            has = namespace.get_xattr(view, stream_of(row.ino), row.ino, CAPABILITY) is not None
        if has:
            await self._change(row.ino, partial(namespace.remove_xattr, ino=row.ino, name=CAPABILITY))
            self.files.kernel.caps(row.ino, False)

    async def kill_privileges(self, ino: int) -> None:
        """Another user wrote to a file with suid, sgid or capabilities."""
        with self.volume.catalog.view() as view:
            row = self._row(view, ino)
            capable = namespace.get_xattr(view, stream_of(ino), ino, CAPABILITY) is not None
        mode = without_privileges(stat.S_IMODE(row.mode))
        if mode != stat.S_IMODE(row.mode):
            await self._change(ino, partial(namespace.set_attributes, ino=ino, mode=mode))
            self.files.kernel.invalidate_attr(ino)
        if capable:
            await self._change(ino, partial(namespace.remove_xattr, ino=ino, name=CAPABILITY))
            self.files.kernel.caps(ino, False)

    # -- names -------------------------------------------------------------------------------------------------

    @answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._check_name(name)
        self._tenant_dir(parent_inode)
        if stat.S_ISREG(mode):
            chunk_bytes = self.volume.settings.engine.chunk_bytes
            work = partial(
                namespace.create, parent=parent_inode, name=name, mode=stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid,
                chunk_bytes=chunk_bytes,
            )  # fmt: skip
            row = await self._change(parent_inode, work)
            self.files.make_backing(row)
        else:
            work = partial(
                namespace.make_node, parent=parent_inode, name=name, mode=mode, rdev=rdev, uid=ctx.uid, gid=ctx.gid
            )
            row = await self._change(parent_inode, work)
        return self._attributes(row)

    @answered
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._check_name(name)
        self._tenant_dir(parent_inode)
        work = partial(
            namespace.mkdir, parent=parent_inode, name=name, mode=stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid
        )
        return self._attributes(await self._change(parent_inode, work))

    @answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._check_name(name)
        self._tenant_dir(parent_inode)
        work = partial(namespace.symlink, parent=parent_inode, name=name, target=target, uid=ctx.uid, gid=ctx.gid)
        return self._attributes(await self._change(parent_inode, work))

    @answered
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self._check_name(new_name)
        if s.is_special(inode) or s.is_special(new_parent_inode):
            raise fail(errno.EXDEV if s.is_special(inode) != s.is_special(new_parent_inode) else errno.EPERM)
        if stream_of(inode) != stream_of(new_parent_inode):
            raise fail(errno.EXDEV)
        self._tenant_dir(new_parent_inode)
        row = await self._change(inode, partial(namespace.link, ino=inode, parent=new_parent_inode, name=new_name))
        self.files.linked(inode)
        return self._attributes(row)

    @answered_ahead
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tenant_dir(parent_inode)
        if self.unlinks is not None:
            row = self.unlinks.take(parent_inode, name)
            if row is not None:
                self._bury(row)
                return
            await self.unlinks.catch_up()
        work = partial(namespace.unlink, parent=parent_inode, name=name, is_open=self.files.is_open)
        self._removed(await self._change(parent_inode, work))

    @answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        if parent_inode == s.ROOT:
            raise fail(errno.EPERM)
        self._tenant_dir(parent_inode)
        self._bury(await self._change(parent_inode, partial(namespace.rmdir, parent=parent_inode, name=name)))

    def _removed(self, row: InodeRow | None) -> None:
        if row is None or row.nlink:
            return
        if not self.files.is_open(row.ino):
            self._bury(row)
        if stat.S_ISREG(row.mode):
            self.files.removed(row)

    @answered
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        self._check_name(name_new)
        if flags & ~(pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE):
            raise fail(errno.EINVAL)
        if s.is_special(parent_inode_old) or s.is_special(parent_inode_new):
            raise fail(errno.EPERM if parent_inode_old == parent_inode_new else errno.EXDEV)
        if stream_of(parent_inode_old) != stream_of(parent_inode_new):
            raise fail(errno.EXDEV)
        self._tenant_dir(parent_inode_new)
        work = partial(
            namespace.rename,
            parent=parent_inode_old,
            name=name_old,
            new_parent=parent_inode_new,
            new_name=name_new,
            replace=not flags & pyfuse3.RENAME_NOREPLACE,
            exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
            # Whoever looked the name up a moment ago finds the old file whole: it stays until the kernel forgets it.
            is_open=lambda _: True,
        )
        replaced = (await self._change(parent_inode_old, work)).replaced
        if replaced is None or (replaced.nlink and not stat.S_ISDIR(replaced.mode)):
            return
        if stat.S_ISREG(replaced.mode):
            self._lingering.add(replaced.ino)
            self.files.nameless(replaced.ino)
        else:
            self._bury(replaced)
            await self._change(parent_inode_old, partial(namespace.drop_orphan, ino=replaced.ino))

    # -- files -------------------------------------------------------------------------------------------------

    @answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        self._check_name(name)
        self._tenant_dir(parent_inode)
        row, fh = await self.files.create(parent_inode, name, flags, mode=stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid)
        if flags & os.O_DSYNC:
            await self.files.sync_log(stream_of(parent_inode))
        if self.births is not None:
            self.births.created(parent_inode)
        return pyfuse3.FileInfo(fh=fh, keep_cache=False), self._attributes(row)

    async def create_unnamed(self, parent: int, flags: int, mode: int, uid: int, gid: int) -> tuple[InodeRow, int]:
        """O_TMPFILE."""
        self._tenant_dir(parent)
        return await self.files.create_unnamed(parent, flags, mode=stat.S_IMODE(mode), uid=uid, gid=gid)

    @answered
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if s.is_special(inode):
            return await self._open_special(inode, flags)
        if flags & os.O_TRUNC and ctx.uid != 0:
            await self._kill_if_special(inode)
        fh = await self.files.open(inode, flags)
        return pyfuse3.FileInfo(fh=fh, keep_cache=self.files.keeps_pages(fh))

    async def _kill_if_special(self, ino: int) -> None:
        with self.volume.catalog.view() as view:
            row = self._row(view, ino)
        if without_privileges(stat.S_IMODE(row.mode)) != stat.S_IMODE(row.mode):
            await self.kill_privileges(ino)

    async def _open_special(self, inode: int, flags: int) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise fail(errno.EROFS)
        fd = await trio.to_thread.run_sync(self.special.open, inode)
        fh = self._new_id()
        self._special_handles[fh] = fd
        return pyfuse3.FileInfo(fh=fh, direct_io=True, keep_cache=False)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    @answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        data = await self._read(fh, off, size)
        if len(data) > LONG_ANSWER:
            raise fail(self.files.kernel.hand_over(fh, off, data))
        return data

    async def _read(self, fh: int, off: int, size: int) -> bytes:
        fd = self._special_handles.get(fh)
        if fd is not None:
            return os.pread(fd, size, off)
        data = await self.files.glance(fh, off, size)
        if data is not None:
            return data
        if size >= SERVED_BYTES_MIN and await self.files.make_ready(fh, off, size):
            raise fail(SERVE)
        return await self.files.read(fh, off, size)

    @answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        file = self.files.handle(fh).file
        if file.special and self.files.kernel.killed(file.ino):
            await self.kill_privileges(file.ino)
        return await self.files.write(fh, off, buf)

    @answered
    async def flush(self, fh: int) -> None:
        """Nothing is held back in the daemon that a close would have to wait for."""

    @answered
    async def release(self, fh: int) -> None:
        fd = self._special_handles.pop(fh, None)
        if fd is not None:
            os.close(fd)
            return
        await self.files.release(fh)

    @answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        if fh not in self._special_handles:
            await self.files.fsync(self.files.handle(fh).file.ino)

    # -- directories -------------------------------------------------------------------------------------------

    @answered
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        fh = self._new_id()
        if s.is_special(inode):
            entries = self.special.entries(inode)
            if inode == s.ROOT:
                names = self.volume.tenant_names()
                entries += [(name.encode(), namespace.root_ino(tenant_id)) for tenant_id, name in names.items()]
            above = s.DOT if inode == s.MANIFEST else s.ROOT
            self._listings[fh] = [*zip(DOTS, (inode, above), strict=True), *entries]
        else:
            self._listings[fh] = Listing(stream_of(inode), inode)
        return fh

    @answered
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing, page = self._listings[fh], Page(token, LISTING_BYTES)
        if isinstance(listing, Listing):
            self._list(listing, start_id, page)
            return
        with self.volume.catalog.view() as view:
            for position, (name, ino) in enumerate(listing[start_id:], start_id + 1):
                if not page.add(name, self._attributes(self._row(view, ino)), position):
                    return

    def _list(self, listing: Listing, start_id: int, page: Page) -> None:
        if start_id == 0:
            listing.rewind()
        last: tuple[int, bytes] | None = None
        with self.volume.catalog.view() as view:
            for position, name in list(enumerate(DOTS, 1))[start_id:]:
                if not page.add(name, self._dot(view, listing.ino, name), position):
                    return
            for position, name, entry in listing.entries(view, start_id):
                row = view.get(listing.stream_id, t.INODES, entry.ino)
                if row is None:
                    continue
                if not page.add(name, self._attributes(row), position):
                    break
                last = (position, name)
        if last is not None:
            listing.stopped(*last)

    def _dot(self, view: View, ino: int, name: bytes) -> pyfuse3.EntryAttributes:
        row = self._row(view, ino)
        if name == DOTS[1]:
            row = self._row(view, row.parent if row.parent != ino else s.ROOT)
        return self._attributes(row)

    @answered
    async def releasedir(self, fh: int) -> None:
        self._listings.pop(fh, None)

    @answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        listing = self._listings.get(fh)
        if isinstance(listing, Listing):
            await self.files.sync_log(listing.stream_id)

    # -- the volume --------------------------------------------------------------------------------------------

    @answered
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """What can be written here before writers wait for uploads: clean data makes way."""
        limit = self.volume.settings.cache.hot_bytes
        free = max(0, limit - self.files.room.unevictable_bytes())
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_blocks = limit // 4096
        data.f_bfree = data.f_bavail = free // 4096
        data.f_files = data.f_ffree = data.f_favail = 1 << 32
        data.f_namemax = NAME_MAX
        return data

    # -- extended attributes -----------------------------------------------------------------------------------

    @answered
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if s.is_special(inode):
            raise fail(pyfuse3.ENOATTR)
        value = None
        with self.volume.catalog.view() as view:
            row = self._row(view, inode)
            if name in FACTS:
                value = fact(view, stream_of(inode), row, name, self.files.file(inode), self.files.block_bytes)
            elif name.startswith(XATTR_PREFIXES):
                value = namespace.get_xattr(view, stream_of(inode), inode, name)
        if value is None:
            raise fail(pyfuse3.ENOATTR)
        return value

    @answered
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        if s.is_special(inode):
            return []
        with self.volume.catalog.view() as view:
            return namespace.list_xattrs(view, stream_of(inode), inode)

    @answered
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._check_xattr(inode, name)
        await self._change(inode, partial(namespace.set_xattr, ino=inode, name=name, value=value))
        if name == CAPABILITY:
            self.files.kernel.caps(inode, True)

    @answered
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._check_xattr(inode, name)
        await self._change(inode, partial(namespace.remove_xattr, ino=inode, name=name))
        if name == CAPABILITY:
            self.files.kernel.caps(inode, False)

    def _check_xattr(self, inode: int, name: bytes) -> None:
        if s.is_special(inode):
            raise fail(errno.EPERM)
        if name.startswith(FACT_PREFIX) and name != COLD_SCAN:
            raise fail(errno.EPERM)
        if not name.startswith(XATTR_PREFIXES):
            raise fail(errno.EOPNOTSUPP)


def without_privileges(mode: int) -> int:
    """A mode after somebody else changed the file: no suid; no sgid where it means one."""
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode
