"""copy_file_range between two files that are passed through: the kernel asks for it, past which it would write without
a report. Room is reserved first, as for every byte the engine writes.

Owner: the trio thread; the copy on a worker thread. A crash leaves what was copied so far.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.errors import os_error
from aof2.engine.fds import opened
from aof2.engine.files.state import Mode, OpenFile

if TYPE_CHECKING:
    from aof2.engine.files.handle import Handle
    from aof2.engine.files.table import Files

# Of one request: callers go on from there, and others get a turn.
COPY_BYTES_MAX: Final = 32 << 20


async def copy_range(files: Files, source: Handle, offset_in: int, target: Handle, offset_out: int, length: int) -> int:
    """How much was copied; EOPNOTSUPP where the kernel had better read and write."""
    modes = {source.file.channel.mode, target.file.channel.mode}
    if modes != {Mode.PASSTHROUGH} or source.file.partial:
        raise os_error(errno.EOPNOTSUPP)
    if not target.writes or target.flags & os.O_APPEND or source.file is target.file:
        raise os_error(errno.EOPNOTSUPP)
    length = min(length, COPY_BYTES_MAX, files.volume.settings.cache.hot_bytes // 8)
    size = os.stat(source.file.path).st_size
    length = max(0, min(length, size - offset_in))
    if not length:
        return 0
    await files.content.make_present(target.file, offset_out, length)
    async with files.room.admit(target.file, offset_out, length):
        done = await trio.to_thread.run_sync(_copy, source.file, offset_in, target.file, offset_out, length)
    await files.charges.recharge(target.file)
    return done


def _copy(source: OpenFile, offset_in: int, target: OpenFile, offset_out: int, length: int) -> int:
    with opened(source.path) as fd_in, opened(target.path, os.O_WRONLY) as fd_out:
        return os.copy_file_range(fd_in, fd_out, length, offset_in, offset_out)
