"""The operations of the mount: pyfuse3's calls, answered from the catalog and by `engine.files`.

A thin adapter: what POSIX asks of names is in `engine.namespace`, what becomes of bytes in `engine.files`. Here is only
the translation; what an inode is, to whoever asks, is in `nodes.py`. LOOKUP, GETATTR and READDIRPLUS come this way only
when the channel has no room for them (`quick.py`), and are answered the same.

Invariants
- Permissions are the kernel's to check (default_permissions).
- Nothing but FUSEError leaves an operation (`answers.py`).

Owner: the trio thread.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from functools import partial
from typing import Final

import pyfuse3
import trio

from aof2.engine import namespace
from aof2.engine.catalog.rows import InodeRow, TenantKind
from aof2.engine.errors import Aof2Error
from aof2.engine.files import stream_of
from aof2.engine.files.cold import COLD_SCAN, check_value
from aof2.fs import special as s
from aof2.fs.answers import answered, answered_ahead
from aof2.fs.attrs import absent
from aof2.fs.channel_wire import SERVE
from aof2.fs.directories import Directories, PyfusePage
from aof2.fs.facts import FACTS, fact
from aof2.fs.nodes import NAME_MAX, Nodes, check_name
from aof2.fs.setattr import CAPABILITY, Setattr

log = logging.getLogger(__name__)

# Longer answers must not go through a socket. A message takes 16 KiB in a row and up to 17 single pages, which the
# kernel has; past 80 KiB it wants more in a row. Where it finds none the reply is lost, and the caller waits for ever.
LONG_ANSWER: Final = 64 << 10
SERVED_BYTES_MIN: Final = 32 << 10  # of what is on the disk: worth asking the channel to read it there
FACT_PREFIX: Final = b"user.aof2."
XATTR_PREFIXES: Final = (b"user.", b"trusted.", CAPABILITY)


def fail(code: int) -> pyfuse3.FUSEError:
    return pyfuse3.FUSEError(code)


class Operations(pyfuse3.Operations):
    """What the kernel asks, request by request."""

    supports_dot_lookup = True  # by inode: how the kernel finds what it forgot (file handles, NFS)
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self.nodes = nodes
        self.volume = nodes.volume
        self.files = nodes.files
        self.directories = Directories(nodes)
        self._special = nodes.special
        self._setattr = Setattr(nodes)
        self._lingering: set[int] = set()
        self._special_handles: dict[int, int] = {}
        self._next_id = 1 << 62  # of handles that are not files', apart from theirs

    def _tenant_dir(self, ino: int) -> int:
        """The stream of a directory in which names may change; EPERM where they may not."""
        if s.is_special(ino):
            raise fail(errno.EPERM)
        stream_id = stream_of(ino)
        if self.volume.tenant_kind(stream_id) != TenantKind.FILES:
            raise fail(errno.EPERM)
        return stream_id

    # -- looking up --------------------------------------------------------------------------------------------

    @answered_ahead
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        row = self.nodes.find(parent_inode, name)
        return absent() if row is None else self.nodes.attributes(row)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, _ in inode_list:
            self.nodes.forget(ino)
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

    @answered_ahead
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        if self.nodes.unlinks is not None and self.nodes.unlinks.is_nameless(inode):
            await self.nodes.unlinks.catch_up()
        return self.nodes.attributes(self.nodes.get(inode))

    @answered
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        with self.volume.catalog.view() as view:
            return self.nodes.row(view, inode).target

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
        await self._setattr.change(inode, attr, fields, ctx)
        return await self.getattr(inode, ctx)

    # -- names -------------------------------------------------------------------------------------------------

    @answered
    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        check_name(name)
        self._tenant_dir(parent_inode)
        self.volume.disk.admit_name()
        if stat.S_ISREG(mode):
            await self.files.admit_file()
            chunk_bytes = self.volume.settings.engine.chunk_bytes
            work = partial(
                namespace.create, parent=parent_inode, name=name, mode=stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid,
                chunk_bytes=chunk_bytes,
            )  # fmt: skip
            row = await self.nodes.change(parent_inode, work)
            self.files.make_backing(row)
        else:
            work = partial(
                namespace.make_node, parent=parent_inode, name=name, mode=mode, rdev=rdev, uid=ctx.uid, gid=ctx.gid
            )
            row = await self.nodes.change(parent_inode, work)
        return self.nodes.attributes(row)

    @answered
    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        check_name(name)
        self._tenant_dir(parent_inode)
        self.volume.disk.admit_name()
        work = partial(
            namespace.mkdir, parent=parent_inode, name=name, mode=stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid
        )
        return self.nodes.attributes(await self.nodes.change(parent_inode, work))

    @answered
    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        check_name(name)
        self._tenant_dir(parent_inode)
        self.volume.disk.admit_name()
        work = partial(namespace.symlink, parent=parent_inode, name=name, target=target, uid=ctx.uid, gid=ctx.gid)
        return self.nodes.attributes(await self.nodes.change(parent_inode, work))

    @answered
    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        check_name(new_name)
        if s.is_special(inode) or s.is_special(new_parent_inode):
            raise fail(errno.EXDEV if s.is_special(inode) != s.is_special(new_parent_inode) else errno.EPERM)
        if stream_of(inode) != stream_of(new_parent_inode):
            raise fail(errno.EXDEV)
        self._tenant_dir(new_parent_inode)
        self.volume.disk.admit_name()
        row = await self.nodes.change(inode, partial(namespace.link, ino=inode, parent=new_parent_inode, name=new_name))
        self.files.linked(inode)
        return self.nodes.attributes(row)

    @answered_ahead
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._tenant_dir(parent_inode)
        if self.nodes.unlinks is not None:
            row = self.nodes.unlinks.take(parent_inode, name)
            if row is not None:
                self.nodes.bury(row)
                return
            await self.nodes.unlinks.catch_up()
        work = partial(namespace.unlink, parent=parent_inode, name=name, is_open=self.files.is_open)
        self._removed(await self.nodes.change(parent_inode, work))

    @answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        if parent_inode == s.ROOT:
            raise fail(errno.EPERM)
        self._tenant_dir(parent_inode)
        self.nodes.bury(await self.nodes.change(parent_inode, partial(namespace.rmdir, parent=parent_inode, name=name)))

    def _removed(self, row: InodeRow | None) -> None:
        if row is None or row.nlink:
            return
        if not self.files.is_open(row.ino):
            self.nodes.bury(row)
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
        check_name(name_new)
        if flags & ~(pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE):
            raise fail(errno.EINVAL)
        if s.is_special(parent_inode_old) or s.is_special(parent_inode_new):
            raise fail(errno.EPERM if parent_inode_old == parent_inode_new else errno.EXDEV)
        if stream_of(parent_inode_old) != stream_of(parent_inode_new):
            raise fail(errno.EXDEV)
        self._tenant_dir(parent_inode_new)
        self.volume.disk.admit_name()
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
        replaced = (await self.nodes.change(parent_inode_old, work)).replaced
        if replaced is None or (replaced.nlink and not stat.S_ISDIR(replaced.mode)):
            return
        if stat.S_ISREG(replaced.mode):
            self._lingering.add(replaced.ino)
            self.files.nameless(replaced.ino)
        else:
            self.nodes.bury(replaced)
            await self.nodes.change(parent_inode_old, partial(namespace.drop_orphan, ino=replaced.ino))

    # -- files -------------------------------------------------------------------------------------------------

    @answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        check_name(name)
        self._tenant_dir(parent_inode)
        row, fh = await self.files.create(parent_inode, name, flags, mode=stat.S_IMODE(mode), uid=ctx.uid, gid=ctx.gid)
        if flags & os.O_DSYNC:
            await self.files.sync_log(stream_of(parent_inode))
        if self.nodes.births is not None:
            self.nodes.births.created(parent_inode)
        return pyfuse3.FileInfo(fh=fh, keep_cache=False), self.nodes.attributes(row)

    async def create_unnamed(self, parent: int, flags: int, mode: int, uid: int, gid: int) -> tuple[InodeRow, int]:
        """O_TMPFILE."""
        self._tenant_dir(parent)
        return await self.files.create_unnamed(parent, flags, mode=stat.S_IMODE(mode), uid=uid, gid=gid)

    @answered
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if s.is_special(inode):
            return await self._open_special(inode, flags)
        if flags & os.O_TRUNC and ctx.uid != 0:
            await self._setattr.kill_if_special(inode)
        fh = await self.files.open(inode, flags)
        return pyfuse3.FileInfo(fh=fh, keep_cache=self.files.keeps_pages(fh))

    async def _open_special(self, inode: int, flags: int) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise fail(errno.EROFS)
        fd = await trio.to_thread.run_sync(self._special.open, inode)
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
        if size >= SERVED_BYTES_MIN:
            ready = await self.files.make_ready(fh, off, size)
            if isinstance(ready, bytes):
                return ready
            if ready:
                raise fail(SERVE)
        return await self.files.read(fh, off, size)

    @answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        file = self.files.handle(fh).file
        if file.special and self.files.kernel.killed(file.ino):
            await self._setattr.kill_privileges(file.ino)
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
        return self.directories.open(inode)

    @answered
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        self.directories.tell(fh, start_id, PyfusePage(self.nodes, token))

    @answered
    async def releasedir(self, fh: int) -> None:
        self.directories.close(fh)

    @answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        stream_id = self.directories.stream(fh)
        if stream_id is not None:
            await self.files.sync_log(stream_id)

    # -- the volume --------------------------------------------------------------------------------------------

    @answered
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Only where the channel has no room to ask by inode (`upcalls.py`)."""
        limit, free = self.files.room.space(None)
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_blocks = limit // 4096
        data.f_bfree = data.f_bavail = free // 4096
        inodes = self.volume.disk.inodes()
        data.f_files = inodes.total if inodes is not None else 1 << 32
        data.f_ffree = data.f_favail = inodes.room if inodes is not None else 1 << 32
        data.f_namemax = NAME_MAX
        return data

    # -- extended attributes -----------------------------------------------------------------------------------

    @answered
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if s.is_special(inode):
            raise fail(pyfuse3.ENOATTR)
        value = None
        with self.volume.catalog.view() as view:
            row = self.nodes.row(view, inode)
            if name in FACTS:
                value = fact(self.volume, view, stream_of(inode), row, name, self.files.file(inode))
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
        if name == COLD_SCAN:
            check_value(value)
        self.volume.disk.admit_name()
        await self.nodes.change(inode, partial(namespace.set_xattr, ino=inode, name=name, value=value))
        if name == COLD_SCAN:
            self.files.cold.marked(inode, value)
        if name == CAPABILITY:
            self.files.kernel.caps(inode, True)

    @answered
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._check_xattr(inode, name)
        await self.nodes.change(inode, partial(namespace.remove_xattr, ino=inode, name=name))
        if name == COLD_SCAN:
            self.files.cold.marked(inode, None)
        if name == CAPABILITY:
            self.files.kernel.caps(inode, False)

    def _check_xattr(self, inode: int, name: bytes) -> None:
        if s.is_special(inode):
            raise fail(errno.EPERM)
        if name.startswith(FACT_PREFIX) and name != COLD_SCAN:
            raise fail(errno.EPERM)
        if not name.startswith(XATTR_PREFIXES):
            raise fail(errno.EOPNOTSUPP)
