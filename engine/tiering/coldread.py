"""Reads of the mount as cold scans: what the kernel asks for, in its pieces, from blocks that are fetched once and not
kept.

The kernel asks for up to 1 MiB at a time, not along blocks, several requests at once. So blocks that were fetched wait
in a small buffer for the rest of their readers, and a reader that goes on from piece to piece has the next ones fetched
meanwhile: one scan uses the tenant's parallel requests.

Invariants
- The buffer holds BUFFER_BYTES at most, for all scans together; what a scan has read past leaves it, and all of an
  object leaves with its last scan.
- A block is fetched by one request at a time.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Final

import trio

from aof2.engine.aio import Tasks
from aof2.engine.errors import Aof2Error
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.tiering.coldscan import Block, ColdScanner, left_in_chunk

BUFFER_BYTES: Final = 64 << 20
AHEAD_BYTES_MAX: Final = 16 << 20
SPAN_BYTES: Final = 4 << 20
BEHIND_BLOCKS: Final = 2  # requests come a little out of order

Slot = tuple[Key, int]  # object, block


class _Flight:
    """Blocks on their way."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.done = trio.Event()
        self.blocks: list[Block] = []  # empty: it failed, and each waiter asks again


class _Scan:
    """An object that scans have open."""

    def __init__(self, held: list[str]) -> None:
        self.users = 0
        self.held = held
        self.next_block = 0  # where a reader would go on
        self.frontier = 0  # the first block that no read and no read-ahead asked for
        self.window_blocks = 0


class ColdReads:
    """Of one volume."""

    def __init__(self, scanner: ColdScanner, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._scanner = scanner
        self._buffer_bytes = buffer_bytes
        self._buffer: OrderedDict[Slot, Block] = OrderedDict()
        self._buffered = 0
        self._flights: dict[Slot, _Flight] = {}
        self._scans: dict[Key, _Scan] = {}
        self._tasks = Tasks()

    @property
    def buffered_bytes(self) -> int:
        return self._buffered

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reads ahead."""
        async with self._tasks.running():
            task_status.started()
            await trio.sleep_forever()

    def opened(self, handle: ObjectHandle) -> None:
        """One more reader scans the object; garbage collection leaves its blobs alone."""
        scan = self._scans.get(handle.key)
        if scan is None:
            scan = self._scans[handle.key] = _Scan(self._scanner.hold(handle))
        scan.users += 1

    def closed(self, key: Key) -> int:
        """One reader is done; how many others scan the object."""
        scan = self._scans[key]
        scan.users -= 1
        if not scan.users:
            del self._scans[key]
            self._scanner.let_go(scan.held)
            self._drop([slot for slot in self._buffer if slot[0] == key])
        return scan.users

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(self, handle: ObjectHandle, offset: int, length: int) -> bytes:
        """The bytes, verified, from wherever they are; short only at the end of the object."""
        end = min(offset + length, handle.size)
        if offset >= end:
            return b""
        await self._scanner.hydrator.attach(handle)
        first, last = offset // handle.block_bytes, (end - 1) // handle.block_bytes
        self._read_ahead(handle, first, last)
        parts: list[Block] = []
        for block in range(first, last + 1):
            start = block * handle.block_bytes
            data = await self._block(handle, block, last)
            parts.append(data[max(offset, start) - start : min(end, start + len(data)) - start])
        self._pass(handle.key, last)
        return b"".join(parts)

    async def _block(self, handle: ObjectHandle, block: int, last: int) -> Block:
        slot = (handle.key, block)
        while True:
            data = self._buffer.get(slot)
            if data is not None:
                self._buffer.move_to_end(slot)
                return data
            flight = self._flights.get(slot)
            if flight is None:
                break
            await flight.done.wait()
            if flight.blocks:
                return flight.blocks[block - flight.first]
        here = await self._scanner.local(handle, block)
        if here is not None:
            return here
        if slot in self._flights or slot in self._buffer:  # another read came first
            return await self._block(handle, block, last)
        return (await self._fetch(handle, block, self._run(handle, block, last)))[0]

    def _run(self, handle: ObjectHandle, first: int, last: int) -> int:
        """How many blocks from there on, up to `last`, are one request: of its chunk, absent, not on their way."""
        most = min(last + 1 - first, left_in_chunk(handle, first), max(1, SPAN_BYTES // handle.block_bytes))
        for count in range(1, most):
            slot = (handle.key, first + count)
            if handle.is_resident(first + count) or slot in self._flights or slot in self._buffer:
                return count
        return most

    async def _fetch(self, handle: ObjectHandle, first: int, count: int) -> list[Block]:
        flight = _Flight(first)
        slots = [(handle.key, block) for block in range(first, first + count)]
        self._flights.update(dict.fromkeys(slots, flight))
        try:
            blocks = await self._scanner.fetch(handle, first, count)
            if handle.key in self._scans:
                self._keep(slots, blocks)
            flight.blocks = blocks
            return blocks
        finally:
            for slot in slots:
                del self._flights[slot]
            flight.done.set()

    # -- the buffer ----------------------------------------------------------------------------------------------

    def _keep(self, slots: list[Slot], blocks: list[Block]) -> None:
        for slot, data in zip(slots, blocks, strict=True):
            self._drop([slot])
            self._buffer[slot] = data
            self._buffered += len(data)
        while self._buffered > self._buffer_bytes:
            self._drop([next(iter(self._buffer))])

    def _drop(self, slots: list[Slot]) -> None:
        for slot in slots:
            data = self._buffer.pop(slot, None)
            self._buffered -= 0 if data is None else len(data)

    def _pass(self, key: Key, last: int) -> None:
        """A reader has read up to block `last`: it does not need what is well behind."""
        gone = last - BEHIND_BLOCKS
        self._drop([(key, block) for block in range(max(0, gone - 8), gone)])

    # -- reading ahead -------------------------------------------------------------------------------------------

    def _read_ahead(self, handle: ObjectHandle, first: int, last: int) -> None:
        scan = self._scans.get(handle.key)
        if scan is None:
            return
        if not scan.next_block - BEHIND_BLOCKS <= first <= max(scan.next_block, scan.frontier) + 1:
            scan.window_blocks, scan.frontier = 0, last + 1  # a look elsewhere
        elif last >= scan.next_block:
            room = min(AHEAD_BYTES_MAX, self._buffer_bytes // 2 // len(self._scans)) // handle.block_bytes
            scan.window_blocks = min(max(1, 2 * scan.window_blocks), room)
        scan.next_block = last + 1
        stop = min(last + 1 + scan.window_blocks, handle.block_count)
        at = max(scan.frontier, last + 1)
        while at < stop:
            if handle.is_resident(at) or (handle.key, at) in self._flights or (handle.key, at) in self._buffer:
                at += 1
                continue
            count = self._run(handle, at, stop - 1)
            self._tasks.begin(self._fetch_ahead, handle, at, count)
            at += count
        scan.frontier = max(scan.frontier, stop)

    async def _fetch_ahead(self, handle: ObjectHandle, first: int, count: int) -> None:
        if any((handle.key, block) in self._flights for block in range(first, first + count)):
            return  # its reader was quicker
        with contextlib.suppress(Aof2Error, OSError):  # the read that gets there meets it again
            await self._fetch(handle, first, count)
