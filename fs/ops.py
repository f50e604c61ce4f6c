"""The operations of the mount: pyfuse3's calls, handed to the kind whose inode or handle it is.

A thin adapter: what POSIX asks of names and what becomes of bytes is the kinds' (`engine/kinds`). Here is only the
translation; what an inode is to the kernel is in `tree.py`. LOOKUP, GETATTR and READDIRPLUS come this way only when the
channel has no room for them (`quick.py`), and are answered the same.

Invariants
- Permissions are the kernel's to check (default_permissions).
- Nothing but FUSEError leaves an operation (`answers.py`).
- A kind is asked after it folded what the answer could show (`Kinds.folded`, `Kinds.handle`).

Owner: the trio thread.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, SetattrFields, StatvfsData

from aof2.engine.catalog.rows import stream_of
from aof2.engine.kinds.kernel import Kernel
from aof2.engine.kinds.kind import NAME_MAX, Asked, AttributeChange, Caller
from aof2.engine.kinds.mounted import TOP
from aof2.engine.volume import Volume
from aof2.fs.answers import answered
from aof2.fs.channel_wire import SERVE
from aof2.fs.directories import Directories, PyfusePage
from aof2.fs.tree import Tree, check_name

# Longer answers must not go through a socket. A message takes 16 KiB in a row and up to 17 single pages, which the
# kernel has; past 80 KiB it wants more in a row. Where it finds none the reply is lost, and the caller waits for ever.
LONG_ANSWER: Final = 64 << 10


def fail(code: int) -> FUSEError:
    return FUSEError(code)


def caller_of(ctx: RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid)


class Operations(pyfuse3.Operations):
    """What the kernel asks, request by request."""

    supports_dot_lookup = True  # by inode: how the kernel finds what it forgot (file handles, NFS)
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, volume: Volume, kernel: Kernel, tree: Tree) -> None:
        super().__init__()
        self.volume = volume
        self.tree = tree
        self.directories = Directories(tree)
        self._kernel = kernel
        self._kinds = tree.kinds
        self._at = tree.kinds.folded

    # -- looking up --------------------------------------------------------------------------------------------

    @answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        await self._at(parent_inode, Asked.LOOK_UP)
        row = await self.tree.find_now(parent_inode, name)
        return self.tree.absent() if row is None else self.tree.attributes(row)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, _ in inode_list:
            await self._kinds.of(ino).forget(ino)

    @answered
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        await self._at(inode, Asked.ATTRIBUTES)
        return self.tree.attributes(self.tree.get(inode))

    @answered
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return (await self._at(inode)).readlink(inode)

    # -- attributes --------------------------------------------------------------------------------------------

    @answered
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        change = AttributeChange(
            mode=attr.st_mode if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        kind = await self._at(inode)
        return self.tree.attributes(await kind.set_attributes(inode, change, caller_of(ctx)))

    # -- names -------------------------------------------------------------------------------------------------

    @answered
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        check_name(name)
        kind = await self._at(parent_inode)
        return self.tree.attributes(await kind.make_node(parent_inode, name, mode, rdev, caller_of(ctx)))

    @answered
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        check_name(name)
        kind = await self._at(parent_inode)
        return self.tree.attributes(await kind.mkdir(parent_inode, name, mode, caller_of(ctx)))

    @answered
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        check_name(name)
        kind = await self._at(parent_inode)
        return self.tree.attributes(await kind.symlink(parent_inode, name, target, caller_of(ctx)))

    @answered
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        check_name(new_name)
        if stream_of(inode) != stream_of(new_parent_inode):
            raise fail(errno.EXDEV)
        kind = await self._at(inode)
        return self.tree.attributes(await kind.link(inode, new_parent_inode, new_name))

    @answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await (await self._at(parent_inode, Asked.UNLINK)).unlink(parent_inode, name)

    @answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        await (await self._at(parent_inode)).rmdir(parent_inode, name)

    @answered
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        check_name(name_new)
        if flags & ~(pyfuse3.RENAME_NOREPLACE | pyfuse3.RENAME_EXCHANGE):
            raise fail(errno.EINVAL)
        if stream_of(parent_inode_old) != stream_of(parent_inode_new):
            raise fail(errno.EXDEV)
        kind = await self._at(parent_inode_old)
        await kind.rename(
            parent_inode_old,
            name_old,
            parent_inode_new,
            name_new,
            replace=not flags & pyfuse3.RENAME_NOREPLACE,
            exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
        )

    # -- files -------------------------------------------------------------------------------------------------

    @answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        check_name(name)
        kind = await self._at(parent_inode)
        row, fh = await kind.create(parent_inode, name, flags, mode, caller_of(ctx))
        return FileInfo(fh=fh, keep_cache=False), self.tree.attributes(row)

    @answered
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        async with self._kinds.opening(inode) as kind:
            fh = await kind.open(inode, flags, caller_of(ctx))
        handle = self._kinds.opens.get(fh)
        return FileInfo(fh=fh, keep_cache=handle.keeps_pages, direct_io=handle.direct_io)

    @answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        data = await (await self._kinds.handle(fh)).read(off, size)
        if data is None:
            raise fail(SERVE)
        if len(data) > LONG_ANSWER:
            raise fail(self._kernel.hand_over(fh, off, data))
        return data

    @answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await (await self._kinds.handle(fh)).write(off, buf)

    @answered
    async def flush(self, fh: int) -> None:
        """Nothing is held back in the daemon that a close would have to wait for."""

    @answered
    async def release(self, fh: int) -> None:
        await (await self._kinds.handle(fh)).close()

    @answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        await (await self._kinds.handle(fh)).sync()

    # -- directories -------------------------------------------------------------------------------------------

    @answered
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return self.directories.open(inode)

    @answered
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        ino = self.directories.ino(fh)
        await self._at(ino, Asked.LIST)
        self.directories.tell(fh, start_id, PyfusePage(self.tree, token), ino)

    @answered
    async def releasedir(self, fh: int) -> None:
        self.directories.close(fh)

    @answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        ino = self.directories.ino(fh)
        await (await self._at(ino)).sync_names(ino)

    # -- the volume --------------------------------------------------------------------------------------------

    @answered
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """Only where the channel has no room to ask by inode (`upcalls.py`)."""
        limit, free = self._kinds.of(TOP).space(TOP)
        data = StatvfsData()
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
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        value = (await self._at(inode)).get_xattr(inode, name, caller_of(ctx))
        if value is None:
            raise fail(pyfuse3.ENOATTR)
        return value

    @answered
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        return (await self._at(inode)).list_xattrs(inode)

    @answered
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        await (await self._at(inode)).set_xattr(inode, name, value, caller_of(ctx))

    @answered
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        await (await self._at(inode)).remove_xattr(inode, name)
