"""Room for writers: hot_bytes holds against them too.

A passthrough writer cannot be asked first, so a file is opened for passthrough only while room is comfortable, and its
growth is watched. With less room WRITE is answered against a budget that is granted here, out of the quota.

Owner: the trio thread.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.files.state import Mode, OpenFile
from aof2.engine.settings.model import FilesTenant

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

log = logging.getLogger(__name__)

WATCH_S: Final = 0.25
PER_WRITER_BYTES: Final = 1 << 30
GRANT_BYTES: Final = 16 << 20


class WriteRoom:
    """Who may write how."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._writers: dict[int, OpenFile] = {}
        self._wake = trio.Event()

    def lets_pass(self, tenant: str) -> bool:
        """Whether a new writer of this tenant may write past us."""
        settings = self._files.volume.settings.tenants.get(tenant)
        mode = settings.write_mode if isinstance(settings, FilesTenant) else "auto"
        if mode != "auto":
            return mode == "passthrough"
        limit = self._files.volume.settings.cache.hot_bytes
        dirty = self._files.dirty_bytes()
        writers = sum(1 for file in self._writers.values() if file.mode is Mode.PASSTHROUGH)
        needed = max(limit // 2, (writers + 1) * min(PER_WRITER_BYTES, limit // 8))
        return limit - dirty >= needed

    def unevictable_bytes(self) -> int:
        """What cannot make way: dirty, sealed but not in the remote, reserved."""
        quota = self._files.volume.quota.usage
        return self._files.dirty_bytes() + self._files.volume.jobs.pending_bytes() + quota.reserved_bytes

    def opened(self, file: OpenFile) -> None:
        self._writers[file.ino] = file
        self._wake.set()

    def closed(self, file: OpenFile) -> None:
        if not file.writers:
            self._writers.pop(file.ino, None)

    async def admit(self, file: OpenFile, offset: int, length: int) -> None:
        """Returns when the bytes may be written; ENOSPC when there will be no room for them."""
        del offset
        reservation = await self._files.volume.evictor.take(file.tenant, length)
        if reservation is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reservation.commit(length)
        file.charged_bytes += length

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            if not self._writers:
                self._wake = trio.Event()
                await self._wake.wait()
            await trio.sleep(WATCH_S)
            for file in list(self._writers.values()):
                self._files.charge(file)
