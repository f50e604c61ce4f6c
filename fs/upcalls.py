"""Requests that libfuse does not know or pyfuse3 does not pass on: the channel hands them over, and is answered here.

fallocate, lseek for data and holes, copy_file_range on files that the channel does not hold whole, syncfs, O_TMPFILE.

Owner: the trio thread.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Final

from aof2.engine.files import Files
from aof2.fs.answers import _code
from aof2.fs.channel import Upcall
from aof2.fs.ops import Operations

FALLOCATE: Final = 43
LSEEK: Final = 46
COPY_FILE_RANGE: Final = 47
SYNCFS: Final = 50
_FALLOCATE_IN: Final = struct.Struct("<QQQII")
_LSEEK_IN: Final = struct.Struct("<QQII")


class Upcalls:
    """Answers them."""

    def __init__(self, operations: Operations, files: Files) -> None:
        self._operations = operations
        self._files = files

    async def answer(self, call: Upcall) -> bytes:
        """The body of the reply; OSError with what the kernel is told instead."""
        try:
            return await self._answer(call)
        except OSError:
            raise
        except Exception as e:  # noqa: BLE001
            raise OSError(_code(f"opcode {call.opcode}", e), "") from None

    async def _answer(self, call: Upcall) -> bytes:
        if self._operations.births is not None:
            await self._operations.births.catch_up()
        match call.opcode:
            case 43:
                return await self._fallocate(call)
            case 46:
                return await self._lseek(call)
            case 50:
                await self._files.sync_all()
                return b""
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    async def _fallocate(self, call: Upcall) -> bytes:
        fh, offset, length, mode, _ = _FALLOCATE_IN.unpack_from(call.body)
        await self._files.fallocate(fh, mode, offset, length)
        return b""

    async def _lseek(self, call: Upcall) -> bytes:
        fh, offset, whence, _ = _LSEEK_IN.unpack_from(call.body)
        return struct.pack("<Q", await self._files.seek(fh, offset, whence))
