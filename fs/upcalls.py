"""Requests that libfuse does not know or pyfuse3 does not pass on: the channel hands them over, and is answered here.

fallocate, lseek for data and holes, copy_file_range on files that the channel does not hold whole, syncfs, O_TMPFILE.
And what asks about names, when `quick.py` could not answer at once.

Owner: the trio thread.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

from aof2.engine.errors import os_error
from aof2.engine.kinds.kind import NAME_MAX, Caller
from aof2.fs.answers import code_of
from aof2.fs.channel_wire import Upcall
from aof2.fs.ops import Operations
from aof2.fs.quick import ABOUT_NAMES, Quick

FALLOCATE: Final = 43
LSEEK: Final = 46
SYNCFS: Final = 50
TMPFILE: Final = 51
COPY_FILE_RANGE: Final = 47
COPY_FILE_RANGE_64: Final = 53
STATFS: Final = 17
FSYNC: Final = 20
FSYNCDIR: Final = 30
_CREATE_IN: Final = struct.Struct("=IIII")
_OPEN_OUT: Final = struct.Struct("=QII")
_FALLOCATE_IN: Final = struct.Struct("<QQQII")
_LSEEK_IN: Final = struct.Struct("<QQII")
_COPY_IN: Final = struct.Struct("<QQQQQQQ")
_STATFS_OUT: Final = struct.Struct("=QQQQQIIII6I")
_STATFS_BLOCK: Final = 4096
_STATFS_FILES: Final = 1 << 32  # where the disk does not count them


class Upcalls:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._tree = operations.tree
        self._kinds = operations.tree.kinds
        self._quick = Quick(operations.tree, operations.directories, operations.volume.foreground)
        self.at_once = self._quick.answer

    async def answer(self, call: Upcall) -> bytes:
        """The body of the reply; OSError with what the kernel is told instead."""
        try:
            return await self._answer(call)
        except OSError:
            raise
        except Exception as e:  # noqa: BLE001
            raise OSError(code_of(f"opcode {call.opcode}", e), "") from None

    async def _answer(self, call: Upcall) -> bytes:
        if call.opcode in ABOUT_NAMES:
            return await self._quick.answer_in_time(call.opcode, call.nodeid, call.body)
        if call.opcode == FALLOCATE:
            return await self._fallocate(call)
        if call.opcode in (COPY_FILE_RANGE, COPY_FILE_RANGE_64):
            return await self._copy(call)
        if call.opcode == LSEEK:
            return await self._lseek(call)
        if call.opcode == TMPFILE:
            return await self._tmpfile(call)
        if call.opcode == STATFS:
            return await self._statfs(call)
        if call.opcode == FSYNCDIR:
            await (await self._kinds.folded(call.nodeid)).sync_names(call.nodeid)
            return b""
        if call.opcode == FSYNC:  # of a file that the channel opened by itself
            await (await self._kinds.folded(call.nodeid)).sync_file(call.nodeid)
            return b""
        if call.opcode == SYNCFS:
            await self._kinds.fold()
            await self._kinds.sync_all()
            return b""
        raise os_error(errno.EOPNOTSUPP)

    async def _fallocate(self, call: Upcall) -> bytes:
        fh, offset, length, mode, _ = _FALLOCATE_IN.unpack_from(call.body)
        await (await self._kinds.handle(fh)).allocate(mode, offset, length)
        return b""

    async def _statfs(self, call: Upcall) -> bytes:
        total, free = (await self._kinds.folded(call.nodeid)).space(call.nodeid)
        blocks, avail = total // _STATFS_BLOCK, free // _STATFS_BLOCK
        inodes = self._operations.volume.disk.inodes()
        files = (_STATFS_FILES, _STATFS_FILES) if inodes is None else (inodes.total, inodes.room)
        sizes = (_STATFS_BLOCK, NAME_MAX, _STATFS_BLOCK, 0)
        return _STATFS_OUT.pack(blocks, avail, avail, *files, *sizes, *([0] * 6))

    async def _copy(self, call: Upcall) -> bytes:
        fh_in, offset_in, _, fh_out, offset_out, length, _ = _COPY_IN.unpack_from(call.body)
        source, target = await self._kinds.handle(fh_in), await self._kinds.handle(fh_out)
        done = await target.copy_from(source, offset_in, offset_out, length)
        return struct.pack("<Q", done)  # the older reply is {u32 size, u32 padding}: the same bytes

    async def _tmpfile(self, call: Upcall) -> bytes:
        flags, mode, _, _ = _CREATE_IN.unpack_from(call.body)
        kind = await self._kinds.folded(call.nodeid)
        row, fh = await kind.create_unnamed(call.nodeid, flags, mode, Caller(call.uid, call.gid))
        return self._tree.entry_out(row) + _OPEN_OUT.pack(fh, 0, 0)

    async def _lseek(self, call: Upcall) -> bytes:
        fh, offset, whence, _ = _LSEEK_IN.unpack_from(call.body)
        return struct.pack("<Q", await (await self._kinds.handle(fh)).seek(offset, whence))
