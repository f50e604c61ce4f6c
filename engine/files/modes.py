"""In which mode the kernel has a file, and which of its blocks the channel may answer for.

Invariants
- A file is passed through only where it is here whole, and a write to it takes nothing away from it (suid, sgid, file
  capabilities).
- The channel is told of a block only when it is in the backing file.

Owner: the trio thread. A crash leaves nothing of this.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import InodeRow
from aof2.engine.fds import opened
from aof2.engine.files.state import Mode, NodeFlags, OpenFile, stream_of
from aof2.engine.kinds.catalogued import CAPABILITY
from aof2.engine.local.handles import ObjectHandle
from aof2.engine.local.reserve import is_no_room

if TYPE_CHECKING:
    from aof2.engine.files.table import Files

# Every so many blocks one is kept back: reading it comes here, and so the read-ahead hears how far a reader is.
MILESTONE_BLOCKS: Final = 16
SPECIAL_BITS: Final = 0o6000


class Modes:
    """Chooses modes, and registers files at the channel."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._volume = files.volume
        self._block_bytes = files.block_bytes
        self.passthrough = True  # whether the kernel can

    # -- choosing ----------------------------------------------------------------------------------------------

    def for_writing(self, file: OpenFile, row: InodeRow) -> Mode:
        if not self.passthrough or file.partial or self._is_special(row):
            return Mode.RANGED
        return Mode.PASSTHROUGH if self._files.room.lets_pass(file.tenant) else Mode.RANGED

    def _is_special(self, row: InodeRow) -> bool:
        """Whether a write by another user has to take something away from the file: the kernel must ask."""
        if row.mode & SPECIAL_BITS:
            return True
        return self._volume.catalog.get(stream_of(row.ino), t.XATTRS, (row.ino, CAPABILITY)) is not None

    async def choose(self, file: OpenFile, row: InodeRow, *, writes: bool) -> Mode:
        if file.dirty:
            if writes:
                return self.for_writing(file, row)
            return Mode.PASSTHROUGH if self.passthrough and not file.partial else Mode.RANGED
        base = file.source
        await self._volume.hydrator.attach(base)
        if base.fully_resident and self.passthrough:
            await self._volume.hydrator.prove(base)
            if base.fully_resident:
                self._volume.hydrator.ensure_backing(base)
                return Mode.PASSTHROUGH
        return Mode.RANGED

    # -- telling the channel -----------------------------------------------------------------------------------

    def ensure_registered(self, file: OpenFile, row: InodeRow) -> None:
        if file.channel.registered:
            return
        if file.base is not None:
            file.open_base()
            try:
                self._volume.hydrator.ensure_backing(file.base)
            except OSError as e:
                if file.dirty or not is_no_room(e):
                    raise
                return  # a read needs no room on the disk: each one is answered here, from memory
            self.register(file, row, file.base.fd)
            if file.channel.mode is Mode.PASSTHROUGH and not file.dirty and self._is_only_ours(file.base):
                file.base.close_file()  # the channel has its own: one descriptor less for each of thousands
            return
        with opened(file.path, os.O_RDWR) as fd:
            self.register(file, row, fd)

    @staticmethod
    def _is_only_ours(base: ObjectHandle) -> bool:
        """Whether nothing else needs its descriptor: what came in is recorded, and not just being synced."""
        return base.holds_data and not base.added and base.users == 1

    def register(self, file: OpenFile, row: InodeRow, fd: int) -> None:
        """The channel serves the file from this descriptor, which stays the caller's."""
        channel = file.channel
        all_present = channel.mode is Mode.PASSTHROUGH
        bits = int(NodeFlags.ALL_PRESENT if all_present else NodeFlags.NONE)
        if not file.dirty:
            bits |= NodeFlags.STILL
        channel.special = self._is_special(row)
        if channel.special:
            bits |= NodeFlags.SUID
        count = 0 if all_present or file.base is None else file.base.block_count
        self._files.kernel.node(
            file.ino, fd, mode=channel.mode or Mode.RANGED, flags=bits, block_bytes=self._block_bytes, block_count=count
        )
        channel.registered, channel.masked, channel.told = True, not all_present, 0
        if not all_present and file.base is not None:
            self._tell_present(file)
        if file.dirty:
            self._files.room.tell_ahead(file, file.stat().st_size)

    def _tell_present(self, file: OpenFile) -> None:
        """The blocks that are here, run by run."""
        for first, count in file.source.ready_runs():
            self._files.parts.tell(file, first, count)

    def landed(self, file: OpenFile, first: int, count: int) -> None:
        """Blocks of its base came in: from now on the channel answers for them."""
        if file.dirty:  # the quota counts them already, and now they are this file's
            lengths = (file.source.block_len(block) for block in range(first, first + count))
            file.charged_bytes += sum(map(objects.on_disk, lengths))
            self._files.parts.tell(file, first, count)
            return
        stop = first + count
        while first < stop:
            milestone = -(-first // MILESTONE_BLOCKS) * MILESTONE_BLOCKS
            self._files.parts.tell(file, first, min(milestone, stop) - first)
            first = min(milestone, stop) + 1

    def say_coming(self, file: OpenFile, base: ObjectHandle, first: int) -> None:
        """What is on its way from there to the next block that is kept back."""
        stop = first
        while stop % MILESTONE_BLOCKS and self._volume.hydrator.is_coming(base, stop):
            stop += 1
        if stop > first:
            self._files.kernel.coming(file.ino, first, stop - first)

    def passed(self, file: OpenFile, offset: int, length: int) -> None:
        """Blocks that were kept back and are read now need not come here again."""
        base = file.base
        if base is None or not length:
            return
        first, last = offset // self._block_bytes, (offset + length - 1) // self._block_bytes
        for block in range(-(-first // MILESTONE_BLOCKS) * MILESTONE_BLOCKS, last + 1, MILESTONE_BLOCKS):
            if block < base.block_count and base.is_ready(block):
                self._files.parts.tell(file, block, 1)
