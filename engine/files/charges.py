"""What dirty files are charged: the quota counts what each takes on the disk, and what is promised to its writers.

Invariant: what the channel wrote of its budget is collected before a file is charged, or it counts twice.

Owner: the trio thread. A crash leaves nothing of this: what is dirty then is charged when it is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from aof2.engine.files.parts import Parts
from aof2.engine.files.state import Kernel, Mode, OpenFile

if TYPE_CHECKING:
    from aof2.engine.volume import Volume


class Charges:
    """The quota's view of dirty files."""

    def __init__(self, volume: Volume, kernel: Kernel, parts: Parts) -> None:
        self._volume = volume
        self._kernel = kernel
        self._parts = parts

    async def recharge(self, file: OpenFile) -> None:
        """The quota counts the file as it is now."""
        await self.collect(file)
        self.charge(file)

    async def collect(self, file: OpenFile) -> None:
        """What the channel wrote by itself becomes known here."""
        if file.mode is Mode.RANGED and file.registered:
            granted = file.granted_bytes
            written = await self._kernel.collect(file.ino)
            for first, count in written.ranges:
                file.written.update(range(first, first + count))
                self._parts.touch_blocks(file, first, count)
            # The answer knows nothing of what was granted after the question.
            file.budget = written.budget_left + file.granted_bytes - granted if file.registered else 0

    def charge(self, file: OpenFile) -> None:
        """Charges a dirty file; what the channel wrote was collected."""
        if not file.dirty:
            return
        try:
            now_bytes = os.stat(file.path).st_blocks * 512
        except FileNotFoundError:
            now_bytes = 0
        now_bytes += file.budget + file.pending_bytes
        before, file.charged_bytes = file.charged_bytes, now_bytes
        self._tell(file.tenant, now_bytes - before)

    def charge_as(self, file: OpenFile, disk_bytes: int) -> None:
        """Charges a dirty file as the channel found it, with the write that is on its way."""
        if not file.dirty:
            return
        disk_bytes += file.budget + file.pending_bytes
        before, file.charged_bytes = file.charged_bytes, disk_bytes
        self._tell(file.tenant, disk_bytes - before)

    def sealed(self, file: OpenFile, disk_bytes: int) -> None:
        """It is clean: from here on the catalog counts so much of it."""
        self._tell(file.tenant, disk_bytes - file.charged_bytes)

    def _tell(self, tenant: str, change: int) -> None:
        if change > 0:
            self._volume.quota.note_used(tenant, change)
        elif change < 0:
            self._volume.evictor.give_back(tenant, -change)
