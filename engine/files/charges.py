"""What dirty files are charged: the quota counts what each takes on the disk, and what is promised to its writers.

Invariant: what the channel wrote of its budget is collected before a file is charged, or it counts twice.

Owner: the trio thread. A crash leaves nothing of this: what is dirty then is charged when it is loaded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aof2.engine.files.state import OpenFile
from aof2.native import small

if TYPE_CHECKING:
    from aof2.engine.files.table import Files


class Charges:
    """The quota's view of dirty files."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def recharge(self, file: OpenFile) -> None:
        """The quota counts the file as it is now."""
        await self.collect(file)
        self.charge(file)

    async def collect(self, file: OpenFile) -> None:
        """What the channel wrote by itself becomes known here."""
        channel = file.channel
        if channel.ranged:
            granted = channel.granted_bytes
            written = await self._files.kernel.collect(file.ino)
            for first, count in written.ranges:
                self._files.parts.touch_blocks(file, first, count)
            # The answer knows nothing of what was granted after the question.
            channel.budget = written.budget_left + channel.granted_bytes - granted

    def charge(self, file: OpenFile, disk_bytes: int | None = None) -> None:
        """Charges a dirty file; what the channel wrote was collected. `disk_bytes`: as the channel found it, with the
        write that is on its way."""
        if not file.dirty:
            return
        if disk_bytes is None:
            try:
                disk_bytes = os.stat(file.path_text).st_blocks * 512
            except FileNotFoundError:
                disk_bytes = 0
        before = file.charged_bytes
        file.charged_bytes = disk_bytes + file.channel.budget + file.pending_bytes
        self._tell(file.tenant, file.charged_bytes - before)

    def charge_all(self, files: Sequence[OpenFile]) -> None:
        """Charges dirty files that are closed, in one look at the disk."""
        change: Counter[str] = Counter()
        for file, disk_bytes in zip(files, small.disk_bytes([file.path_text for file in files]), strict=True):
            change[file.tenant] += disk_bytes - file.charged_bytes
            file.charged_bytes = disk_bytes
        for tenant, size in change.items():
            self._tell(tenant, size)

    def sealed(self, file: OpenFile, disk_bytes: int) -> None:
        """It is clean: from here on the catalog counts so much of it. Where processes read it, the channel may still
        have a budget for it, which stays charged."""
        kept_bytes = file.channel.budget
        self._tell(file.tenant, disk_bytes + kept_bytes - file.charged_bytes)
        file.charged_bytes = kept_bytes

    def give_back_budget(self, file: OpenFile) -> None:
        """No handle is left."""
        if file.dirty:
            self.charge(file)
            return
        self._tell(file.tenant, -file.charged_bytes)
        file.charged_bytes = 0

    def _tell(self, tenant: str, change: int) -> None:
        if change > 0:
            self._files.volume.quota.note_used(tenant, change)
        elif change < 0:
            self._files.volume.evictor.give_back(tenant, -change)
