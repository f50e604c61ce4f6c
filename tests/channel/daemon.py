"""A small filesystem behind the channel, in a process of its own: one folder of plain files, served as the test says.

Run as a module with the mount point, the folder and options (JSON). Takes one JSON command a line on stdin, answers
each with a line on stdout. Tests use it through `support.Daemon`.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from aof2.engine.catalog.rows import InodeRow
from aof2.engine.kinds.kernel import AppendState, Short, Touched
from aof2.fs import attrs
from aof2.fs import channel as fs_channel
from aof2.fs import channel_wire as wire
from aof2.fs.channel import Channel, open_channel
from aof2.fs.channel_process import MountOptions
from aof2.fs.channel_wire import Upcall
from aof2.fs.options import Options
from tests.channel.streams import Stream

Json = dict[str, Any]


class Told:
    """Remembers what is told that is no request."""

    def __init__(self) -> None:
        self.refusals: list[list[int]] = []
        self.streams: dict[int, Stream] = {}

    def refused(self, ino: int, code: int) -> None:
        self.refusals.append([ino, code])

    def changes_waiting(self) -> None:
        """Nothing is created here."""

    def room_short(self, short: Short) -> None:
        """There is no brake here."""

    def touched(self, touched: Touched) -> None:
        """There is no brake here."""

    def appended(self, state: AppendState) -> None:
        self.streams[state.nodeid].appended.append(state)

    def partial(self, nodeid: int, fh: int, data: bytes) -> None:
        self.streams[nodeid].partial(fh, data)


class Folder(pyfuse3.Operations):
    """Inodes are numbered as their names are seen. `plans` says how the opens of a name are served."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.names: list[str] = ["", ""]
        self.plans: dict[str, Json] = {}
        self.ops: list[list[Any]] = []
        self.open_files: dict[int, tuple[int, int]] = {}  # fh: (inode, fd)
        self.registered: dict[int, int] = {}  # inode: opens
        self.held: dict[str, trio.Event] = {}
        self.told = Told()
        self.upcalls: list[list[Any]] = []
        self.xattrs: dict[tuple[str, bytes], bytes] = {}
        self.next_fh = 100
        self.misdirected = 0  # the errno that long answers are told with, where it is a wrong one
        self.channel: Channel

    def inode(self, name: str) -> int:
        if name not in self.names[2:]:
            self.names.append(name)
        return self.names.index(name, 2)

    def path(self, inode: int) -> Path:
        return self.root if inode == pyfuse3.ROOT_INODE else self.root / self.names[inode]

    def note(self, op: str, inode: int, *rest: Any) -> None:
        self.ops.append([op, self.names[inode], *rest])

    async def getattr(self, inode: int, ctx: Any = None) -> pyfuse3.EntryAttributes:
        try:
            st = os.stat(self.path(inode))
        except OSError as e:
            raise pyfuse3.FUSEError(e.errno) from None
        entry = pyfuse3.EntryAttributes()
        for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime_ns", "st_mtime_ns", "st_ctime_ns"):
            setattr(entry, name, getattr(st, name))
        entry.st_ino = inode
        entry.st_blocks = st.st_blocks
        entry.attr_timeout = entry.entry_timeout = 60
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> pyfuse3.EntryAttributes:
        if not (self.root / os.fsdecode(name)).exists():
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(self.inode(os.fsdecode(name)))

    async def setattr(self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any) -> pyfuse3.EntryAttributes:
        self.note("setattr", inode)
        if fields.update_size:
            os.truncate(self.path(inode), attr.st_size)
        if fields.update_mode:
            os.chmod(self.path(inode), stat.S_IMODE(attr.st_mode))
        return await self.getattr(inode)

    def _register(self, inode: int, fd: int) -> int:
        name = self.names[inode]
        plan = self.plans.get(name)
        fh = self.next_fh = self.next_fh + 1
        self.open_files[fh] = (inode, fd)
        if plan and plan["mode"]:
            if not self.registered.get(inode):
                self.channel.node(
                    inode,
                    fd,
                    mode=plan["mode"],
                    flags=plan.get("flags", 0),
                    block_bytes=plan.get("block_bytes", 0),
                    block_count=plan.get("block_count", 0),
                )
                for first, count in plan.get("present", []):
                    self.channel.blocks(inode, first, count)
                if plan.get("grant"):
                    self.channel.grant(inode, plan["grant"])
            self.registered[inode] = self.registered.get(inode, 0) + 1
            self.channel.handle(inode, fh, fh.to_bytes(8, "little"))
        return fh

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        self.note("open", inode)
        if stream := self.told.streams.get(inode):
            fh = self.next_fh = self.next_fh + 1
            self.open_files[fh] = (inode, -1)
            stream.open(fh, ext_id=fh)
            return pyfuse3.FileInfo(fh=fh)
        fd = os.open(self.path(inode), os.O_RDWR | (flags & os.O_TRUNC))
        direct_io = bool(self.plans.get(self.names[inode], {}).get("direct_io"))
        return pyfuse3.FileInfo(fh=self._register(inode, fd), direct_io=direct_io)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        fd = os.open(self.root / os.fsdecode(name), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)
        inode = self.inode(os.fsdecode(name))
        self.note("create", inode)
        return pyfuse3.FileInfo(fh=self._register(inode, fd)), await self.getattr(inode)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        inode, fd = self.open_files[fh]
        self.note("read", inode, offset, size)
        if self.names[inode] in self.held:
            await self.held[self.names[inode]].wait()
        data = os.pread(fd, size, offset)
        if self.plans.get(self.names[inode], {}).get("hand_over"):
            code = self.channel.hand_over(fh, offset, data)
            raise pyfuse3.FUSEError(self.misdirected or code)
        return data

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        inode, fd = self.open_files[fh]
        if stream := self.told.streams.get(inode):
            return await stream.write(fh, data)
        self.note("write", inode, offset, len(data), self.channel.killed(inode))
        return os.pwrite(fd, data, offset)

    async def flush(self, fh: int) -> None:
        self.note("flush", self.open_files[fh][0])

    async def fsync(self, fh: int, datasync: bool) -> None:
        inode, fd = self.open_files[fh]
        if inode not in self.told.streams:
            os.fsync(fd)

    async def release(self, fh: int) -> None:
        inode, fd = self.open_files.pop(fh)
        self.note("release", inode)
        if stream := self.told.streams.get(inode):
            await stream.release(fh)
            return
        os.close(fd)
        if inode in self.registered:
            self.registered[inode] -= 1
            if not self.registered[inode]:
                del self.registered[inode]
                self.channel.drop(inode)

    async def unlink(self, parent: int, name: bytes, ctx: Any) -> None:
        os.unlink(self.root / os.fsdecode(name))

    async def opendir(self, inode: int, ctx: Any) -> int:
        return 1

    async def readdir(self, fh: int, start: int, token: Any) -> None:
        for i, name in enumerate(sorted(os.listdir(self.root))[start:], start + 1):
            if not pyfuse3.readdir_reply(token, os.fsencode(name), await self.getattr(self.inode(name)), i):
                return

    async def getxattr(self, inode: int, name: bytes, ctx: Any) -> bytes:
        self.note("getxattr", inode, os.fsdecode(name))
        try:
            return self.xattrs[self.names[inode], name]
        except KeyError:
            raise pyfuse3.FUSEError(errno.ENODATA) from None

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        st, out = os.statvfs(self.root), pyfuse3.StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail"):
            setattr(out, name, getattr(st, name))
        return out

    def at_once(self, opcode: int, nodeid: int, body: bytes) -> bytes | None:
        """Names, where they are upcalls; the kernel must not remember them."""
        if opcode == wire.GETATTR:
            return attrs.attr_out(self.row(self.names[nodeid]), Options())
        if opcode != wire.LOOKUP:
            return None
        name = os.fsdecode(body[:-1])
        self.ops.append(["upcall", name])
        if not (self.root / name).exists():
            raise OSError(errno.ENOENT, name)
        return self.entry(self.row(name))

    def row(self, name: str) -> InodeRow:
        st = os.stat(self.root / name)
        ino = self.inode(name) if name else pyfuse3.ROOT_INODE
        return InodeRow(ino, st.st_mode, st.st_uid, st.st_gid, st.st_size, st.st_nlink)

    def entry(self, row: InodeRow) -> bytes:
        entry = attrs.entry_out(row, Options())
        return entry[:16] + bytes(8) + entry[24:]

    async def upcall(self, call: Upcall) -> bytes:
        self.upcalls.append([call.opcode, self.names[call.nodeid], call.body.hex(), call.uid])
        raise OSError(errno.EOPNOTSUPP, "not in this test")


class Commands:
    """What a test may ask of the daemon while it runs."""

    def __init__(self, ops: Folder, channel: Channel) -> None:
        self.ops, self.channel = ops, channel
        self.scope: trio.CancelScope

    async def answer(self, command: Json) -> Any:
        name = command.pop("cmd")
        return await getattr(self, "do_" + name)(**command)

    async def do_info(self) -> Json:
        await self.channel.initialised()
        c = self.channel
        return {
            "pid": c.pid,
            "passthrough": c.passthrough_offered,
            "max_write": c.max_write,
            "device": c.device,
            "transport": c.transport,
        }

    async def do_plan(self, name: str, **plan: Any) -> None:
        self.ops.plans[name] = plan

    async def do_ops(self) -> list[Any]:
        seen, self.ops.ops = self.ops.ops, []
        return seen

    async def do_upcalls(self) -> list[Any]:
        seen, self.ops.upcalls = self.ops.upcalls, []
        return seen

    async def do_refused(self) -> list[Any]:
        return self.ops.told.refusals

    async def do_coming(self, name: str, first: int, count: int) -> None:
        self.channel.coming(self.ops.inode(name), first, count)
        await self.channel.caught_up()

    async def do_blocks(self, name: str, first: int, count: int) -> None:
        self.channel.blocks(self.ops.inode(name), first, count)
        await self.channel.caught_up()

    async def do_clear(self, name: str, first: int, count: int) -> None:
        await self.channel.clear(self.ops.inode(name), first, count)

    async def do_grant(self, name: str, n: int) -> None:
        self.channel.grant(self.ops.inode(name), n)
        await self.channel.caught_up()

    async def do_collect(self, name: str) -> Json:
        w = await self.channel.collect(self.ops.inode(name))
        return {"bytes": w.bytes_written, "left": w.budget_left, "ranges": w.ranges, "untracked": w.untracked}

    async def do_misdirect(self, code: int) -> None:
        self.ops.misdirected = code

    async def do_handed_over(self) -> int:
        return self.channel.handed_over

    async def do_drop(self, name: str) -> None:
        self.channel.drop(self.ops.inode(name))

    async def do_caps(self, name: str, on: bool) -> None:
        self.channel.caps(self.ops.inode(name), on)
        await self.channel.caught_up()

    async def do_xattr(self, name: str, key: str, value: str) -> None:
        self.ops.xattrs[name, key.encode()] = value.encode("latin-1")

    async def do_probe(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY)
        try:
            return await self.channel.probe(fd)
        finally:
            os.close(fd)

    async def do_dump(self) -> list[Any]:
        return [[h.nodeid, h.fh, h.cookie.hex()] for h in await self.channel.dump()]

    async def do_hold(self, name: str) -> None:
        self.ops.held[name] = trio.Event()

    async def do_unhold(self, name: str) -> None:
        self.ops.held.pop(name).set()

    async def do_invalidate_inode(self, name: str, offset: int = 0, length: int = 0) -> None:
        self.channel.invalidate_inode(self.ops.inode(name), offset, length)

    async def do_invalidate_attr(self, name: str) -> None:
        self.channel.invalidate_attr(self.ops.inode(name))

    async def do_invalidate_entry(self, name: str) -> None:
        self.channel.invalidate_entry(1, os.fsencode(name))

    # -- streams

    def stream(self, name: str) -> Stream:
        return self.ops.told.streams[self.ops.inode(name)]

    async def do_stream(self, name: str, folder: str, **options: Any) -> int:
        """The file of this name is an `_append` from here on; its inode."""
        ino = self.ops.inode(name)
        stream = self.ops.told.streams[ino] = Stream(self.channel, ino, Path(folder), options)
        stream.give()
        await self.channel.caught_up()
        return ino

    async def do_set(self, name: str, **options: Any) -> None:
        for key, value in options.items():
            setattr(self.stream(name), key, value)

    async def do_asked(self, name: str) -> list[Any]:
        self.channel.hear()
        seen, self.stream(name).asked = self.stream(name).asked, []
        return seen

    async def do_appended(self, name: str) -> list[Any]:
        await self.channel.caught_up()
        seen, self.stream(name).appended = self.stream(name).appended, []
        return seen

    async def do_begun(self, name: str) -> list[str]:
        self.channel.hear()
        return [data.hex() for data in self.stream(name).begun.values()]

    async def do_append_take(self, name: str) -> list[int] | None:
        state = await self.stream(name).take()
        return None if state is None else list(state)

    async def do_append_give(self, name: str) -> None:
        self.stream(name).give()
        await self.channel.caught_up()

    async def do_append_cycle(self, name: str, times: int) -> int:
        """Taken and given again, under its writers."""
        stream = self.stream(name)
        for _ in range(times):
            async with stream.lock:
                await stream.take()
                stream.give()
            await self.channel.append_state(stream.ino)
        return times

    async def do_append_state(self, name: str) -> list[int] | None:
        state = await self.channel.append_state(self.stream(name).ino)
        return None if state is None else list(state)

    async def do_append_room(self, name: str, room_end: int) -> None:
        self.stream(name).room_end = room_end
        self.channel.append_room(self.stream(name).ino, room_end)
        await self.channel.caught_up()

    async def do_append_handle(self, name: str, fh: int, ext_id: int = 0, forwards: bool = False) -> None:
        self.channel.append_handle(self.stream(name).ino, fh, ext_id=ext_id, forwards=forwards)
        await self.channel.caught_up()

    async def do_append_partial(self, name: str, fh: int, data: str) -> None:
        self.channel.append_partial(self.stream(name).ino, fh, bytes.fromhex(data))
        await self.channel.caught_up()

    async def do_caught_up(self) -> None:
        await self.channel.caught_up()

    async def do_unmount(self) -> None:
        await self.channel.unmount()

    async def do_stop(self) -> None:
        """As a signal would."""
        self.scope.cancel()

    async def do_raw(self, where: str, data: str, fds: int = 0) -> None:
        """Bytes on a socket as they are, past everything that checks them."""
        if where == "fuse":
            sock = socket.socket(fileno=os.dup(int(self.channel.fuse_fd_path.rpartition("/")[2])))
        else:
            box = self.channel._control if where == "control" else self.channel._notify
            sock = box.sock.dup()
        null = os.open("/dev/null", os.O_RDONLY)
        try:
            socket.send_fds(sock, [bytes.fromhex(data)], [null] * fds) if fds else sock.send(bytes.fromhex(data))
        finally:
            os.close(null)
            sock.close()


async def commands(ops: Folder, channel: Channel, scope: trio.CancelScope) -> None:
    doing = Commands(ops, channel)
    doing.scope = scope
    reader = trio.lowlevel.FdStream(os.dup(0))
    buffered = b""
    async with trio.open_nursery() as nursery:

        async def one(line: bytes) -> None:
            command = json.loads(line)
            tag = command.pop("tag")
            try:
                result = {"tag": tag, "ok": await doing.answer(command)}
            except Exception as e:
                result = {"tag": tag, "error": repr(e)}
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()

        async for data in reader:
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                nursery.start_soon(one, line)


async def main(mountpoint: str, root: str, options: Json) -> None:
    arguments = tuple(options.pop("arguments", ()))
    if executable := options.pop("channel", None):
        fs_channel.channel_path = lambda: Path(executable)
    names, uring = options.pop("names", False), options.pop("uring", False)
    wanted = MountOptions(**options)
    async with open_channel(Path(mountpoint), wanted, names=names, uring=uring, arguments=arguments) as channel:
        ops = Folder(Path(root))
        ops.channel = channel
        pyfuse3.init(ops, channel.fuse_fd_path, {"default_permissions"})
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(pyfuse3.main, max_tasks=1000))
                nursery.start_soon(commands, ops, channel, nursery.cancel_scope)
                sys.stdout.write(json.dumps({"tag": 0, "ok": "mounted"}) + "\n")
                sys.stdout.flush()
                await channel.run(
                    ops.upcall,
                    ops.told,
                    at_once=ops.at_once,
                )
                for stream in ops.told.streams.values():
                    (stream.folder / "begun").write_bytes(b"".join(stream.begun.values()))
                nursery.cancel_scope.cancel()
        finally:
            pyfuse3.close(unmount=False)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    trio.run(main, sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
